"""Qwen3.5 and 3.6, the language model: Qwen3-Next's attention over dense MLPs, vision left out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import LayerSpec, ModelFamily, Only
from megatron_patch.models.qwen3_next import delta, linear_layers, mtp_layers

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 4),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
    ("partial_rotary_factor", 0.25),
)

ONLY = (
    *blocks.ONLY,
    blocks.SLIDING_ONLY,
    Only("attention_bias", (False,), "Megatron has no bias on attention alone."),
    Only("attn_output_gate", (True,), "these models' attention has a gate."),
    Only("output_gate_type", ("swish", "silu"), "Gated DeltaNet's gate is SiLU."),
    Only("mtp_use_dedicated_embeddings", (False,), "Megatron's MTP shares the embedding."),
)

INERT = (
    *blocks.INERT,
    ("vision_config", "the vision tower is left out"),
    ("image_token_id", "the vision tower is left out"),
    ("video_token_id", "the vision tower is left out"),
    ("vision_start_token_id", "the vision tower is left out"),
    ("vision_end_token_id", "the vision tower is left out"),
    ("language_model_only", "the vision tower is left out"),
    ("mamba_ssm_dtype", "precision of states while text is generated"),
    ("mrope_section", "text has one position for all three kinds"),
    ("mrope_interleaved", "text has one position for all three kinds"),
)

LEFT_OUT = ((r"(model\.)?visual\.", "vision tower"),)
MTP_KEY = "mtp_num_hidden_layers"


def layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """Gated DeltaNet and attention in turns, over dense MLPs."""
    return tuple(LayerSpec("delta" if one else "gqa", "dense") for one in linear_layers(hf))


def details(hf: HFConfig) -> dict[str, Any]:
    """Names of the multimodal model's files, or of the language model's alone."""
    return {"prefix": "model.language_model." if hf.nested else "model."}


FAMILY = ModelFamily(
    name="qwen3_5",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, delta),
    layers=layers,
    rules=partial(blocks.decoder_rules, mtp=blocks.QWEN_MTP, delta_apart=True),
    only=ONLY,
    inert=INERT,
    partial_rotary=True,
    mtp=mtp_layers(layers, MTP_KEY),
    details=details,
    left_out=LEFT_OUT,
    mtp_names=r"mtp\.",
    mtp_key=MTP_KEY,
)
