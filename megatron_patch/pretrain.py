"""Pretraining and continued pretraining on indexed token files.

torchrun --nproc-per-node 8 -m megatron_patch.pretrain --hf-model DIR --data-path PREFIX ...
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_patch.training.args import Plan


def main(argv: list[str]) -> int:
    """`megatron-patch pretrain`, also the module that torchrun starts.

    Args:
        argv: command line without the program.

    Returns:
        Exit status: 0, or 2 for a message to the user.
    """
    if {"--help", "-h", "--help-all"} & set(argv):
        from megatron_patch.training.args import help_text

        print(help_text("python -m megatron_patch.pretrain", "--help-all" in argv))
        return 0
    from megatron_patch.training import run

    if "--sft" in argv:
        print("error: --sft is fine-tuning: python -m megatron_patch.sft", file=sys.stderr)
        return 2
    return run.train(run.Recipe("pretrain", _datasets, _forward_step, finish=_export), argv)


def _datasets(samples: list[int], vp_stage: int | None = None) -> object:
    from megatron_patch.data.pretrain_dataset import datasets_provider

    return datasets_provider(samples, vp_stage)


#: Upstream calls the provider on every rank only when this is set.
_datasets.is_distributed = True  # type: ignore[attr-defined]


def _forward_step(data_iterator, model, return_schedule_plan=False):  # type: ignore[no-untyped-def]
    from megatron_patch.training.step import forward_step

    return forward_step(data_iterator, model, return_schedule_plan)


def _export(plan: Plan) -> None:
    from megatron_patch.training import sft

    sft.export(plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
if __name__ == "__mp_main__":  # the writer of asynchronous checkpoints, or the server of its forks
    from megatron_patch.util import die_with_starter

    die_with_starter()
