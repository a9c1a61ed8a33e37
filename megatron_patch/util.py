"""Small helpers that every room shares. Standard library only."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A mistake the user can mend: the message names the flag or file, the numbers and the remedy.

    Command-line entry points print it as ``error: ...`` and exit with ``status``, without a
    traceback.
    """

    status = 2


class RankLost(UserError):
    """Another rank or node has gone; the same command may be started again as it is."""

    status = 75  # EX_TEMPFAIL of sysexits.h


class Once(argparse.Action):
    """A flag that may be given under several names, but not with several values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value.

        Raises:
            UserError: Another one was given before; names both.
        """

        def words(value: Any) -> str:
            return " ".join(map(str, value)) if isinstance(value, list) else str(value)

        given: dict[str, tuple[str | None, Any]] = namespace.__dict__.setdefault("_given", {})
        if self.dest in given and given[self.dest][1] != values:
            first, value = given[self.dest]
            raise UserError(
                f"{first} {words(value)} and {option_string} {words(values)} are the same setting "
                "with two values; keep one of them"
            )
        given[self.dest] = (option_string, values)
        setattr(namespace, self.dest, values)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may take; NaN and infinities never are among them.

    Attributes:
        low: Lowest number, or None.
        high: Highest number, or None.
        above: ``low`` itself is excluded.
        below: ``high`` itself is excluded.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    def wanted(self, value: object) -> str | None:
        """What is needed in place of ``value``, as words; None where it is a number in range."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "a number"
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        low, high = self.low, self.high
        few = low is not None and (value < low or (value == low and self.above))
        many = high is not None and (value > high or (value == high and self.below))
        if not few and not many:
            return None
        least = f"{'more than' if self.above else 'at least'} {low}"
        most = f"{'less than' if self.below else 'at most'} {high}"
        if low is None or high is None or high > 1:
            return least if few else most
        return f"{least} and {most}"


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write ``content`` so that a reader sees the old file or the whole new one, never a part.

    Args:
        path: Target; its directory must exist. An existing file is replaced and keeps its mode.
        content: Bytes, or text that is written as UTF-8 without newline translation.

    Raises:
        OSError: The directory is missing or not writable; no temporary file is left behind.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        try:
            mode = target.stat().st_mode & 0o7777
        except FileNotFoundError:
            mode = 0o666 & ~_umask()
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def write_problem(directory: str | os.PathLike[str], size: int = 1 << 22) -> str | None:
    """Why ``size`` bytes cannot be written to ``directory`` at this moment; None where they can."""
    try:
        with tempfile.TemporaryFile(dir=directory) as handle:
            handle.write(bytes(size))
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as problem:
        return f"{problem.strerror} ({directory})"
    return None


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable where the file system allows opening a directory."""
    try:
        fd = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass  # some network file systems refuse fsync on a directory; the data itself is synced
    finally:
        os.close(fd)


def _umask() -> int:
    """The process's umask; the call can only read it by setting it."""
    current = os.umask(0o022)
    os.umask(current)
    return current


def after_closed_pipe() -> int:
    """Status of a program whose reader has gone (``... | head``), after nothing more is printed.

    The interpreter's own flush at exit would complain about the pipe.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def column(text: str, width: int) -> str:
    """The left part of a line, padded to ``width``; two blanks behind one that fills it."""
    return text.ljust(width) if len(text) < width else f"{text}  "


def human_bytes(count: float) -> str:
    """``count`` bytes in binary units: ``1536`` -> ``"1.5 KiB"``, ``512`` -> ``"512 B"``."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while abs(count) >= 1024 and power < len(units) - 1:
        count /= 1024
        power += 1
    return f"{count:.1f} {units[power]}"


def human_count(count: float) -> str:
    """``count`` things in decimal units: ``1_720_000_000`` -> ``"1.72B"``, ``950`` -> ``"950"``."""
    units = ("", "K", "M", "B", "T")
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count /= 1000
        power += 1
    digits = f"{count:.0f}" if power == 0 or abs(count) >= 999.5 else f"{count:.3g}"
    return digits + units[power]


#: Linux: the signal that the kernel sends to a process whose parent ends (prctl(2)).
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Be killed by the kernel when the parent process ends, however that ends; Linux only.

    Args:
        parent: its id, known from before it could have ended.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it had ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_starter() -> None:
    """Be killed when the parent ends, and have the same happen to every process forked from here.

    A process that multiprocessing starts afresh calls it as it imports the run's main module.
    """
    die_with(os.getppid())
    let_forks_die_with_this()


_forks_die = False


def let_forks_die_with_this() -> None:
    """Have every process that Python forks from this one end with it; idempotent.

    Data loaders' workers, checkpoint writers and their queues outlive a ``kill -9`` otherwise.
    """
    global _forks_die
    if _forks_die or not hasattr(os, "register_at_fork"):
        return
    _forks_die = True
    parent = [os.getpid()]

    def before() -> None:
        parent[0] = os.getpid()

    os.register_at_fork(before=before, after_in_child=lambda: die_with(parent[0]))
