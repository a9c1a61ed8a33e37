"""Qwen3.5's mixtures of experts, the language model: routed experts and a shared one everywhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks, qwen3_5
from megatron_patch.models.family import LayerSpec, ModelFamily, Only
from megatron_patch.models.qwen3_next import NAMES, delta, linear_layers, mtp_layers

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    *(pair for pair in qwen3_5.HF_DEFAULTS if pair[0] != "num_key_value_heads"),
    ("num_key_value_heads", 2),
    ("router_aux_loss_coef", 0.001),
)


def layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """Gated DeltaNet and attention in turns, over experts."""
    return tuple(LayerSpec("delta" if one else "gqa", "moe") for one in linear_layers(hf))


def experts(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """The gates of the chosen experts sum to 1, whatever the file says of it."""
    return blocks.softmax_experts(hf, notes, layers(hf), "moe_intermediate_size", True)


FAMILY = ModelFamily(
    name="qwen3_5_moe",
    hf_defaults=HF_DEFAULTS,
    args=(
        partial(blocks.decoder, width="moe_intermediate_size"),
        delta,
        experts,
        blocks.shared_expert,
    ),
    layers=layers,
    rules=partial(blocks.decoder_rules, moe=NAMES, mtp=blocks.QWEN_MTP, delta_apart=True),
    stacks=blocks.expert_stacks,
    only=(
        *qwen3_5.ONLY,
        Only("mlp_only_layers", ([],), "transformers has experts in every layer."),
        Only("decoder_sparse_step", (1,), "transformers has experts in every layer."),
        Only("norm_topk_prob", (True,), "transformers always normalises the chosen gates."),
    ),
    inert=(
        *qwen3_5.INERT,
        *blocks.MOE_INERT,
        ("intermediate_size", "no layer is dense"),
    ),
    aliases=(("num_local_experts", "num_experts"),),
    partial_rotary=True,
    mtp=mtp_layers(layers, qwen3_5.MTP_KEY),
    details=qwen3_5.details,
    left_out=qwen3_5.LEFT_OUT,
    mtp_names=r"mtp\.",
    mtp_key=qwen3_5.MTP_KEY,
)
