"""DeepSeek V3, V3.1 and R1, Moonlight, Kimi K2: latent attention, sigmoid routing with a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks, experts
from megatron_patch.models.family import ModelFamily, Only

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_bias", False),
    ("attention_dropout", 0.0),
    ("n_group", 8),
    ("topk_group", 4),
    ("norm_topk_prob", True),
    ("routed_scaling_factor", 2.5),
)


def details(hf: HFConfig) -> dict[str, Any]:
    """What Megatron's arguments cannot say."""
    return {
        "latent_norm_epsilon": experts.LATENT_NORM_EPSILON,
        "groups_by_best": experts.groups_by_best(2)(hf),
    }


FAMILY = ModelFamily(
    name="deepseek_v3",
    hf_defaults=HF_DEFAULTS,
    args=(
        experts.own_code("configuration_deepseek.", "modeling_deepseek."),
        blocks.common,
        experts.latent_attention,
        experts.experts,
        experts.sigmoid_router,
        experts.balancing_loss,
    ),
    layers=experts.layers("mla"),
    rules=blocks.decoder_rules,
    only=(
        *experts.ONLY,
        Only("scoring_func", ("sigmoid",), "softmax scores are DeepSeek V2's."),
        Only("topk_method", ("noaux_tc",), "the other methods are DeepSeek V2's."),
    ),
    inert=(*blocks.INERT, *experts.INERT),
    mtp=experts.mtp_layers("mla"),
    details=details,
    copies=blocks.mtp_copies,
    aliases=(
        ("num_local_experts", "n_routed_experts"),
        ("num_mtp_layers", "num_nextn_predict_layers"),
    ),
)
