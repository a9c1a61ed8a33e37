"""Where a run goes on from: which step, what it has read, and whether its files are whole.

Read from the checkpoint itself, before torch is imported, so that a damaged one or a bent schedule
is named before the first GPU second, alike on every rank.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from megatron_patch.patches.tracker_file import TRACKER, check_tracker
from megatron_patch.util import UserError


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from.

    Attributes:
        folder: Directory of the step.
        iteration: Steps done; 0 for a released model.
        samples: Sequences read so far.
        args: Arguments of the run that wrote it; empty for a converted model.
        warmup: Sequences of its linear warm-up; None where it does not say.
    """

    folder: Path
    iteration: int
    samples: int
    args: Mapping[str, Any]
    warmup: int | None = None


#: Folders of a run directory that a run writes to.
FOLDERS = ("checkpoints", "logs", "tensorboard")


def check_output(output: str | os.PathLike[str], *, start: bool = False) -> None:
    """The run directory can be made, or used as it is.

    Args:
        output: ``--output-dir``.
        start: The run starts here and now, so the rights to write count too.

    Raises:
        UserError: A file is in the way, or the directory cannot be written to.
    """
    folder = Path(output)
    for path in (folder, *folder.parents, *(folder / name for name in FOLDERS)):
        if path.exists() and not path.is_dir():
            raise UserError(
                f"--output-dir {output}: {path} is a file, a directory is needed; give another name"
            )
        if start and path.is_dir() and (path == folder or folder not in path.parents):
            if not os.access(path, os.W_OK | os.X_OK):
                raise UserError(
                    f"--output-dir {output}: {path} cannot be written to; give another place, or "
                    "get the rights"
                )
            start = False  # what is above the nearest directory need not be written to


def lock(output: Path) -> IO[bytes]:
    """Hold a run directory, which one run at a time may write, until the file is closed.

    Raises:
        UserError: another process of this or another node holds it.
    """
    handle = (output / ".lock").open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise UserError(
            f"another run is writing {output} at this moment; wait for it or give another "
            "--output-dir"
        ) from None
    except OSError:
        pass  # a file system without locks
    return handle


def steps(directory: str | os.PathLike[str]) -> list[str]:
    """Names of the whole checkpoints below ``directory``, in order.

    A save writes its ``metadata.json`` last, so a directory without it is an unfinished one.
    """
    return sorted(
        folder.name
        for folder in Path(directory).glob("iter_*")
        if (folder / "metadata.json").exists() or list(folder.glob("mp_rank_*"))
    )


def latest(directory: str | os.PathLike[str]) -> str | None:
    """Name of the directory that the tracker file of ``directory`` points to; None without one.

    Raises:
        UserError: The tracker file is gone, empty or foreign, or what it names is not there.
    """
    place = Path(directory)
    tracker = place / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        whole = steps(place)
        if whole:
            raise UserError(
                f"{tracker} is missing, and beside it are {', '.join(whole[-3:])}: the run would "
                f"start from random weights and overwrite them. To go on, write the step's number "
                f"into it (echo {int(whole[-1][5:])} > {tracker}); to start anew, give another "
                "--output-dir"
            ) from None
        return None
    except OSError as problem:
        raise UserError(f"{tracker}: {problem.strerror}") from problem
    check_tracker(text, tracker)
    name = text if text == "release" else f"iter_{int(text):07d}"
    if not (place / name).is_dir():
        others = f"there are {', '.join(steps(place)[-3:])}" if steps(place) else "nor another step"
        raise UserError(
            f"{tracker} names {text}, but {place / name} is not there ({others}); bring it back, "
            "or write the number of a step that is there into the file"
        )
    return name


def read(directory: str, step: int | None = None) -> Start | None:
    """The checkpoint in ``directory`` that a run would load; None where there is none.

    Args:
        directory: With the tracker file.
        step: Another step than the tracker's (``--ckpt-step``).

    Raises:
        UserError: It is not there as a whole: which file, and what is missing of it.
    """
    name = latest(directory) if step is None else f"iter_{step:07d}"
    if name is None:
        return None
    folder = Path(directory) / name
    if list(folder.glob("mp_rank_*")):
        return Start(folder, 0 if name == "release" else int(name[5:]), 0, {})  # the old format
    try:
        stamps = [entry.stat().st_mtime_ns for entry in sorted(folder.iterdir())]
        return _whole(folder, tuple(stamps))
    except FileNotFoundError:
        raise UserError(f"--ckpt-step {step}: {folder} is not there") from None
    except UserError as problem:
        raise UserError(f"{problem}{_way_back(folder)}") from None


def _way_back(folder: Path) -> str:
    """How to go on from another whole step than the one in ``folder``; empty without one."""
    others = [other for other in steps(folder.parent) if other != folder.name]
    if not others:
        return ""
    tracker = folder.parent / TRACKER
    return (
        f" Or go on from another step: echo {int(others[-1][5:])} > {tracker} takes {others[-1]}."
    )


def compare_checksums(folder: Path) -> tuple[int, int]:
    """Read a whole checkpoint and compare it with the checksums in it.

    Args:
        folder: Directory of the step.

    Returns:
        Bytes that were compared, and bytes that carry no checksum.

    Raises:
        UserError: Something has changed since it was written: which file and tensor.
    """
    from megatron_patch.convert import dist_io, inspect

    read = (0, 0)
    found = dist_io.read_checkpoint(dist_io.find_checkpoint(folder))
    for compared, bare, damage in inspect.verify(found, min(4, os.cpu_count() or 1)):
        if damage is not None:
            raise UserError(
                f"{damage}; `megatron-patch ckpt verify {folder}` lists all damage. Copy the "
                f"checkpoint again.{_way_back(folder)}"
            )
        read = (compared, bare)
    return read


@lru_cache(maxsize=4)
def _whole(folder: Path, _stamps: tuple[int, ...]) -> Start:
    """The checkpoint in ``folder``; a start asks several times, and large ones take a second."""
    from megatron_patch.convert import dist_io

    found = dist_io.read_checkpoint(dist_io.find_checkpoint(folder))
    common = dist_io.read_common(found)
    arguments = getattr(common.get("args"), "__dict__", {})
    return Start(
        folder,
        0 if folder.name == "release" else int(common.get("iteration", 0)),
        int(arguments.get("consumed_train_samples", 0)),
        arguments,
        (common.get("opt_param_scheduler") or {}).get("lr_warmup_steps"),
    )
