"""When a run saves by the clock, and for how long training stands still for it.

Upstream saves by steps and has no hook at a save; `patches/step_metrics.py` puts these around its
functions.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

#: Minutes between checkpoints where nothing else is asked for.
MINUTES = 30.0
#: A save that is due waits for the next evaluation if that comes within this share of the cadence:
#: what is evaluated can become the best checkpoint.
_PATIENCE = 0.25


class Saves:
    """The saves of this process.

    Rank 0's clock decides, and the answer reaches every rank with the figures of a step
    (`training/metrics.py`).

    Args:
        minutes: between checkpoints; None: by steps only.
        steps: of the run; the last one is saved anyway.
        every: also saved at multiples of this step.
        evaluation: steps between evaluations; None without.
        report: called on each rank with the step, the seconds that training stood still, and
            further values of a record.
    """

    def __init__(
        self,
        minutes: float | None,
        *,
        steps: int,
        every: int | None = None,
        evaluation: int | None = None,
        report: Callable[[int, float, dict[str, Any]], None] | None = None,
    ) -> None:
        self._every_seconds = None if minutes is None else 60.0 * minutes
        self._steps, self._every, self._evaluation = steps, every, evaluation
        self._report = report
        self._last = self._begun = time.monotonic()
        self._count = 0
        #: What all ranks have agreed on after the last step.
        self.agreed = False
        #: The last step that this process has saved.
        self.saved: int | None = None
        #: Of an asynchronous save that is not whole yet: step, begin, seconds of standing still.
        self._open: list[tuple[int, float, float]] = []

    def due(self, step: int) -> bool:
        """On rank 0 after a step: whether it is to be saved by the clock."""
        now = time.monotonic()
        self._count += 1
        if self._every_seconds is None or step >= self._steps:
            return False
        if self._every and step % self._every == 0:
            return False  # saved by its number
        if now - self._last < self._every_seconds:
            return False
        if self._evaluation:
            pace = (now - self._begun) / self._count
            wait = -step % self._evaluation * pace
            late = now - self._last - self._every_seconds
            if wait > 0 and wait + late < _PATIENCE * self._every_seconds:
                return False
        return True

    def stood_still(self, step: int, seconds: float, asynchronous: bool) -> None:
        """A save has returned."""
        self._last = time.monotonic()
        self.saved, self.agreed = step, False
        if asynchronous:
            self._open.append((step, self._last - seconds, seconds))
        self._say(step, seconds, {} if not asynchronous else {"asynchronous": True})

    def looked(self, seconds: float, became_whole: bool) -> None:
        """An asynchronous save was looked after, which makes training wait too."""
        if not self._open:
            return
        step, begun, so_far = self._open[0]
        self._open[0] = (step, begun, so_far + seconds)
        if became_whole:
            del self._open[0]
            took = time.monotonic() - begun
            self._say(
                step,
                seconds,
                {"whole_after_seconds": round(took, 6), "in_all": so_far + seconds},
            )
        elif self._report is not None:
            self._report(step, seconds, {})

    def _say(self, step: int, seconds: float, more: dict[str, Any]) -> None:
        if self._report is not None:
            self._report(step, seconds, {"save": True, **more})


#: The saves of this process; set by the entry point, used by the patches in `patches/`.
SAVES: Saves | None = None


def words(step: int, seconds: float, values: dict[str, Any]) -> str:
    """A line about a save."""
    if "whole_after_seconds" in values:
        return (
            f"checkpoint of step {step} is whole {values['whole_after_seconds']:.1f} s after its "
            f"begin; training stood still for {values['in_all']:.2f} s of them"
        )
    if values.get("asynchronous"):
        return (
            f"checkpoint of step {step} is written beside the training, which stood still for "
            f"{seconds:.2f} s"
        )
    return f"checkpoint of step {step}: training stood still for {seconds:.2f} s (save stall)"


def timed_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's `save_checkpoint_and_time`: how long it takes."""
    signature = inspect.signature(original)

    def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        result = original(*args, **kwargs)
        if SAVES is not None:
            from megatron.training import get_args

            step = signature.bind(*args, **kwargs).arguments["iteration"]
            SAVES.stood_still(step, time.monotonic() - begun, bool(get_args().async_save))
        return result

    return save_checkpoint_and_time


def timed_look(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's `maybe_finalize_async_save`: how long it takes, and what it finished."""

    def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> Any:
        if SAVES is None or not SAVES._open:
            return original(*args, **kwargs)
        from megatron.training import async_utils

        begun = time.monotonic()
        queue = async_utils._async_calls_queue
        before = queue.get_num_unfinalized_calls() if queue is not None else 0
        result = original(*args, **kwargs)
        after = queue.get_num_unfinalized_calls() if queue is not None else 0
        seconds = time.monotonic() - begun
        for _ in range(max(1, before - after)):
            SAVES.looked(seconds, after < before)
            seconds = 0.0
        return result

    return maybe_finalize_async_save


def save_by_clock(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's `checkpoint_and_decide_exit`: save where the ranks have agreed to."""
    signature = inspect.signature(original)

    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
        leaving = original(*args, **kwargs)
        if SAVES is not None and SAVES.agreed and not leaving:
            from megatron.training import training

            bound = signature.bind(*args, **kwargs).arguments
            if SAVES.saved != bound["iteration"]:
                training.save_checkpoint_and_time(
                    bound["iteration"],
                    bound["model"],
                    bound["optimizer"],
                    bound["opt_param_scheduler"],
                    bound["num_floating_point_operations_so_far"],
                    bound["checkpointing_context"],
                    train_data_iterator=bound["train_data_iterator"],
                )
        return leaving

    return checkpoint_and_decide_exit
