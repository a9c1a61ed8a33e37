"""Qwen3 MoE: Qwen3 attention, routed experts without shared ones, dense layers where asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily, Only

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 4),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
    ("decoder_sparse_step", 1),
    ("norm_topk_prob", False),
    ("router_aux_loss_coef", 0.001),
)


def windows(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """One in every layer, where windows are used: this model reads neither of the other keys."""
    return blocks.windows(hf, notes) if blocks.uses_windows(hf) else {}


FAMILY = ModelFamily(
    name="qwen3_moe",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, blocks.constants(qk_layernorm=True), windows, blocks.moe),
    layers=blocks.sparse_layers,
    rules=blocks.decoder_rules,
    only=(
        *blocks.ONLY,
        Only("attention_bias", (False,), "Megatron has no bias on attention alone."),
    ),
    inert=(
        *blocks.INERT,
        *blocks.SLIDING_INERT,
        *blocks.MOE_INERT,
    ),
    aliases=(("num_local_experts", "num_experts"),),
)
