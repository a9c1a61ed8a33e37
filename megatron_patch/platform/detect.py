"""Where a run happens: on CUDA, or on CPU ranks because the machine has no NVIDIA device at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_patch import _compat
from megatron_patch.util import UserError


def nvidia_device(root: Path = Path("/")) -> str | None:
    """What shows that this machine has an NVIDIA GPU, driver loaded or not; None without one.

    Args:
        root: Where `dev`, `proc` and `sys` are (tests).
    """
    for pattern in ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*"):
        found = sorted(root.glob(pattern))
        if found:
            return str(found[0])
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        try:
            is_gpu = vendor.read_text().strip() == "0x10de" and (
                vendor.with_name("class").read_text().startswith("0x03")
            )
        except OSError:
            continue
        if is_gpu:
            return f"PCI device {vendor.parent.name}"
    return None


def asked_for_gpu(device: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """What asked for a GPU, in the user's words; None if nothing did.

    Args:
        device: value of `--device`.
        environ: the environment.
    """
    if device not in (None, "cpu"):
        return f"--device {device}"
    for name in ("CUDA_VISIBLE_DEVICES", "KUBERNETES_CONTAINER_RESOURCE_GPU"):
        value = environ.get(name, "").strip()
        if value not in ("", "-1", "0") or (name == "CUDA_VISIBLE_DEVICES" and value == "0"):
            return f"{name}={value}"
    return None


def choose(device: str | None = None) -> str:
    """`cuda` or `cpu` for this process. Imports torch.

    Args:
        device: value of `--device`, or None.

    Raises:
        UserError: a GPU is there or was asked for, and CUDA does not come up, with the reason;
            or CPU ranks were asked for beside a GPU that works.
    """
    import torch

    if torch.cuda.is_available():
        if device == "cpu":
            raise UserError(
                "--device cpu, but this machine has a working GPU: drop the flag, or hide the GPUs "
                "too (CUDA_VISIBLE_DEVICES=)"
            )
        return "cuda"
    if device == "cpu":  # said in so many words: no fallback
        return "cpu"
    evidence, asked = nvidia_device(), asked_for_gpu(device)
    if evidence is None and asked is None:
        return "cpu"
    if _compat.torch_cuda_version() is None:
        version = _compat.installed_version("torch")
        reason = f"torch {version} is built without CUDA: install a CUDA build"
    else:
        try:
            torch.cuda.init()
            reason = "torch.cuda.is_available() is False; check CUDA_VISIBLE_DEVICES"
        except Exception as problem:
            reason = str(problem).strip().splitlines()[0]
    what = f"{asked} asks for a GPU" if asked else f"this machine has an NVIDIA device ({evidence})"
    raise UserError(
        f"{what}, but CUDA does not come up: {reason}. "
        "Training does not fall back to CPU; `megatron-patch info` shows the whole set-up"
    )
