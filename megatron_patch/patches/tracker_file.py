"""The checkpoint tracker is emptied before it is written; an empty one ends a run with status 0.

A job killed between the two leaves ``latest_checkpointed_iteration.txt`` empty; the next start
prints "Exiting", trains nothing and tells its scheduler that all went well.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from megatron_patch.patches.registry import Patch
from megatron_patch.util import UserError, atomic_write

TRACKER = "latest_checkpointed_iteration.txt"


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
    """Upstream's storage switch; the tracker file on a local disk is whole, or an error."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Like the builtin; the tracker file is written by rename and checked when it is read.

        Raises:
            UserError: The tracker file to read names no iteration.
        """
        from megatron.core.msc_utils import MultiStorageClientFeature

        local = not MultiStorageClientFeature.is_enabled()  # an object store's put is whole already
        tracker = local and Path(path).name == TRACKER
        if tracker and mode == "w":
            return _AtomicText(path)
        handle = self._storage.open(path, mode, *args, **kwargs)
        if tracker and mode == "r":
            with handle:
                text = handle.read()
            check_tracker(text.strip(), Path(path))
            return io.StringIO(text)
        return handle


def check_tracker(text: str, path: Path) -> None:
    """Refuse what upstream answers with "Exiting" and status 0."""
    if text.isdecimal() or text == "release":
        return
    found = sorted(entry.name for entry in path.parent.glob("iter_*")) or ["no checkpoint"]
    raise UserError(
        f"{path} names no iteration (it was cut off while being written); the folder holds "
        f"{', '.join(found[-3:])}: write the number of the last whole one into it, or delete the "
        "file to start anew"
    )


PATCHES = (
    Patch(
        name="tracker-file",
        target="megatron.training.checkpointing.maybe_msc",
        mode="wrap",
        func="megatron_patch.patches.tracker_file:TrackerSafeStorage",
        evidence="megatron.training.checkpointing.save_checkpoint",
        fingerprint=("9952b9a7d2e60716",),
        why="the tracker file is emptied and then written: a job killed in between leaves it "
        "empty, and the next one ends with exit status 0 before any training",
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/checkpointing.py",
        remove_when="save_checkpoint writes the tracker by rename, and read_metadata raises in "
        "place of calling sys.exit()",
    ),
)
