"""``megatron-patch data index``: what a run would first do with its data, without a GPU.

From the same flags as training it builds the same index (order of documents, samples and blends) in
the same cache, on a login node or in a small job, so that no GPU waits for it. Chats for
fine-tuning (``--sft``) are tokenized into it.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patch.launch.flags import split_flags
from megatron_patch.training import args as arguments
from megatron_patch.util import UserError, human_bytes

if TYPE_CHECKING:
    from megatron_patch.training.args import Plan

USAGE = """\
usage: megatron-patch data index FLAGS

Builds the index of a run's data, without a GPU and without ranks. FLAGS are those of the run, with
--nnodes and --nproc-per-node where it gets them; a launcher's own defaults count too, so the
launcher does it best: bash examples/<family>/run_mcore_<family>.sh FLAGS --data-index

The run with the same flags finds it (same --output-dir or --data-cache-path) and builds nothing.
"""


def settings(plan: Plan) -> Namespace:
    """What the dataset provider reads of Megatron's arguments after their validation.

    Raises:
        UserError: The plan has no length or no data.
    """
    if plan.run is None:
        raise UserError(
            "the run's length is missing, and the index depends on it: --train-tokens, "
            "--train-iters, --train-samples or --epochs"
        )
    if not plan.data.training:
        raise UserError("no data to index: give --data-path PREFIX")
    values = Namespace(**plan.values)
    values.train_iters = plan.run.iters
    values.eval_global_batch_size = values.eval_global_batch_size or values.global_batch_size
    values.planned_train_samples = plan.run.samples
    values.validation_sets = list(plan.validation_sets)
    values.validation_whole = plan.validation_whole
    return values


def build(plan: Plan) -> str | None:
    """Build the index of a pretraining run, or find it.

    Returns:
        The folder, None where the index stands beside the data.

    Raises:
        UserError: as ``settings``.
    """
    values = settings(plan)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_patch import _compat
    from megatron_patch.data import pretrain_dataset

    wanted = _compat.without_ranks(values)
    config, wanted = pretrain_dataset.wanted(values, wanted)
    pretrain_dataset.build_index(config, wanted)
    folder: str | None = config.path_to_cache
    return folder


def _files(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def _say(plan: Plan, folder: Path | None, before: dict[str, int], took: float) -> None:
    for note in plan.notes:
        print(f"> {note}")
    if plan.run is not None:
        print(
            f"> for {plan.run.samples:,} sequences of {plan.values['seq_length']} in steps of "
            f"{plan.values['global_batch_size']}: a run that differs in these (or in data, split, "
            "seed and evaluations) builds its own"
        )
    if folder is None:
        print(f"> the index stands beside the data ({took:.1f} s)")
        return
    now = _files(folder)
    new = {path: size for path, size in now.items() if before.get(path) != size}
    if new:
        size = human_bytes(sum(new.values()))
        print(f"> {len(new)} files, {size}, in {folder} after {took:.1f} s; a run finds them there")
    else:
        print(f"> {folder} holds the whole index already; nothing to build ({took:.1f} s)")


def main(argv: Sequence[str]) -> int:
    """``megatron-patch data index``: 0, or 2 with a sentence for the user."""
    if {"--help", "-h"} & set(argv):
        print(USAGE, end="")
        return 0
    try:
        options, rest = split_flags(argv)
        numbers = {"--nnodes": options.nodes, "--nproc-per-node": options.ranks_per_node}
        given = [w for flag, n in numbers.items() if n is not None for w in (flag, str(n))]
        argv = [*rest, *given]
        sft = any(token.replace("_", "-") == "--sft" for token in argv)
        plan = arguments.resolve(argv, need_length=not sft)
        from megatron_patch.training.parallel import data_problems

        for problem in data_problems(plan):
            raise UserError(problem)
        begun = time.monotonic()
        cache = plan.values["data_cache_path"]
        before = _files(Path(cache)) if cache else {}
        if sft:
            from megatron_patch.training import sft as fine_tuning

            fine_tuning.rows(plan)
        else:
            build(plan)
        _say(plan, Path(cache) if cache else None, before, time.monotonic() - begun)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
