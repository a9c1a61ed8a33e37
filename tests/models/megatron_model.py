"""A Megatron model of a resolved spec in this process; what `verify --logits` uses."""

from __future__ import annotations

from megatron_patch.convert.one_rank import build, logits, one_rank

__all__ = ["build", "logits", "one_rank"]
