"""Mixtral 8x7B and 8x22B: Mistral's attention, experts in every layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import LayerSpec, ModelFamily, Only

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 8),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-5),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
    ("router_aux_loss_coef", 0.001),
    ("router_jitter_noise", 0.0),
)

#: Names in files: w1 is the gate, w3 up, w2 down.
NAMES = blocks.MoeNames(block="block_sparse_moe.", gate="w1", up="w3", down="w2")


def layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """Experts everywhere."""
    return (LayerSpec("gqa", "moe"),) * blocks.positive(hf, "num_hidden_layers")


def experts(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Experts as wide as the config's only MLP size; gates of the chosen ones sum to 1."""
    return blocks.softmax_experts(hf, notes, layers(hf), "intermediate_size", True)


FAMILY = ModelFamily(
    name="mixtral",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, blocks.windows, experts),
    layers=layers,
    rules=partial(blocks.decoder_rules, moe=NAMES),
    only=(
        *blocks.ONLY,
        Only(
            "router_jitter_noise",
            (0.0, 0),
            "transformers multiplies the experts' input with the noise too, Megatron-Core only the "
            "router's; set it to 0.",
        ),
    ),
    inert=(
        *blocks.INERT,
        *blocks.MOE_INERT,
    ),
    aliases=(("num_local_experts", "num_experts"),),
)
