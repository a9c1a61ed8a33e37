"""Every step's own values: upstream has no hook at the end of a step or of an evaluation."""

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
)
