"""Adapters of a fine-tuning run: to PEFT's files, and into the weights they were trained beside."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import dist_io
from megatron_patch.convert.rows import Files
from megatron_patch.patches.strict_load import ADAPTER
from megatron_patch.util import UserError, atomic_write

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read(
    folder: str | os.PathLike[str], modules: Iterable[tuple[str, str, str]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Adapters of a checkpoint.

    Args:
        folder: a checkpoint directory, or a run's.
        modules: Hugging Face module, Megatron layer and part; `training.lora.modules`.

    Returns:
        Module -> (A [r, in], B [out, r]).

    Raises:
        UserError: no checkpoint there, or an adapter that it lacks.
    """
    checkpoint = dist_io.read_checkpoint(dist_io.find_checkpoint(folder))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    with contextlib.closing(Files()) as files:
        for module, layer, part in modules:
            parent, _, leaf = layer.rpartition(".")
            stem = f"{parent}{ADAPTER}{leaf}.{part}_"
            found[module] = (
                _tensor(files, checkpoint, f"{stem}A"),
                _tensor(files, checkpoint, f"{stem}B"),
            )
    return found


def _tensor(files: Files, checkpoint: dist_io.Checkpoint, name: str) -> Tensor:
    """A whole tensor; layers of one kind share a key and are rows of it."""
    import torch

    number: tuple[int, ...] = ()
    entry = checkpoint.tensors.get(name)
    if entry is None:
        place = re.fullmatch(r"(.*\.layers)\.(\d+)(\..*)", name)
        if place is not None:
            entry, number = checkpoint.tensors.get(place[1] + place[3]), (int(place[2]),)
    if entry is None:
        raise UserError(
            f"{checkpoint.folder} holds no adapter {name}: it was trained without --lora-rank, or "
            "with other --lora-target-modules"
        )
    shape = entry.shape[len(number) :]
    offset = (*number, *(0 for _ in shape))
    rows = dist_io.RegionRows(files, entry, offset, shape)
    dtype = getattr(torch, entry.dtype)
    out = torch.empty(shape, dtype=dtype)
    buffer = bytearray(out.numel() * out.element_size())
    rows.read(0, shape[0], memoryview(buffer))
    return torch.frombuffer(buffer, dtype=dtype).view(shape).clone()


def write_peft(
    folder: Path,
    adapters: Mapping[str, tuple[Tensor, Tensor]],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    base: str,
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads onto the base model.

    Args:
        folder: made if it is not there.
        adapters: as `read` returns them.
        rank: r.
        alpha: numerator of the scale.
        dropout: of the training.
        base: directory of the model that was fine-tuned.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (a, b) in adapters.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.contiguous()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapters}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }
    atomic_write(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    atomic_write(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def merge(
    folder: Path, adapters: Mapping[str, tuple[Tensor, Tensor]], *, rank: int, alpha: float
) -> int:
    """Add adapters to the weights of a Hugging Face directory, in place, file after file.

    The sum is made in float32 and rounded once to the file's type.

    Args:
        folder: directory with the base model's safetensors.
        adapters: as `read` returns them.
        rank: r.
        alpha: numerator of the scale.

    Returns:
        The number of changed tensors.

    Raises:
        UserError: a weight that an adapter belongs to is not there.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    left = {f"{module}.weight": pair for module, pair in adapters.items()}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            names = list(opened.keys())
            if not set(names) & set(left):
                continue
            tensors = {name: opened.get_tensor(name) for name in names}
            metadata = opened.metadata()
        for name in set(names) & set(left):
            a, b = left.pop(name)
            weight = tensors[name]
            delta = (b.float() @ a.float()) * (alpha / rank)
            tensors[name] = (weight.float() + delta).to(weight.dtype)
        partial = path.with_name(f".{path.name}.partial")
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)
    if left:
        raise UserError(f"{folder} lacks {', '.join(sorted(left)[:3])}, which has an adapter")
    return len(adapters)
