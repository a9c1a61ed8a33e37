"""The wheel ships the compiled dataset helper without a Makefile; start-up runs ``make`` anyway."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path

from megatron_patch.patches.registry import Patch
from megatron_patch.util import UserError


def use_compiled_helper(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Build only where the helper is missing and there is something to build it with."""

    @functools.wraps(compile_helpers)
    def compile_if_missing() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError as error:
            folder = Path(importlib.import_module("megatron.core.datasets").__path__[0])
            if not (folder / "Makefile").exists():
                raise UserError(
                    f"megatron-core's compiled dataset helper does not load ({error}) and {folder} "
                    "has no Makefile to build it: reinstall the wheel made for this Python and "
                    "platform, pip install --force-reinstall --no-deps megatron-core"
                ) from error
            compile_helpers()

    return compile_if_missing


PATCHES = (
    Patch(
        name="dataset-helpers",
        target="megatron.core.datasets.utils.compile_helpers",
        mode="wrap",
        func="megatron_patch.patches.dataset_helpers:use_compiled_helper",
        fingerprint=("40b22f8f471ef852",),
        why="training start runs make in a folder of the wheel that has no Makefile and exits, "
        "though the compiled helper is in the wheel",
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/utils.py",
        remove_when="compile_helpers returns when helpers_cpp can be imported, or the wheel ships "
        "the Makefile",
    ),
)
