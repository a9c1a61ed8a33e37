"""From logical weight names to the keys of today's GPT checkpoints.

Keys are those of a state dict at TP1, PP1 and EP1 in the shape that Transformer Engine's layer
spec gives them: norms are fused into the linear layer that follows, except before experts. When
upstream's model or spec changes, this file does, and no family.
"""

from __future__ import annotations

import re

_MODEL = (
    ("embedding.weight", "embedding.word_embeddings.weight"),
    ("final_norm.weight", "decoder.final_layernorm.weight"),
    ("head.weight", "output_layer.weight"),
)

_LAYER = (
    ("attention.norm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("attention.qkv.weight", "self_attention.linear_qkv.weight"),
    ("attention.qkv.bias", "self_attention.linear_qkv.bias"),
    ("attention.q_norm.weight", "self_attention.q_layernorm.weight"),
    ("attention.k_norm.weight", "self_attention.k_layernorm.weight"),
    ("attention.out.weight", "self_attention.linear_proj.weight"),
    ("attention.out.bias", "self_attention.linear_proj.bias"),
    ("mlp.norm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("mlp.gate_up.weight", "mlp.linear_fc1.weight"),
    ("mlp.gate_up.bias", "mlp.linear_fc1.bias"),
    ("mlp.down.weight", "mlp.linear_fc2.weight"),
    ("mlp.down.bias", "mlp.linear_fc2.bias"),
    ("moe.norm.weight", "pre_mlp_layernorm.weight"),
    ("moe.router.weight", "mlp.router.weight"),
)

#: (logical, sequential experts, grouped experts)
_EXPERT = (
    ("gate_up", "local_experts.{e}.linear_fc1.weight", "linear_fc1.weight{e}"),
    ("down", "local_experts.{e}.linear_fc2.weight", "linear_fc2.weight{e}"),
)

_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_IN_EXPERT = re.compile(r"moe\.experts\.(\d+)\.(\w+)\.weight")


def checkpoint_key(name: str, *, grouped_experts: bool = False) -> str:
    """The state-dict key of a logical weight.

    Args:
        name: ``embedding.weight``, ``layers.3.attention.qkv.bias``,
            ``layers.3.moe.experts.7.down.weight``, ...
        grouped_experts: Experts run as one grouped GEMM, which names its weights otherwise.

    Raises:
        KeyError: No such logical weight (a mistake in the family's rules).
    """
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer is None:
        return dict(_MODEL)[name]
    prefix = f"decoder.layers.{in_layer[1]}."
    in_expert = _IN_EXPERT.fullmatch(in_layer[2])
    if in_expert is None:
        return prefix + dict(_LAYER)[in_layer[2]]
    names = {logical: (sequential, grouped) for logical, sequential, grouped in _EXPERT}
    pattern = names[in_expert[2]][int(grouped_experts)]
    return f"{prefix}mlp.experts.{pattern.format(e=in_expert[1])}"
