"""Group-limited routing with another rule for the groups than Megatron-Core's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass(frozen=True)
class GroupsByBest:
    """Chooses experts among the groups whose best experts score highest.

    Stands where a router keeps its `RouterReplay`, which is asked for every choice of experts.
    Megatron-Core's own rule counts ``topk // group_topk`` experts of each group. Source:
    ``megatron/core/transformer/moe/moe_utils.py: topk_routing_with_score_function``.

    Attributes:
        best: experts of a group that speak for it: their scores are added.
    """

    best: int

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """``[tokens, experts]`` scores to ``[tokens, topk]`` scores and experts."""
        if num_groups is None or group_topk is None:
            return default(scores, topk, num_groups, group_topk)
        grouped = scores.unflatten(-1, (num_groups, -1))
        chosen = grouped.topk(self.best, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, chosen, False)
        masked = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
        values, experts = masked.topk(topk, dim=-1)
        return values, experts


def choose_groups_by_best(stage: Any, best: int) -> None:
    """Put `GroupsByBest` into every router of a stage.

    Raises:
        ValueError: the fused router is on, which asks nobody.
    """
    for module in stage.modules():
        if isinstance(module, TopKRouter):
            if module.config.moe_router_fusion or module.router_replay is not None:
                raise ValueError(
                    "--moe-router-fusion and routing replay know Megatron-Core's group-limited "
                    "routing only, which is not this model's: drop the flag"
                )
            module.router_replay = GroupsByBest(best)
