"""A resume with another learning rate finds none of its parameter groups in the checkpoint.

Upstream pairs current and saved groups by a tuple that contains the peak and last learning rate, so
that `--lr` or `--min-lr` of the command line, which `--override-opt-param-scheduler` promises to
use, ends in a KeyError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_patch.patches.registry import Patch

_RATES = ("max_lr", "min_lr")


def with_current_rates(
    saved: Sequence[dict[str, Any]], current: Sequence[dict[str, Any]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Saved groups with the learning rates that the same groups have now.

    Args:
        saved: parameter groups of the checkpoint.
        current: parameter groups of this optimizer.
        keys: what upstream tells groups apart by.

    Returns:
        Copies of `saved`. A group whose other keys fit several current groups with different rates
        keeps its own: then only the rates tell the groups apart.
    """

    def rest(group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys if key not in _RATES)

    def rates(group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(group.get(key) for key in _RATES)

    out = []
    for group in saved:
        now = {rates(other) for other in current if rest(other) == rest(group)}
        if len(now) == 1 and rates(group) not in now:
            group = {**group, **dict(zip(_RATES, now.pop(), strict=True))}
        out.append(dict(group))
    return out


def distributed(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the distributed optimizer's loading."""

    @functools.wraps(load_state_dict)
    def wrapper(self: Any, state_dict: dict[str, Any]) -> Any:
        from megatron.core.optimizer.optimizer import param_group_identifier_keys as keys

        inner = state_dict.get("optimizer")
        if inner and "param_groups" in inner and self.optimizer is not None:
            groups = with_current_rates(inner["param_groups"], self.optimizer.param_groups, keys)
            state_dict = {**state_dict, "optimizer": {**inner, "param_groups": groups}}
        return load_state_dict(self, state_dict)

    return wrapper


def whole(pair: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the pairing of the optimizers that are not distributed."""

    @functools.wraps(pair)
    def wrapper(current_groups: Any, state_dict_groups: Any) -> Any:
        from megatron.core.optimizer.optimizer import param_group_identifier_keys as keys

        return pair(current_groups, with_current_rates(state_dict_groups, current_groups, keys))

    return wrapper


_UPSTREAM = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/optimizer.py"
_WHEN = "groups are paired without their learning rates, or by name"
_WHY = "a resume with another --lr or --min-lr ends in a KeyError on the parameter groups"

PATCHES = (
    Patch(
        name="changed-lr-distributed",
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
        mode="wrap",
        func="megatron_patch.patches.changed_lr:distributed",
        fingerprint=("cea9cabbbbcc7a61",),
        why=_WHY,
        upstream=_UPSTREAM,
        remove_when=_WHEN,
    ),
    Patch(
        name="changed-lr",
        target="megatron.core.optimizer.optimizer.MegatronOptimizer._filter_and_reorder_param_groups",
        mode="wrap",
        func="megatron_patch.patches.changed_lr:whole",
        fingerprint=("04688b1560ee1e96",),
        why=_WHY,
        upstream=_UPSTREAM,
        remove_when=_WHEN,
    ),
)
