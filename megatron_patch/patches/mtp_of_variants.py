"""Multi-token prediction after layers of which some have another attention (Gated DeltaNet).

Upstream asks for the decoder's layers once more to take the last one, by a function that refuses
models with such layers; the function that knows them is beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patch.patches.registry import Patch

NAME = "mtp-of-variants"


def variants(mtp_block_spec: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the making of the layers' specs."""

    @functools.wraps(mtp_block_spec)
    def wrapper(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        inner = config.transformer
        if inner.mtp_num_layers is None or inner.experimental_attention_variant is None:
            return mtp_block_spec(config, transformer_layer_spec, vp_stage)
        last = specs.get_transformer_layer_with_experimental_attention_variant_spec(inner)[-1]
        fused = inner.transformer_impl == "transformer_engine"
        return get_gpt_mtp_block_spec(inner, last, use_transformer_engine=fused, vp_stage=vp_stage)

    return wrapper


PATCHES = (
    Patch(
        name=NAME,
        target="megatron.training.models.gpt.mtp_block_spec",
        mode="wrap",
        func="megatron_patch.patches.mtp_of_variants:variants",
        fingerprint=("3996cf4ef4d2d91e",),
        why="a model with Gated DeltaNet and multi-token prediction ends in an AssertionError "
        "while it is built",
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/models/gpt.py",
        remove_when="mtp_block_spec builds models with experimental_attention_variant",
    ),
)
