"""GLM-4.5, 4.5-Air and 4.6: grouped queries rotated in part, sigmoid routing with a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks, experts
from megatron_patch.models.family import ModelFamily

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-5),
    ("tie_word_embeddings", False),
    ("attention_bias", False),
    ("attention_dropout", 0.0),
    ("use_qk_norm", False),
    ("partial_rotary_factor", 0.5),
    ("n_group", 1),
    ("topk_group", 1),
    ("norm_topk_prob", True),
    ("routed_scaling_factor", 1.0),
)


def attention(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Biases on query, key and value, norms on query and key heads, each where asked for."""
    return {
        "add_qkv_bias": hf.require("attention_bias", bool),
        "qk_layernorm": hf.require("use_qk_norm", bool),
    }


FAMILY = ModelFamily(
    name="glm4_moe",
    hf_defaults=HF_DEFAULTS,
    args=(
        blocks.decoder,
        attention,
        experts.experts,
        experts.sigmoid_router,
        # No loss balances the experts besides the bias; --moe-aux-loss-coeff adds one.
        blocks.constants(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.0),
    ),
    layers=experts.layers("gqa"),
    rules=blocks.decoder_rules,
    only=blocks.ONLY,
    inert=(
        *blocks.INERT,
        ("output_router_logits", "what transformers returns; this family has no balancing loss"),
    ),
    partial_rotary=True,
    mtp=experts.mtp_layers("gqa"),
    details=lambda hf: {"groups_by_best": experts.groups_by_best(2)(hf)},
    copies=blocks.mtp_copies,
    aliases=(
        ("num_local_experts", "n_routed_experts"),
        ("num_mtp_layers", "num_nextn_predict_layers"),
    ),
)
