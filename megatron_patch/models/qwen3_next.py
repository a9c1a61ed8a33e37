"""Qwen3-Next: Gated DeltaNet in most layers, gated attention rotated in part in the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import LayerSpec, ModelFamily, Only
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 2),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
    ("partial_rotary_factor", 0.25),
    ("decoder_sparse_step", 1),
    ("norm_topk_prob", True),
    ("router_aux_loss_coef", 0.001),
)

#: What files call the shared expert.
NAMES = blocks.MoeNames(shared="shared_expert.")

#: From a configuration to its layers.
Plan = Callable[["HFConfig"], tuple[LayerSpec, ...]]

_KINDS = ("linear_attention", "full_attention")


def linear_layers(hf: HFConfig) -> list[bool]:
    """Which layers have Gated DeltaNet: ``layer_types``, else all but every n-th."""
    count = blocks.positive(hf, "num_hidden_layers")
    interval = hf.typed("full_attention_interval", None, int)
    types = blocks.layer_types(hf, _KINDS)
    if interval is not None:
        blocks.positive(hf, "full_attention_interval")
    by_interval = [bool((i + 1) % (interval or 4)) for i in range(count)]
    found = by_interval if types is None else [kind == _KINDS[0] for kind in types]
    if interval is not None and found != by_interval:
        raise UserError(
            f"{hf.path}: 'layer_types' and 'full_attention_interval' {interval} disagree. Keep "
            f"the right one."
        )
    if all(found) or not any(found):
        raise UserError(
            f"{hf.path}: 'layer_types' (or 'full_attention_interval') leaves no layer of one kind "
            f"among {count}; models of one kind only are not supported."
        )
    return found


def delta(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Sizes of Gated DeltaNet (arXiv 2412.06464) and which layers have it."""
    sizes = {
        f"linear_{name}": blocks.positive(hf, f"linear_{name}")
        for name in (
            "conv_kernel_dim",
            "key_head_dim",
            "value_head_dim",
            "num_key_heads",
            "num_value_heads",
        )
    }
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        raise UserError(
            f"{hf.path}: 'linear_num_value_heads' {sizes['linear_num_value_heads']} is not a "
            f"multiple of 'linear_num_key_heads' {sizes['linear_num_key_heads']}."
        )
    return sizes | {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(linear) for linear in linear_layers(hf)],
        "attention_output_gate": True,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
    }


def layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """Attention as `linear_layers` says, experts where ``decoder_sparse_step`` does."""
    return tuple(
        LayerSpec("delta" if linear else "gqa", layer.mlp)
        for linear, layer in zip(linear_layers(hf), blocks.sparse_layers(hf), strict=True)
    )


def mtp_layers(layers: Plan, key: str) -> Plan:
    """The plan of a layer for multi-token prediction: as the decoder's last one.

    Args:
        layers: The plan of the decoder.
        key: Config key of their number.
    """

    def plan(hf: HFConfig) -> tuple[LayerSpec, ...]:
        count: int = hf.typed(key, 0, int)
        if count not in (0, 1):
            raise UserError(
                f"{hf.path}: {key!r} is {count}; expected 0 or 1: further layers of these models "
                f"share the projection and the last norm, which Megatron-Core does not."
            )
        if count and linear_layers(hf)[-1]:
            raise UserError(
                f"{hf.path}: {key!r} is {count}, but the decoder's last layer is "
                f"{_KINDS[0]!r}; Megatron-Core's layer for multi-token prediction has the last "
                f"one's kind, these models' has {_KINDS[1]!r}. Set it to 0."
            )
        return (layers(hf)[-1],) * count

    return plan


FAMILY = ModelFamily(
    name="qwen3_next",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, delta, blocks.moe, blocks.shared_expert),
    layers=layers,
    rules=partial(blocks.decoder_rules, moe=NAMES, mtp=blocks.QWEN_MTP),
    mtp=mtp_layers(layers, "num_nextn_predict_layers"),
    only=(
        *blocks.ONLY,
        blocks.SLIDING_ONLY,
        Only("attention_bias", (False,), "Megatron has no bias on attention alone."),
    ),
    inert=(
        *blocks.INERT,
        *blocks.MOE_INERT,
    ),
    aliases=(("num_local_experts", "num_experts"),),
    partial_rotary=True,
    mtp_names=r"mtp\.",
)
