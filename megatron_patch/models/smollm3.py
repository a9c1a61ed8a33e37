"""SmolLM3: Llama with layers whose queries and keys are not rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.family import ModelFamily
from megatron_patch.models.llama import biases
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 4),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", True),
    ("attention_bias", False),
    ("attention_dropout", 0.0),
    ("mlp_bias", False),
    ("no_rope_layer_interval", 4),
)


def rotated_layers(hf: HFConfig) -> list[bool]:
    """Which layers rotate: ``no_rope_layers`` (1 where they do), else all but every n-th."""
    count = blocks.positive(hf, "num_hidden_layers")
    given = hf.typed("no_rope_layers", None, list)
    if given is None:
        every = blocks.positive(hf, "no_rope_layer_interval")
        return [(layer + 1) % every != 0 for layer in range(count)]
    if len(given) != count or any(type(one) is not int or one not in (0, 1) for one in given):
        raise UserError(
            f"{hf.path}: 'no_rope_layers' has {len(given)} entries; expected {count} "
            f"('num_hidden_layers'), each 1 (rotated) or 0."
        )
    return [bool(one) for one in given]


def attention(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Layers without rotation, which are those with a window where windows are used."""
    rotated = rotated_layers(hf)
    types = blocks.layer_types(hf, blocks.WINDOWED)
    if types is None:
        types = [blocks.WINDOWED[int(turns)] for turns in rotated]
    found = blocks.windows_in(hf, notes, types) if blocks.uses_windows(hf) else {}
    if not all(rotated):
        found["no_rope_freq"] = [int(not turns) for turns in rotated]
    return found


FAMILY = ModelFamily(
    name="smollm3",
    hf_defaults=HF_DEFAULTS,
    args=(blocks.decoder, biases, attention),
    layers=blocks.dense_layers,
    rules=blocks.decoder_rules,
    only=blocks.ONLY,
    inert=(
        *blocks.INERT,
        *blocks.SLIDING_INERT,
        ("no_rope_layer_interval", "no_rope_layers says it where it is in the file"),
        ("pretraining_tp", "the model's code has no such switch"),
    ),
)
