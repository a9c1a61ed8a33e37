"""Supervised fine-tuning on chats, packed: a Hugging Face directory in, and out.

torchrun --nproc-per-node 8 -m megatron_patch.sft --hf-model DIR --data-path CHATS ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patch.data.sft_dataset import Rows
    from megatron_patch.training.args import Plan


def main(argv: list[str]) -> int:
    """`megatron-patch sft`, also the module that torchrun starts.

    Args:
        argv: command line without the program.

    Returns:
        Exit status: 0, or 2 for a message to the user.
    """
    if {"--help", "-h", "--help-all"} & set(argv):
        from megatron_patch.training.args import help_text

        print(help_text("python -m megatron_patch.sft", "--help-all" in argv))
        return 0
    from megatron_patch.training import run, sft

    tuning = FineTuning()
    recipe = run.Recipe(
        "sft",
        tuning.datasets,
        tuning.forward_step,
        resolve=tuning.resolve,
        adjust=tuning.adjust,
        describe=tuning.describe,
        finish=sft.export,
    )
    return run.train(recipe, argv if "--sft" in argv else ["--sft", *argv])


class FineTuning:
    """What one fine-tuning run knows: its plan and the rows of its data."""

    def __init__(self) -> None:
        self.train: Rows | None = None
        self.valid: Rows | None = None

    # --- before Megatron is imported

    def resolve(self, argv: Sequence[str], **surroundings: Any) -> Plan:
        """The plan of the run; its data is tokenized and packed on the way.

        Args:
            argv: the command line.
            **surroundings: further arguments of `training.args.resolve`.

        Raises:
            UserError: as `training.args.resolve`, or about the data.
        """
        from megatron_patch.training import args, sft

        draft = args.resolve(argv, **surroundings, need_length=False)
        argv = sft.with_weights(draft, argv)
        self.train, self.valid = sft.rows(draft)
        plan = args.resolve(argv, **surroundings, data=self.train)
        sft.complete(plan, self.train, self.valid)
        return plan

    # --- upstream's hooks

    def datasets(self, samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        """Train and validation rows, on TP rank 0 of every stage; others get a broadcast."""
        from megatron.core import mpu

        from megatron_patch.data.sft_dataset import TrainRows, ValidationRows

        assert self.train is not None
        if mpu.get_tensor_model_parallel_rank() != 0:
            return None, None, None
        valid = ValidationRows(self.valid) if self.valid is not None else None
        return TrainRows(self.train, samples[0]), valid, None

    #: Upstream calls the provider on every rank only when this is set.
    datasets.is_distributed = True  # type: ignore[attr-defined]

    def forward_step(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> Any:
        """A row through the model."""
        from megatron_patch.training.step import packed_forward_step

        return packed_forward_step(
            data_iterator, model, return_schedule_plan, name=self._name(model)
        )

    def _name(self, model: Any) -> Any:
        rows = self.train if model.training else self.valid
        assert rows is not None
        return rows.pool.name

    def adjust(self, stages: list[Any], plan: Plan) -> None:
        """Adapters, padding out of FP8 scales, and the parameters that `--freeze` names."""
        from megatron_patch.training import lora, padding, sft

        if plan.own.lora_rank is not None:
            lora.install(stages, plan)
        if plan.own.fp8:
            padding.keep_out(stages)
        sft.freeze(stages, plan.own.freeze or ())

    def describe(self, step: int) -> dict[str, Any]:
        """Real and trained tokens of a step, for its record."""
        assert self.train is not None
        return self.train.describe(step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
if __name__ == "__mp_main__":  # the writer of asynchronous checkpoints, or the server of its forks
    from megatron_patch.util import die_with_starter

    die_with_starter()
