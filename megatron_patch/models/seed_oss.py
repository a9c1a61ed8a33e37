"""Seed-OSS 36B: grouped queries with biases on query, key and value, and dropout in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily, Only
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 8),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
    ("attention_bias", True),
    ("attention_dropout", 0.1),
    ("residual_dropout", 0.1),
)


def biases(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Biases on query, key and value; the head's size has to be in the file."""
    if "head_dim" not in hf:
        raise UserError(
            f"{hf.path}: 'head_dim' is missing. Every size comes from this file: add it "
            f"(transformers would take 128)."
        )
    return {"add_qkv_bias": hf.require("attention_bias", bool)}


FAMILY = ModelFamily(
    name="seed_oss",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, biases),
    layers=blocks.dense_layers,
    rules=blocks.decoder_rules,
    only=(
        *blocks.ONLY,
        Only("attention_out_bias", (False,), "Megatron has no bias on the last projection alone."),
        Only("mlp_bias", (False,), "Megatron has no bias on the MLP alone."),
        Only("pretraining_tp", (1,), "set it to 1; other values only change rounding."),
        Only(
            "residual_dropout",
            (0.0, 0),
            "Megatron's dropout of hidden states covers the embedding too; set it to 0.",
        ),
    ),
    inert=blocks.INERT,
)
