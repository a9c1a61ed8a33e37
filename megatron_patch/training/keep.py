"""Which checkpoints of a run stay: the newest few, and milestones."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

from megatron_patch.patches.tracker_file import TRACKER

_STEP = re.compile(r"iter_(\d+)")
#: A checkpoint on its way out has no name that a run would load.
_LEAVING = ".leaving-"


def superfluous(directory: Path, last: int, every: int | None) -> list[Path]:
    """Checkpoints that `--keep-last` and `--keep-every` let go, oldest first.

    What the tracker file names, and whatever is newer (a save in progress), always stays.

    Args:
        directory: with the tracker file and `iter_*`.
        last: how many of the newest stay, the tracker's among them.
        every: steps that are a multiple of this stay too.
    """
    try:
        newest = int((directory / TRACKER).read_text())
    except (OSError, ValueError):
        return []
    found = sorted(
        (int(match[1]), path)
        for path in directory.glob("iter_*")
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    )
    done = [(step, path) for step, path in found if step <= newest]
    return [path for step, path in done[:-last] if every is None or step % every]


class Keeper:
    """Removes what `superfluous` names, beside the training, whenever the tracker file moves.

    Args:
        directory: the run's checkpoints, on storage that this process sees.
        last: see `superfluous`.
        every: see `superfluous`.
    """

    def __init__(self, directory: Path, last: int, every: int | None) -> None:
        self._directory, self._last, self._every = directory, last, every
        self._seen: int | None = None
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """After a step: start to remove, if a checkpoint was finished since the last look."""
        try:
            stamp = (self._directory / TRACKER).stat().st_mtime_ns
        except OSError:
            return
        if stamp == self._seen or (self._thread is not None and self._thread.is_alive()):
            return
        self._seen = stamp
        self._thread = threading.Thread(target=self._remove, name="keep-last", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for a removal, and do the last one."""
        if self._thread is not None:
            self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for path in superfluous(self._directory, self._last, self._every):
            path.rename(path.with_name(_LEAVING + path.name))
        # Also what an interrupted removal left.
        for path in self._directory.glob(f"{_LEAVING}iter_*"):
            shutil.rmtree(path, ignore_errors=True)
