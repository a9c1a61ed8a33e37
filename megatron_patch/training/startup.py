"""Where the time goes between a process's start and the end of its first step.

One clock a process: :func:`mark` ends a phase, :func:`line` says them all. Standard library only.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: A word of the command line of what starts ranks.
_LAUNCHER = re.compile(rb"torch\.distributed\.run|(.*/)?torchrun|megatron_patch(\.launch)?")


def _process_start(pid: int) -> float:
    """Seconds since the epoch at which a process started.

    Raises:
        OSError: There is no such process, or no /proc.
    """
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, proc(5)
    up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - up + since_boot


def _launcher_start(start: float) -> float:
    """When the process that started this one did, where that is a launcher of ranks."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
        if any(_LAUNCHER.fullmatch(word) for word in words):
            return min(start, _process_start(os.getppid()))
    except OSError:
        pass
    return start


class Clock:
    """Phases of a start-up, one after the other."""

    def __init__(self) -> None:
        """Begin at the start of this process's launcher."""
        try:
            start = _process_start(os.getpid())
        except (OSError, ValueError, IndexError):
            start = time.time()
        self.begun = self._last = _launcher_start(start)
        #: Phase -> seconds, in order.
        self.phases: dict[str, float] = {}
        if start > self.begun:
            self._add("launcher", start)

    def _add(self, phase: str, now: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + max(0.0, now - self._last)
        self._last = now

    def mark(self, phase: str) -> None:
        """End a phase here."""
        self._add(phase, time.time())

    def line(self) -> str:
        """All phases, in seconds."""
        words = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        return f"start-up {self._last - self.begun:.1f} s: {words}"


#: This process's clock, from `begin` to the end of the first step.
_CLOCK: Clock | None = None


def begin() -> None:
    """Start the clock; phases before this are the launcher's and Python's."""
    global _CLOCK
    _CLOCK = Clock()
    _CLOCK.mark("python")


def mark(phase: str) -> None:
    """End a phase; nothing once the first step is done."""
    if _CLOCK is not None:
        _CLOCK.mark(phase)


def end(phase: str) -> str | None:
    """End the last phase and stop the clock.

    Returns:
        The line to print, or None where no clock runs.
    """
    global _CLOCK
    if _CLOCK is None:
        return None
    _CLOCK.mark(phase)
    line, _CLOCK = _CLOCK.line(), None
    return line


def ends(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, whose first call ends a phase before it does anything."""
    waiting = [phase]

    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if waiting:
            mark(waiting.pop())
        return call(*args, **kwargs)

    return marked
