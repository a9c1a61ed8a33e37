"""Qwen 1.5, 2, 2.5 and QwQ dense: grouped queries with biases on query, key and value."""

from __future__ import annotations

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily

HF_DEFAULTS = (
    ("num_key_value_heads", 32),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
)

#: The layers from ``max_window_layers`` on.
windows = blocks.chosen_windows(lambda layer, edge: layer >= edge)

FAMILY = ModelFamily(
    name="qwen2",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, blocks.constants(add_qkv_bias=True), windows),
    layers=blocks.dense_layers,
    rules=blocks.decoder_rules,
    only=blocks.ONLY,
    inert=blocks.INERT + blocks.SLIDING_INERT,
)
