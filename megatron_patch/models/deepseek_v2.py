"""DeepSeek V2, V2.5, V2-Lite and Coder V2: latent attention, softmax routing."""

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
    ("mlp_bias", False),
    ("first_k_dense_replace", 0),
    ("norm_topk_prob", False),
    ("routed_scaling_factor", 1.0),
    ("topk_method", "greedy"),
)


def details(hf: HFConfig) -> dict[str, Any]:
    """What Megatron's arguments cannot say."""
    return {
        "latent_norm_epsilon": experts.LATENT_NORM_EPSILON,
        "groups_by_best": experts.groups_by_best(1)(hf) if experts.group_limited(hf) else None,
    }


FAMILY = ModelFamily(
    name="deepseek_v2",
    hf_defaults=HF_DEFAULTS,
    args=(
        experts.own_code("configuration_deepseek.", "modeling_deepseek."),
        blocks.common,
        experts.latent_attention,
        experts.experts,
        experts.softmax_router,
        experts.balancing_loss,
    ),
    layers=experts.layers("mla"),
    rules=blocks.decoder_rules,
    only=(
        *experts.ONLY,
        Only("mlp_bias", (False,), "Megatron has no bias on the MLP alone."),
        Only("scoring_func", ("softmax",), "sigmoid scores are DeepSeek V3's."),
        Only("topk_method", ("greedy", "group_limited_greedy"), "the others are DeepSeek V3's."),
        Only(
            "norm_topk_prob",
            (False,),
            "transformers ignores it here and the models' own code does not; no published model "
            "has it.",
        ),
    ),
    inert=(*blocks.INERT, *experts.INERT),
    details=details,
    aliases=(("num_experts", "n_routed_experts"),),
)
