"""Which checkpoints of a run stay, and what `latest` and `best` point to.

The newest few stay, milestones, the one with the lowest validation loss, and the last one before
the loss or the gradient norm jumped.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_patch.patches.tracker_file import TRACKER

_STEP = re.compile(r"iter_(\d+)")
#: A checkpoint on its way out has no name that a run would load.
_LEAVING = ".leaving-"
LATEST, BEST = "latest", "best"


def whole(directory: Path) -> list[tuple[int, Path]]:
    """Checkpoints that the tracker file has passed, in order; a newer one is being saved.

    Args:
        directory: with the tracker file and `iter_*`.
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
    return [(step, path) for step, path in found if step <= newest]


def superfluous(
    directory: Path, last: int, every: int | None, spared: Collection[int] = ()
) -> list[Path]:
    """Checkpoints that `--keep-last` and `--keep-every` let go, oldest first.

    What the tracker file names, and whatever is newer (a save in progress), always stays.

    Args:
        directory: with the tracker file and `iter_*`.
        last: how many of the newest stay, the tracker's among them.
        every: steps that are a multiple of this stay too.
        spared: steps that stay for another reason.
    """
    return [
        path
        for step, path in whole(directory)[:-last]
        if step not in spared and (every is None or step % every)
    ]


def best(directory: Path, losses: Mapping[int, float]) -> Path | None:
    """The checkpoint after which the validation loss was the lowest; None without one.

    Args:
        directory: with the tracker file and `iter_*`.
        losses: step -> validation loss.
    """
    found = [(losses[step], step, path) for step, path in whole(directory) if step in losses]
    return min(found)[2] if found else None


def point(directory: Path, name: str, target: str) -> None:
    """Make `directory/name` a relative link to `target` in it, in one rename.

    Raises:
        OSError: the file system has no links, or something else stands in their place.
    """
    link = directory / name
    if link.is_symlink() and os.readlink(link) == target:
        return
    new = directory / f".{name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(target)
    os.replace(new, link)


class Keeper:
    """Sets the links and removes what `superfluous` names, whenever the tracker file moves.

    It does so beside the training, on rank 0.

    Args:
        directory: the run's checkpoints, on storage that this process sees.
        last: see `superfluous`; None: nothing is removed.
        every: see `superfluous`.
        losses: validation losses of earlier starts, by step.
        jumps: steps of earlier starts at which a figure jumped.
    """

    def __init__(
        self,
        directory: Path,
        last: int | None,
        every: int | None,
        losses: Mapping[int, float] | None = None,
        jumps: Collection[int] = (),
    ) -> None:
        self._directory, self._last, self._every = directory, last, every
        self._losses = dict(losses or {})
        self._jump = max(jumps, default=None)
        self._seen: int | None = None
        self._thread: threading.Thread | None = None
        self._links = True

    def evaluated(self, step: int, loss: float) -> None:
        """The validation loss after a step."""
        self._losses[step] = loss
        self._seen = None

    def jumped(self, step: int) -> None:
        """A figure jumped at a step: the checkpoint before it stays."""
        self._jump = step

    def look(self) -> None:
        """After a step: start to tidy up, if a checkpoint was finished since the last look."""
        try:
            stamp = (self._directory / TRACKER).stat().st_mtime_ns
        except OSError:
            return
        if stamp == self._seen or (self._thread is not None and self._thread.is_alive()):
            return
        self._seen = stamp
        self._thread = threading.Thread(target=self._tidy, name="checkpoints", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for a removal, and do the last one."""
        if self._thread is not None:
            self._thread.join()
        self._tidy()

    def _tidy(self) -> None:
        steps = whole(self._directory)
        lowest = best(self._directory, dict(self._losses))
        if steps and self._links:
            try:
                point(self._directory, LATEST, steps[-1][1].name)
                if lowest is not None:
                    point(self._directory, BEST, lowest.name)
            except OSError as problem:
                self._links = False
                print(f"> {self._directory}: no links latest and best ({problem})", flush=True)
        if self._last is None:
            return
        spared = {step for step, path in steps if path == lowest}
        if self._jump is not None:
            spared |= set([step for step, _ in steps if step < self._jump][-1:])
        for path in superfluous(self._directory, self._last, self._every, spared):
            path.rename(path.with_name(_LEAVING + path.name))
        # Also what an interrupted removal left.
        for path in self._directory.glob(f"{_LEAVING}iter_*"):
            shutil.rmtree(path, ignore_errors=True)
