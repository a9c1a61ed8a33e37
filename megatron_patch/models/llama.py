"""Llama 2, 3, 3.1-3.3, CodeLlama, Yi and SmolLM2 dense."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily, Only
from megatron_patch.util import UserError

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
)


def biases(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Biases on all linear layers or on none: Megatron has one switch for them."""
    attention, mlp = hf.typed("attention_bias", False, bool), hf.typed("mlp_bias", False, bool)
    if attention != mlp:
        raise UserError(
            f"{hf.path}: 'attention_bias' is {attention} and 'mlp_bias' is {mlp}; Megatron has "
            f"biases on all linear layers or on none, so both must be the same."
        )
    return {"add_bias_linear": attention}


def theta_before_the_key(hf: HFConfig) -> float | None:
    """10000 for files written before transformers 4.33, whose Llama had no other base.

    The key ``rope_theta`` came with CodeLlama in 4.33; Llama 1 and 2 files, written earlier, lack
    it. A later file without it has lost it, and gets no default.
    """
    version = re.match(r"(\d+)\.(\d+)", str(hf.get("transformers_version", "")))
    if version is None or "rope_theta" in hf or "rope_parameters" in hf:
        return None
    return 10000.0 if (int(version[1]), int(version[2])) < (4, 33) else None


FAMILY = ModelFamily(
    name="llama",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, biases),
    layers=blocks.dense_layers,
    rules=blocks.decoder_rules,
    only=(
        *blocks.ONLY,
        Only("pretraining_tp", (1,), "set it to 1; other values only change rounding."),
        Only("rope_interleaved", (False,), "the weights of these families are not interleaved."),
    ),
    inert=(*blocks.INERT, ("is_llama_config", "written by the trainer of SmolLM2")),
    known_theta=theta_before_the_key,
)
