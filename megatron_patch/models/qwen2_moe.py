"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, routed experts and a gated shared one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 16),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
    ("decoder_sparse_step", 1),
    ("norm_topk_prob", False),
    ("qkv_bias", True),
    ("router_aux_loss_coef", 0.001),
)


def biases(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Biases on query, key and value."""
    return {"add_qkv_bias": hf.require("qkv_bias", bool)}


#: Every other layer, as long as it is below ``max_window_layers``.
windows = blocks.chosen_windows(lambda layer, edge: layer % 2 == 0 and layer < edge)

FAMILY = ModelFamily(
    name="qwen2_moe",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, biases, windows, blocks.moe, blocks.shared_expert),
    layers=blocks.sparse_layers,
    rules=partial(blocks.decoder_rules, moe=blocks.MoeNames(shared="shared_expert.")),
    only=blocks.ONLY,
    inert=(
        *blocks.INERT,
        *blocks.SLIDING_INERT,
        *blocks.MOE_INERT,
    ),
    aliases=(("num_local_experts", "num_experts"),),
)
