"""A resume with another learning rate or layout of experts does not find its parameter groups.

Upstream pairs current and saved groups by a tuple that contains the peak and last learning rate, so
that `--lr` or `--min-lr` of the command line, which `--override-opt-param-scheduler` promises to
use, ends in a KeyError. The tuple also tells experts apart, which have an optimizer of their own
where they are laid out in another way than the rest (EP above 1, ETP other than TP) and none
elsewhere: a checkpoint of one kind ends in an error at a layout of the other kind, although the
states themselves, stored by parameter, belong to no layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_patch.patches.registry import Patch

#: What belongs to a run, not to the parameters of a group.
_RATES = ("max_lr", "min_lr", "is_expert_parallel")


def with_current_rates(
    saved: Sequence[dict[str, Any]], current: Sequence[dict[str, Any]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Saved groups with the learning rates and the place that the same groups have now.

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


def as_laid_out(state: dict[Any, Any], count: int) -> dict[Any, Any]:
    """Optimizer states in the structure of this run's chain of optimizers.

    A chain of one is saved as it is, a longer one by number. What is loaded has this run's
    structure in its tensors and the saving run's in the rest, mixed in one dict.

    Args:
        state: loaded states of a chain of distributed optimizers.
        count: length of this run's chain.
    """
    numbers = sorted(key for key in state if isinstance(key, int))
    plain = {key: value for key, value in state.items() if not isinstance(key, int)}
    if count > 1 and "param_groups" in plain.get("optimizer", {}):
        return {number: {**plain, **state.get(number, {})} for number in range(count)}
    if count == 1 and numbers and "optimizer" not in plain:
        parts = [state[number] for number in numbers]
        groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
        inner = {**parts[0]["optimizer"], "param_groups": groups}
        return {**parts[0], **plain, "optimizer": inner}
    return state


def chained(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the loading of a chain of optimizers."""

    @functools.wraps(load_state_dict)
    def wrapper(self: Any, state_dict: Any) -> Any:
        if isinstance(state_dict, dict):
            state_dict = as_laid_out(state_dict, len(self.chained_optimizers))
        return load_state_dict(self, state_dict)

    return wrapper


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


def restarted(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the loading of the scheduler: its place is counted from where it was restarted."""

    @functools.wraps(load_state_dict)
    def wrapper(self: Any, state_dict: dict[str, Any]) -> Any:
        from megatron.training import get_args

        args = get_args()
        step = getattr(args, "restart_schedule_at", None)
        if step is not None:
            place = args.consumed_train_samples - step * args.global_batch_size
            state_dict = {**state_dict, "num_steps": place}
        return load_state_dict(self, state_dict)

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
        name="changed-experts",
        target="megatron.core.optimizer.optimizer.ChainedOptimizer.load_state_dict",
        mode="wrap",
        func="megatron_patch.patches.changed_lr:chained",
        fingerprint=("a52ccab6cb646606",),
        why="a resume of a mixture of experts ends in an error where EP or ETP is 1 on one side",
        upstream=_UPSTREAM,
        remove_when="chains of optimizers of any length load each other's states",
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
    Patch(
        name="restart-schedule",
        target="megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.load_state_dict",
        mode="wrap",
        func="megatron_patch.patches.changed_lr:restarted",
        fingerprint=("9a81ff3d3c3de7e7",),
        why="a finished run cannot go on with a new schedule: the scheduler's place is counted "
        "from the first step of all",
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/"
        "optimizer_param_scheduler.py",
        remove_when="upstream has a flag that begins the schedule anew at a step",
    ),
)
