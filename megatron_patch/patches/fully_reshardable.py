"""``fully_reshardable`` optimizer checkpoints corrupt masters and moments behind a padded bucket.

The distributed optimizer gathers its states into one tensor per buffer *without* the padding that
each bucket has at its end, then cuts parameters out of it with positions that *include* that
padding. From the second bucket on every slice is shifted, and the last ones are filled up with
zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from megatron_patch.patches.registry import Patch


def compact_index_map(
    index_map: Mapping[Any, tuple[int, int, int]], padding: Sequence[int]
) -> dict[Any, tuple[int, int, int]]:
    """Positions of parameters once the padding at each bucket's end is left out.

    Args:
        index_map: Parameter -> (start, end, bucket) in elements, padding included.
        padding: Elements of padding at the end of each bucket.

    Returns:
        The same mapping, in the same order, with starts and ends in the unpadded buffer.
    """
    before = [0, *accumulate(padding)]
    return {
        param: (start - before[bucket], end - before[bucket], bucket)
        for param, (start, end, bucket) in index_map.items()
    }


def with_compact_positions(sharded_state: Callable[..., Any]) -> Callable[..., Any]:
    """Let the cutting step see positions of the layout that the gathering step wrote.

    Gathering goes by the buckets' own ranges, so the map may differ while the method runs.
    """

    @functools.wraps(sharded_state)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [(buffer, buffer.param_index_map) for buffer in self.buffers]
        try:
            for buffer, index_map in padded:
                padding = [b.grad_data.numel() - b.numel_unpadded for b in buffer.buckets]
                buffer.param_index_map = compact_index_map(index_map, padding)
            return sharded_state(self, *args, **kwargs)
        finally:
            for buffer, index_map in padded:
                buffer.param_index_map = index_map

    return wrapper


PATCHES = (
    Patch(
        name="fully-reshardable-padding",
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
        ".sharded_param_state_fully_reshardable",
        mode="wrap",
        func="megatron_patch.patches.fully_reshardable:with_compact_positions",
        fingerprint=("b2fc2e08ddd77417",),
        why="--dist-ckpt-optim-fully-reshardable saves shifted fp32 masters and moments when a "
        "gradient bucket is padded: a resumed run's loss jumps, with a warning line only",
        upstream="https://github.com/NVIDIA/Megatron-LM/pull/5077",
        remove_when="the supported line contains Megatron-LM #5077",
    ),
)
