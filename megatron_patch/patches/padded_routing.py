"""Routers of experts miscount tokens where a padding mask leaves some out.

The balancing loss is weighed by its own rank's real tokens times the number of ranks, which is the
number of real tokens of all only where every rank has as many: not with padding at the end of a
pack, cut over sequence or context parallel ranks. And the counts behind the expert bias combine a
mask of tokens with one of tokens and experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patch.patches.registry import Patch


def counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the counting: with a mask, a rank's own tokens are the mean over ranks."""

    @functools.wraps(original)
    def get_tokens_per_expert_and_token_count(
        routing_map: Any, reduce_group: Any, topk: Any = None, with_padding_mask: bool = False
    ) -> Any:
        per_expert, own, total = original(routing_map, reduce_group, topk, with_padding_mask)
        return per_expert, total / reduce_group.size() if with_padding_mask else own, total

    return get_tokens_per_expert_and_token_count


def bias(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the count for the expert bias: the mask gets the experts' dimension."""

    @functools.wraps(original)
    def _apply_expert_bias(self: Any, routing_map: Any, padding_mask: Any = None) -> Any:
        if padding_mask is not None and padding_mask.dim() < routing_map.dim():
            padding_mask = padding_mask.unsqueeze(-1)
        return original(self, routing_map, padding_mask)

    return _apply_expert_bias


_UPSTREAM = (
    "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/router.py"
)

PATCHES = (
    Patch(
        name="padded-balancing-loss",
        target="megatron.core.transformer.moe.moe_utils.get_tokens_per_expert_and_token_count",
        also=("megatron.core.transformer.moe.router.get_tokens_per_expert_and_token_count",),
        mode="wrap",
        func="megatron_patch.patches.padded_routing:counts",
        fingerprint=("1fcb3e87e80a99ff",),
        why="gradients of the balancing loss depend on how padding falls on ranks",
        upstream=_UPSTREAM,
        remove_when="the balancing loss is weighed by the real tokens of all ranks",
    ),
    Patch(
        name="padded-expert-bias",
        target="megatron.core.transformer.moe.router.TopKRouter._apply_expert_bias",
        mode="wrap",
        func="megatron_patch.patches.padded_routing:bias",
        fingerprint=("9bbfda2c7a94cf1e",),
        why="a padding mask together with an expert bias ends in a shape error",
        upstream=_UPSTREAM,
        remove_when="the mask is combined with the map of tokens and experts",
    ),
)
