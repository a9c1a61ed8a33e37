"""A small checkpoint in the form that a run writes, for tests of what is read from one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_patch.convert import dist_io
from megatron_patch.patches.tracker_file import TRACKER


def write_checkpoint(
    folder: Path, step: int = 100, *, batch: int = 8, length: int = 1024, **more: Any
) -> Path:
    """`folder` with one step that has read `batch` sequences of `length` tokens a step."""
    target = folder / f"iter_{step:07d}"
    target.mkdir(parents=True)
    arguments = {
        "global_batch_size": batch,
        "seq_length": length,
        "consumed_train_samples": batch * step,
        **more,
    }
    schedule = {"lr_warmup_steps": 10 * batch, "num_steps": batch * step}
    common = {
        "iteration": step,
        "args": argparse.Namespace(**arguments),
        "opt_param_scheduler": schedule,
    }
    writer = dist_io.DistWriter(target, 0)
    writer.write_object(f"{dist_io.COMMON}/shard_0_1", dist_io.pickled_object(common))
    writer.close()
    dist_io.write_metadata(target, {}, writer.written)
    (folder / TRACKER).write_text(str(step))
    return folder
