"""The checkpoint tracker is emptied before it is written; an empty one ends a run with status 0.

A job killed between the two leaves ``latest_checkpointed_iteration.txt`` empty; the next start
prints "Exiting", trains nothing and tells its scheduler that all went well.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_patch.patches.registry import Patch
from megatron_patch.util import UserError, atomic_write

TRACKER = "latest_checkpointed_iteration.txt"
_CHECKPOINTING = "megatron.training.checkpointing"
_UPSTREAM = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/checkpointing.py"


class _AtomicText(io.StringIO):
    """Text file that reaches its path in one rename, and only if no error ended the block."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = path

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            atomic_write(self._path, self.getvalue())
        super().__exit__(kind, value, traceback)


class TrackerSafeStorage:
    """Upstream's storage switch; only the tracker file on a local disk is replaced in one go."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Like the builtin; the tracker file opened for writing is written by rename."""
        from megatron.core.msc_utils import MultiStorageClientFeature

        local = not MultiStorageClientFeature.is_enabled()  # an object store's put is whole already
        if local and mode == "w" and Path(path).name == TRACKER:
            return _AtomicText(path)
        return self._storage.open(path, mode, *args, **kwargs)


def fail_on_bad_tracker(read_metadata: Callable[[str], Any]) -> Callable[[str], Any]:
    """An unreadable tracker file is an error with a remedy, not an exit with status 0."""

    @functools.wraps(read_metadata)
    def wrapper(tracker_filename: str) -> Any:
        try:
            return read_metadata(tracker_filename)
        except SystemExit as stop:
            folder = Path(tracker_filename).parent
            found = sorted(entry.name for entry in folder.glob("iter_*")) or ["no checkpoint"]
            raise UserError(
                f"{tracker_filename} names no iteration (it was cut off while being written); the "
                f"folder holds {', '.join(found[-3:])}: write the number of the last whole one "
                "into it, or delete the file to start anew"
            ) from stop

    return wrapper


PATCHES = (
    Patch(
        name="tracker-write",
        target=f"{_CHECKPOINTING}.maybe_msc",
        mode="wrap",
        func="megatron_patch.patches.tracker_file:TrackerSafeStorage",
        evidence=f"{_CHECKPOINTING}.save_checkpoint",
        fingerprint=("9952b9a7d2e60716",),
        why="the tracker file is opened for writing and then written: a job killed in between "
        "leaves it empty",
        upstream=_UPSTREAM,
        remove_when="save_checkpoint writes the tracker by rename",
    ),
    Patch(
        name="tracker-read",
        target=f"{_CHECKPOINTING}.read_metadata",
        mode="wrap",
        func="megatron_patch.patches.tracker_file:fail_on_bad_tracker",
        fingerprint=("b66724d72b296c58",),
        why="an empty or damaged tracker file ends the run with exit status 0 before any training",
        upstream=_UPSTREAM,
        remove_when="read_metadata raises in place of calling sys.exit()",
    ),
)
