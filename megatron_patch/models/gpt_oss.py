"""GPT-OSS 20B and 120B: attention sinks, windows in every other layer, biased experts in MXFP4."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patch.convert.rules import Stack
from megatron_patch.models import blocks
from megatron_patch.models.family import LayerSpec, ModelFamily, ModelSpec, Only
from megatron_patch.util import Range, UserError

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

HF_DEFAULTS = (
    ("num_key_value_heads", 8),
    ("hidden_act", "silu"),
    ("initializer_range", 0.02),
    ("rms_norm_eps", 1e-5),
    ("tie_word_embeddings", False),
    ("attention_dropout", 0.0),
    ("attention_bias", True),
    ("router_aux_loss_coef", 0.001),
    ("output_router_logits", False),
    ("swiglu_alpha", 1.702),
    ("swiglu_limit", 7.0),
)

#: Names of parts: experts stand in one tensor of each kind.
NAMES = blocks.MoeNames(router="router", joined="gate_up_proj")


def layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """Experts everywhere."""
    return (LayerSpec("gqa", "moe"),) * blocks.positive(hf, "num_hidden_layers")


def attention(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """A sink for every head, biases, and windows in the layers that ``layer_types`` names."""
    if "head_dim" not in hf:
        raise UserError(
            f"{hf.path}: 'head_dim' is missing. Every size comes from this file: add it "
            f"(transformers would take 64)."
        )
    types = blocks.layer_types(hf, blocks.WINDOWED)
    if types is None:
        types = [blocks.WINDOWED[i % 2] for i in range(blocks.positive(hf, "num_hidden_layers"))]
        notes.append("layer_types is not in the file: layers 0, 2, 4, ... have a window")
    return {
        **blocks.windows_in(hf, notes, types),
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        # Grouped experts with biases refuse it.
        "bias_dropout_fusion": False,
    }


def experts(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Experts as wide as the only MLP size, with a clamped SwiGLU: (up + 1) gate sigmoid(a gate).

    The fused activation of Megatron-Core 0.19 clamps before it adds the bias, the plain one after,
    as transformers does.
    """
    balanced = hf.require("output_router_logits", bool)
    found = blocks.softmax_experts(hf, notes, layers(hf), "intermediate_size", True, balanced)
    return found | {
        "swiglu": False,
        "quick_geglu": True,
        "bias_gelu_fusion": False,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": hf.number("swiglu_limit", Range(0, above=True)),
    }


def stacks(spec: ModelSpec) -> tuple[Stack, ...]:
    """The tensors of all experts of a layer."""
    hidden, width = spec.args["hidden_size"], spec.args["moe_ffn_hidden_size"]
    count = spec.args["num_experts"]
    found = []
    for number in range(len(spec.layers)):
        block = f"model.layers.{number}.mlp.experts."
        for name, rows, columns in (
            ("gate_up_proj", 2 * width, hidden),
            ("down_proj", hidden, width),
        ):
            parts = [f"{block}{e}.{name}" for e in range(count)]
            weights, biases = (tuple(f"{p}.{kind}" for p in parts) for kind in ("weight", "bias"))
            shape, inner = (count, columns, rows), (rows, columns)
            found += [
                Stack(f"{block}{name}", shape, weights, inner, transposed=True, always=True),
                Stack(f"{block}{name}_bias", (count, rows), biases, (rows,), always=True),
            ]
    return tuple(found)


FAMILY = ModelFamily(
    name="gpt_oss",
    hf_defaults=HF_DEFAULTS,
    args=(partial(blocks.decoder, formats=blocks.MXFP4), attention, experts),
    layers=layers,
    rules=partial(blocks.decoder_rules, moe=NAMES),
    stacks=stacks,
    only=(
        *blocks.ONLY,
        Only("attention_bias", (True,), "Megatron has biases in attention and experts, or none."),
        Only("swiglu_alpha", (1.702,), "Megatron's activation has this factor in its sigmoid."),
    ),
    inert=(
        *blocks.INERT,
        ("initial_context_length", "original_max_position_embeddings of the rope says it"),
    ),
    aliases=(
        ("num_local_experts", "num_experts"),
        ("experts_per_token", "num_experts_per_tok"),
    ),
)
