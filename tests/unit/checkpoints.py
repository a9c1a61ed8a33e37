"""A small checkpoint in the form that a run writes, for tests of what is read from one."""

from __future__ import annotations

import argparse
import dataclasses
import io
import pickle
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


def bookkeeping_forms() -> dict[str, Any]:
    """Every form of ``_extra_state`` that users met in checkpoints; absent ones are `ABSENT`."""
    import torch

    metas = {
        "recipe": "delayed",
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.zeros(16, 3),
        "extra_fp8_variables": {"num_gemms": 1},
    }
    old = io.BytesIO()
    torch.save(metas, old)
    return {
        "absent": ABSENT,
        "none": None,
        "empty tensor": torch.empty(0, dtype=torch.uint8),
        "empty file": io.BytesIO(),
        "file": old,
        "bytes": pickle.dumps(metas),
        "bytes of a file": old.getvalue(),
        "byte tensor": torch.frombuffer(bytearray(pickle.dumps(metas)), dtype=torch.uint8),
        "tensor of noise": torch.arange(100, dtype=torch.uint8),
        "a tensor of its own": TENSOR,
        "an empty tensor of its own": EMPTY_TENSOR,
        "another type": ODD_TENSOR,
    }


ABSENT, TENSOR, EMPTY_TENSOR, ODD_TENSOR = (object() for _ in range(4))


def change_bookkeeping(step: Path, drop: str = "") -> dict[str, str]:
    """Give the modules of a checkpoint bookkeeping in every form in turn.

    Args:
        step: Directory of the step; changed in place.
        drop: Key of an entry to remove besides.

    Returns:
        Key -> name of the form.
    """
    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    path = step / dist_io.METADATA
    metadata = pickle.loads(path.read_bytes())
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    if drop:
        del entries[drop]
        metadata.storage_data = storage = {i: s for i, s in storage.items() if i.fqn != drop}
    info = type(next(iter(storage.values())))
    index = type(next(iter(storage)))
    forms = bookkeeping_forms()
    changed = {}
    with (step / "__9_0.distcp").open("wb") as file:

        def record(value: Any) -> Any:
            start = file.tell()
            torch.save(value, file)
            return info(file.name.rpartition("/")[2], start, file.tell() - start)

        keys = [key for key in entries if "_extra_state" in key]
        for number, key in enumerate(keys):
            name = list(forms)[number % len(forms)]
            form, changed[key] = forms[name], name
            del entries[key], storage[index(key)]
            bare = key.partition("/")[0]
            if form in (TENSOR, EMPTY_TENSOR, ODD_TENSOR):
                size = 0 if form is EMPTY_TENSOR else 5
                dtype = torch.uint16 if form is ODD_TENSOR else torch.uint8
                tensor = torch.zeros(size, dtype=dtype)
                chunks = [ChunkStorageMetadata(torch.Size([0]), tensor.shape)] if size else []
                entries[bare] = TensorStorageMetadata(
                    dataclasses.replace(TensorProperties(), dtype=dtype), tensor.shape, chunks
                )
                if size:
                    storage[index(bare, torch.Size([0]), 0)] = record(tensor)
            elif form is not ABSENT:
                entries[key] = BytesStorageMetadata()
                storage[index(key)] = record([form])
    path.write_bytes(pickle.dumps(metadata))
    return changed
