"""Bookkeeping of low-precision kernels in a checkpoint: whatever its form, a strict load goes on.

Transformer Engine keeps recipe, scales and history of maxima of each module under ``_extra_state``:
today as a byte tensor that holds a pickle, earlier as an ``io.BytesIO``, and other tools write raw
bytes, None, or nothing at all. Its modules raise on all but their own form, and upstream then tries
again without being strict, which would let missing weights pass.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from typing import Any

from megatron_patch.patches.strict_load import is_extra_state


def usable(value: Any) -> bool:
    """Whether Transformer Engine 2 takes a value: an empty byte tensor, or one with a pickle.

    Args:
        value: What a checkpoint holds.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
        return False
    try:
        content = value.detach().cpu().numpy().tobytes()
        return not content or any(op.name == "STOP" for op, _, _ in pickletools.genops(content))
    except ValueError:
        return False


def settle(modules: Mapping[str, Any], state: dict[str, Any], prefix: str) -> int:
    """Bring the bookkeeping in a state dict into the one form, where it has another or is absent.

    Args:
        modules: Modules by name.
        state: Changed in place; weights are left alone.
        prefix: What stands before the names in ``state``.

    Returns:
        How many entries held something that could not be used.
    """
    import torch

    lost = 0
    for key in [key for key in state if is_extra_state(key)]:
        if not usable(state[key]):
            lost += state[key] is not None
            state[key] = torch.empty(0, dtype=torch.uint8)
    for name, module in modules.items():
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            key = f"{prefix}{name}{'.' if name else ''}_extra_state"
            state.setdefault(key, torch.empty(0, dtype=torch.uint8))
    return lost


def accept_any_form(stage: Any) -> None:
    """Make loads of a stage indifferent to the form of bookkeeping, and strict about weights.

    Args:
        stage: A `GPTModel` stage.
    """

    def before(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        lost = settle(dict(module.named_modules()), state, prefix)
        if lost:
            print(
                f"note: the low-precision bookkeeping of {lost} modules in the checkpoint is not "
                f"in Transformer Engine 2's form; their FP8 scales start anew",
                flush=True,
            )

    stage.register_load_state_dict_pre_hook(before)
