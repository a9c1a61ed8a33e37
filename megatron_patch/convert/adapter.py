"""Adapters of a fine-tuning run: to PEFT's files, and into the weights they were trained beside."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import dist_io
from megatron_patch.convert.rows import Files
from megatron_patch.patches.strict_load import ADAPTER
from megatron_patch.util import UserError, atomic_write

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_patch.training.lora import Place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read(
    folder: str | os.PathLike[str], places: Iterable[Place]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Adapters of a checkpoint.

    Args:
        folder: a checkpoint directory, or a run's.
        places: where they stand; `training.lora.places`.

    Returns:
        Hugging Face module -> (A [r, in], B [out, r]). Experts come one by one.

    Raises:
        UserError: no checkpoint there, or an adapter that it lacks.
    """
    checkpoint = dist_io.read_checkpoint(dist_io.find_checkpoint(folder))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    layer = ""
    held: dict[str, tuple[Tensor, Tensor]] = {}
    with contextlib.closing(Files()) as files:
        for place in places:
            parent, _, leaf = place.layer.rpartition(".")
            if place.layer != layer:
                layer, held = place.layer, {}
            if place.part not in held:  # else an expert of a tensor that is there already
                stem = f"{parent}{ADAPTER}{leaf}.{place.part}_"
                a, b = (_tensor(files, checkpoint, f"{stem}{side}") for side in "AB")
                held[place.part] = (a, b)
            a, b = held[place.part]
            found[place.module] = (a[place.a], b[place.b])
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
    places: Iterable[Place],
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
        places: where they came from.
        rank: r.
        alpha: numerator of the scale.
        dropout: of the training.
        base: directory of the model that was fine-tuned.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    routed: dict[tuple[str, str], list[Place]] = defaultdict(list)
    plain = set()
    for place in places:
        if place.a:
            routed[place.parent, place.part].append(place)
            continue
        a, b = adapters[place.module]
        plain.add(place.module.rpartition(".")[2])
        tensors[f"base_model.model.{place.module}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{place.module}.lora_B.weight"] = b.contiguous()
    for (parent, part), those in routed.items():
        # PEFT wraps the module once for each parameter, `gate_up_proj` first.
        stem = f"base_model.model.{parent}{'.base_layer' if part == 'gate_up' else ''}.lora_"
        a, b = _experts([(place.a, *adapters[place.module]) for place in those])
        tensors[f"{stem}A.weight"] = a.flatten(0, 1).contiguous()
        tensors[f"{stem}B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(plain),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }
    if routed:
        names = sorted({f"{parent.split('.')[-2]}.experts.{part}_proj" for parent, part in routed})
        config["target_parameters"] = names
    atomic_write(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    atomic_write(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _experts(those: Sequence[tuple[tuple[int, ...], Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A [E, r, in] and B [E, out, r] of a layer; the parts of an expert share their A."""
    import torch

    by_expert: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for expert, a, b in those:
        by_expert[expert].append((a, b))
    order = sorted(by_expert)
    return (
        torch.stack([by_expert[e][0][0] for e in order]),
        torch.stack([torch.cat([b for _, b in by_expert[e]]) for e in order]),
    )


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
