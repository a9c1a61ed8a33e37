"""Loading a checkpoint is strict about weights both ways, and about nothing that holds none.

Upstream's strictness levels either accept a checkpoint with weights that the model lacks (QK-norm,
biases, more layers), or also refuse `_extra_state` entries (FP8 bookkeeping, absent where a
checkpoint was made without Transformer Engine) and the optimizer states that a weights-only start
leaves out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron_patch.patches.registry import Patch
from megatron_patch.util import UserError

#: In the keys of adapters, which start afresh beside weights that have none at all.
ADAPTER = ".adapter_"
#: First parts of keys that are left out on purpose as a whole, e.g. by a weights-only start.
_OPTIONAL = ("optimizer", "rng_state", "rerun_state_machine_state")


def is_extra_state(key: str) -> bool:
    """Whether a key holds a module's bookkeeping instead of weights."""
    return "_extra_state" in key.rsplit(".", 1)[-1]


def _part(key: str) -> str:
    """`optimizer` for `optimizer.state.exp_avg.…` and for `chained_0.optimizer.…`."""
    pieces = key.split("/", 1)[0].split(".")
    if pieces[0].startswith("chained_") and len(pieces) > 1:
        return pieces[1]
    return pieces[0]


def expected_of_checkpoint(checkpoint: Mapping[Any, Any], asked: set[str]) -> dict[Any, Any]:
    """The checkpoint's entries that a load has to ask for.

    Args:
        checkpoint: entries with a `key`.
        asked: keys that any rank asks for.

    Returns:
        The entries without bookkeeping, and without parts that nobody asks for at all.
    """
    parts = {_part(key) for key in asked}
    left_out = {part for part in _OPTIONAL if part not in parts}
    return {
        name: entry
        for name, entry in checkpoint.items()
        if entry.key in asked or not (is_extra_state(entry.key) or _part(entry.key) in left_out)
    }


def _incomplete(checkpoint: Mapping[Any, Any], asked: list[Any]) -> set[str]:
    """Keys of bookkeeping of which a checkpoint has not every entry that is asked for.

    Entries of several layers share a key, and are loaded all or none.

    Args:
        checkpoint: entries by name.
        asked: what all ranks ask for.
    """
    return {
        x.key
        for x in asked
        if is_extra_state(x.key) and getattr(x, "unique_key", x.key) not in checkpoint
    }


def weights_both_ways(validate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's comparison of what is asked for with what there is."""

    @functools.wraps(validate)
    def wrapper(
        sharded_state_dict: Any,
        strict: Any,
        validate_access_integrity: bool,
        local_metadata: Any = None,
        global_metadata: Any = None,
        ckpt_sharded_metadata: Any = None,
    ) -> Any:
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.dict_utils import extract_matching_values

        if ckpt_sharded_metadata is None:
            return validate(
                sharded_state_dict, strict, validate_access_integrity, local_metadata,
                global_metadata, ckpt_sharded_metadata,
            )  # fmt: skip
        there = {entry.key for entry in ckpt_sharded_metadata.values()}
        adapted = any(ADAPTER in key for key in there)
        everyone = [x for rank in global_metadata or [local_metadata or []] for x in rank]
        partial = _incomplete(ckpt_sharded_metadata, everyone)

        def may_lack(key: str) -> bool:
            fresh = ADAPTER in key and not adapted and key not in there
            return fresh or (is_extra_state(key) and (key not in there or key in partial))

        _, sharded_state_dict = extract_matching_values(
            sharded_state_dict, lambda x: may_lack(x.key)
        )
        if local_metadata is not None:
            local_metadata = [x for x in local_metadata if not may_lack(x.key)]
        if global_metadata is not None:
            global_metadata = [[x for x in rank if not may_lack(x.key)] for rank in global_metadata]
        asked = {x.key for rank in global_metadata or [] for x in rank}
        if asked:
            ckpt_sharded_metadata = expected_of_checkpoint(ckpt_sharded_metadata, asked)
        try:
            return validate(
                sharded_state_dict, strict, validate_access_integrity, local_metadata,
                global_metadata, ckpt_sharded_metadata,
            )  # fmt: skip
        except CheckpointingException as error:
            lacking = sorted(asked - there - {k for k in asked if is_extra_state(k)})
            extra = sorted({e.key for e in ckpt_sharded_metadata.values()} - asked)
            if not lacking and not extra:
                raise
            raise UserError(_explain(lacking, extra)) from error

    return wrapper


def _explain(lacking: list[str], extra: list[str]) -> str:
    def some(names: list[str]) -> str:
        rest = f" and {len(names) - 6} more" if len(names) > 6 else ""
        return ", ".join(names[:6]) + rest

    parts = []
    if lacking:
        parts.append(f"the checkpoint lacks {len(lacking)} that the model has: {some(lacking)}")
    if extra:
        parts.append(f"it holds {len(extra)} that the model lacks: {some(extra)}")
    return (
        f"the checkpoint is of another model: {'; '.join(parts)}. Check --hf-model and the "
        "directory the run starts from; nothing was loaded"
    )


PATCHES = (
    Patch(
        name="strict-load",
        target="megatron.core.dist_checkpointing.validation.validate_integrity_and_strict_load",
        also=("megatron.core.dist_checkpointing.serialization.validate_integrity_and_strict_load",),
        mode="wrap",
        func="megatron_patch.patches.strict_load:weights_both_ways",
        fingerprint=("d1bc737693130e55",),
        why="no strictness level refuses weights that the model lacks and accepts a checkpoint "
        "without FP8 bookkeeping, or a weights-only start",
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/"
        "dist_checkpointing/validation.py",
        remove_when="upstream exempts extra state and unrequested parts from raise_all",
    ),
)
