"""Runs the real launcher scripts in a made-up machine: own PATH, own environment, own folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_patch.data import demo

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Place:
    """A working directory with blanks in its name, a folder of stub programs, a tiny model."""

    cwd: Path
    stubs: Path
    model: Path

    def stub(self, name: str, body: str) -> None:
        """Put a shell program on this place's PATH."""
        path = self.stubs / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(
        self, script: str, *flags: str, timeout: float = 120, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """``bash -u examples/SCRIPT FLAGS`` with nothing in the environment but what is said."""
        clean = {
            "PATH": f"{self.stubs}:{os.defpath}:/usr/local/bin",
            "HOME": str(self.cwd),
            "MP_PYTHON": sys.executable,
            **environ,
        }
        return subprocess.run(
            ["bash", "-u", str(ROOT / "examples" / script), *flags],
            env=clean,
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """See ``Place``."""
    cwd, stubs, model = tmp_path / "here it is", tmp_path / "stubs", tmp_path / "a b" / "Tiny $HOME"
    for folder in (cwd, stubs, model):
        folder.mkdir(parents=True)
    demo.write_model(model, None)
    return Place(cwd, stubs, model)
