"""What the training benchmarks share: a run in processes of its own, and text to train on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def ranks(entry: str, world: int, flags: list[str], log: Path) -> int:
    """Run an entry point under torchrun; returns its status.

    Args:
        entry: `pretrain` or `sft`.
        world: number of ranks.
        flags: the entry point's.
        log: gets what it prints.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "-m", f"megatron_patch.{entry}", *flags]
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("wb") as sink:
        return subprocess.run(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode


def end_of(log: Path, lines: int) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def demo_text(folder: Path) -> str:
    """Prefix of the demo's text as token ids, made in `folder`.

    Raises:
        SystemExit: it could not be made; the demo has said why.
    """
    from megatron_patch.data import demo

    if demo.main(["prepare", str(folder / "demo")]):
        raise SystemExit(1)
    return str(folder / "demo" / "demo_text_document")
