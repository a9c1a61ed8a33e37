"""Every step's own values: upstream has no hook at the end of a step, an evaluation or a save."""

from __future__ import annotations

from megatron_patch.patches.registry import Patch

_UPSTREAM = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/training.py"
_WHEN = "the training loop calls a function of the caller after every step"

PATCHES = (
    Patch(
        name="step-metrics",
        target="megatron.training.training.training_log",
        mode="wrap",
        func="megatron_patch.training.metrics:log_step",
        fingerprint=("291426bc5e0ea71b",),
        why="the log line averages over steps (the second line after a start over two) and is "
        "printed on the last rank only",
        upstream=_UPSTREAM,
        remove_when=_WHEN,
    ),
    Patch(
        name="evaluation-metrics",
        target="megatron.training.training.evaluate",
        mode="wrap",
        func="megatron_patch.training.metrics:log_evaluation",
        evidence="megatron.training.training.evaluate_and_print_results",
        fingerprint=("c450b74cf5c3c211",),
        why="evaluation losses are printed on the last rank only and returned to nobody",
        upstream=_UPSTREAM,
        remove_when=_WHEN,
    ),
    Patch(
        name="save-by-clock",
        target="megatron.training.training.checkpoint_and_decide_exit",
        mode="wrap",
        func="megatron_patch.training.saves:save_by_clock",
        fingerprint=("3401c31ca10e7c61",),
        why="checkpoints are saved by numbers of steps only, whose length a user does not know",
        upstream=_UPSTREAM,
        remove_when="the training loop saves by the clock, or asks the caller whether to save",
    ),
    Patch(
        name="save-stall",
        target="megatron.training.training.save_checkpoint_and_time",
        mode="wrap",
        func="megatron_patch.training.saves:timed_save",
        fingerprint=("01cee2ee0eafdac0",),
        why="how long training stands still for a checkpoint is known to a timer's log line only",
        upstream=_UPSTREAM,
        remove_when=_WHEN,
    ),
    Patch(
        name="save-look",
        target="megatron.training.training.maybe_finalize_async_save",
        mode="wrap",
        func="megatron_patch.training.saves:timed_look",
        fingerprint=("cb362ee05d454de4",),
        why="the end of an asynchronous save, and what it costs, is told to nobody",
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/async_utils.py",
        remove_when=_WHEN,
    ),
)
