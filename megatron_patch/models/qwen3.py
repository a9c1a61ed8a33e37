"""Qwen3 dense: grouped queries with per-head QK norm, no biases, explicit head size."""

from __future__ import annotations

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily, Only

HF_DEFAULTS = (
    ("num_key_value_heads", 32),
    ("head_dim", 128),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
)

#: The layers from ``max_window_layers`` on.
windows = blocks.chosen_windows(lambda layer, edge: layer >= edge)

FAMILY = ModelFamily(
    name="qwen3",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, blocks.constants(qk_layernorm=True), windows),
    layers=blocks.dense_layers,
    rules=blocks.decoder_rules,
    only=(
        *blocks.ONLY,
        Only("attention_bias", (False,), "Megatron has no bias on attention alone."),
    ),
    inert=blocks.INERT + blocks.SLIDING_INERT,
)
