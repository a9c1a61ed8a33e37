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
    ("latent.norm.weight", "input_layernorm.weight"),
    ("latent.q.weight", "self_attention.linear_q_proj.weight"),
    ("latent.q_down.weight", "self_attention.linear_q_down_proj.weight"),
    ("latent.q_norm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("latent.q_up.weight", "self_attention.linear_q_up_proj.weight"),
    ("latent.kv_down.weight", "self_attention.linear_kv_down_proj.weight"),
    ("latent.kv_norm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
    ("latent.kv_up.weight", "self_attention.linear_kv_up_proj.weight"),
    ("latent.out.weight", "self_attention.linear_proj.weight"),
    ("attention.sinks", "self_attention.core_attention.softmax_offset"),
    ("attention.out.weight", "self_attention.linear_proj.weight"),
    ("attention.out.bias", "self_attention.linear_proj.bias"),
    ("delta.norm.weight", "self_attention.in_proj.layer_norm_weight"),
    ("delta.in.weight", "self_attention.in_proj.weight"),
    ("delta.conv.weight", "self_attention.conv1d.weight"),
    ("delta.step", "self_attention.dt_bias"),
    ("delta.decay", "self_attention.A_log"),
    ("delta.out_norm.weight", "self_attention.out_norm.weight"),
    ("delta.out.weight", "self_attention.out_proj.weight"),
    ("mlp.norm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("mlp.gate_up.weight", "mlp.linear_fc1.weight"),
    ("mlp.gate_up.bias", "mlp.linear_fc1.bias"),
    ("mlp.down.weight", "mlp.linear_fc2.weight"),
    ("mlp.down.bias", "mlp.linear_fc2.bias"),
    ("moe.norm.weight", "pre_mlp_layernorm.weight"),
    ("moe.router.weight", "mlp.router.weight"),
    ("moe.router.bias", "mlp.router.expert_bias"),
    ("moe.router.offset", "mlp.router.bias"),
    ("moe.shared.gate_up.weight", "mlp.shared_experts.linear_fc1.weight"),
    ("moe.shared.gate.weight", "mlp.shared_experts.gate_weight"),
    ("moe.shared.down.weight", "mlp.shared_experts.linear_fc2.weight"),
)

#: What a layer for multi-token prediction has around its decoder layer.
_AROUND_MTP = (
    ("embedding_norm.weight", "enorm.weight"),
    ("hidden_norm.weight", "hnorm.weight"),
    ("join.weight", "eh_proj.weight"),
    ("final_norm.weight", "final_layernorm.weight"),
)

#: (logical, sequential experts, grouped experts)
_EXPERT = (
    ("gate_up.weight", "local_experts.{e}.linear_fc1.weight", "linear_fc1.weight{e}"),
    ("gate_up.bias", "local_experts.{e}.linear_fc1.bias", "linear_fc1.bias{e}"),
    ("down.weight", "local_experts.{e}.linear_fc2.weight", "linear_fc2.weight{e}"),
    ("down.bias", "local_experts.{e}.linear_fc2.bias", "linear_fc2.bias{e}"),
)

_IN_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_IN_EXPERT = re.compile(r"moe\.experts\.(\d+)\.(\w+\.\w+)")


def checkpoint_key(name: str, *, grouped_experts: bool = False) -> str:
    """The state-dict key of a logical weight.

    Args:
        name: ``embedding.weight``, ``layers.3.attention.qkv.bias``,
            ``layers.3.moe.experts.7.down.weight``, ``mtp.0.join.weight``, ...
        grouped_experts: Experts run as one grouped GEMM, which names its weights otherwise.

    Raises:
        KeyError: No such logical weight (a mistake in the family's rules).
    """
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer is None:
        return dict(_MODEL)[name]
    stack, number, inner = in_layer.groups()
    prefix = f"decoder.layers.{number}."
    if stack == "mtp":
        if inner in dict(_AROUND_MTP):
            return f"mtp.layers.{number}.{dict(_AROUND_MTP)[inner]}"
        prefix = f"mtp.layers.{number}.mtp_model_layer."
    in_expert = _IN_EXPERT.fullmatch(inner)
    if in_expert is None:
        return prefix + dict(_LAYER)[inner]
    names = {logical: (sequential, grouped) for logical, sequential, grouped in _EXPERT}
    pattern = names[in_expert[2]][int(grouped_experts)]
    return f"{prefix}mlp.experts.{pattern.format(e=in_expert[1])}"
