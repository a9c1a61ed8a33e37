"""Shared pytest set-up: what a machine cannot run is skipped by marker, and said so at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A developer's own settings must not decide what the tests see.
for _name in ("MP_PYTHON", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_patch.platform.detect import nvidia_device  # noqa: E402


@cache
def gpu_count() -> int:
    """CUDA devices of this machine, without initialising CUDA in the test process."""
    if nvidia_device() is None:
        return 0
    probe = "import torch; print(torch.cuda.device_count())"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return 0
    return int(answer.stdout.strip().splitlines()[-1])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under ``tests/gpu`` is a GPU test; without a GPU those are skipped."""
    for item in items:
        if ROOT / "tests" / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not gpu_count():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, this machine has none"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to whichever process is free, in their order: the long ones of `tests/dist` first.

    A file stays together for the sake of its fixtures, and all of ``tests/gpu`` for the GPU's.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            return "tests/gpu" if path.startswith("tests/gpu/") else path

    config.option.loadscopereorder = False
    return FileScheduling(config, log)


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT
