"""Mistral 7B, Mistral Nemo, Codestral and Small (text): Llama with a sliding window where asked."""

from __future__ import annotations

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily

HF_DEFAULTS = (
    ("num_key_value_heads", 8),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
    ("sliding_window", 4096),
)

FAMILY = ModelFamily(
    name="mistral",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, blocks.windows),
    layers=blocks.dense_layers,
    rules=blocks.decoder_rules,
    only=blocks.ONLY,
    inert=blocks.INERT,
)
