"""Every rank's first checkpoint spawns a manager process, for a queue it then uses by itself.

The process re-imports the main module (seconds, 400 to 660 MB a rank) and outlives a ``kill -9``
of its rank. A synchronous save writes from threads of the rank, so a queue inside the process
will do.
"""

from __future__ import annotations

import functools
import os
import queue
import sys
from collections.abc import Callable
from typing import Any

from megatron_patch.patches.registry import Patch


class InProcessQueue(queue.Queue[Any]):
    """Queue that refuses, rather than loses, results put by another process."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def __reduce__(self) -> Any:
        raise RuntimeError(f"{self._advice()} sent to another process")

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Like the base class, from the process that made the queue only."""
        if os.getpid() != self._process:
            raise RuntimeError(f"{self._advice()} used from another process")
        super().put(item, block, timeout)

    @staticmethod
    def _advice() -> str:
        return (
            "the checkpoint writer's queue is for synchronous saves; asynchronous ones need "
            "--async-save, or patch write-queue left out: it was"
        )


def in_process(get_queue: Callable[..., Any]) -> Callable[..., Any]:
    """An in-process queue unless this run saves asynchronously."""
    own: list[InProcessQueue] = []

    @functools.wraps(get_queue)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _saves_asynchronously():
            # A fork ends with this process (`util.let_forks_die_with_this`), a fresh one need not.
            return get_queue(mp_mode="fork")
        if not own:
            own.append(InProcessQueue())
        return own[0]

    return wrapper


def _saves_asynchronously() -> bool:
    """Megatron's own answer; a program without Megatron's arguments saves as it calls: at once."""
    training = sys.modules.get("megatron.training.global_vars")  # importing it costs seconds
    return bool(getattr(getattr(training, "_GLOBAL_ARGS", None), "async_save", False))


PATCHES = (
    Patch(
        name="write-queue",
        target="megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
        mode="wrap",
        func="megatron_patch.patches.write_queue:in_process",
        fingerprint=("16524bd549f8838e",),
        why="each rank's first synchronous save spawns a manager process that costs seconds and "
        "hundreds of MB and survives the rank's kill -9",
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/dist_checkpointing/"
        "strategies/filesystem_async.py",
        remove_when="synchronous saves stop asking for a cross-process queue",
    ),
)
