"""Latent attention as DeepSeek has it, where Megatron-Core's differs."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec


class PlainQueryAttention(MLASelfAttention):
    """Latent attention whose query is projected from the layer's input as it is.

    Megatron-Core 0.19 norms that input once more where the query has no low rank
    (`q_lora_rank` None) and the keys are normed. Source of what is overridden:
    ``megatron/core/transformer/mla_qk_norm_config.py: QKNormConfigResolver``.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        classes: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        return classes | {"linear_q_proj": submodules.linear_q_proj}


def layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Upstream's layer specs with `PlainQueryAttention` where the query has no low rank.

    Args:
        config: the `GPTModelConfig`.
        vp_stage: virtual pipeline stage, or None.
    """
    spec = default_layer_spec(config, vp_stage)
    if config.transformer.q_lora_rank is None:
        for layer in [spec] if isinstance(spec, ModuleSpec) else spec.layer_specs:
            attention = layer.submodules.self_attention
            assert attention.module in (MLASelfAttention, PlainQueryAttention), attention.module
            attention.module = PlainQueryAttention
    return spec


def set_latent_norms(stage: Any, epsilon: float) -> None:
    """Give the norms on the low-rank projections their own epsilon.

    Transformers builds them with the norm class's default, whatever ``rms_norm_eps`` says.

    Args:
        stage: a `GPTModel` stage.
        epsilon: theirs.
    """
    for module in stage.modules():
        if isinstance(module, MLASelfAttention):
            for name in ("linear_q_up_proj", "linear_kv_up_proj"):
                if hasattr(module, name):
                    norm = getattr(module, name)
                    assert hasattr(norm, "eps") and hasattr(norm, "layer_norm_weight"), norm
                    norm.eps = epsilon
