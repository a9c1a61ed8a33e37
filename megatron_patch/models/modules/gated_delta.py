"""Gated DeltaNet with the weights of Hugging Face files, and on CPU ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor


class PlainNorm:
    """The norm of Gated DeltaNet's output, whose weight is used as it stands in HF files.

    Megatron-Core 0.19 builds it like the model's other norms; where those are zero-centred it
    would hold the weight minus 1, which low precision cannot for small weights.
    """

    def __new__(  # type: ignore[misc]  # a constructor of another class, as upstream's TENorm is
        cls, *, kind: Any, config: Any, **more: Any
    ) -> Any:
        """Build a norm of class ``kind``."""
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        return kind(config=plain, **more)


def layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Upstream's layer specs with `PlainNorm` in Gated DeltaNet.

    Args:
        config: the `GPTModelConfig`.
        vp_stage: virtual pipeline stage, or None.
    """
    spec = default_layer_spec(config, vp_stage)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is GatedDeltaNet:
            norm = attention.submodules.out_norm
            if not isinstance(norm, ModuleSpec):  # layers share their attention's spec
                norm = ModuleSpec(module=PlainNorm, params={"kind": norm})
                attention.submodules.out_norm = norm
    return spec


def _torch_rule(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
    """Upstream's rule in torch, with the norm of queries and keys that is else a kernel's.

    Args:
        q: queries, [b, s, h, d].
        k: keys, the same.
        v: values.
        **more: as `torch_chunk_gated_delta_rule` takes it.
    """
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    result: tuple[Tensor, Tensor | None] = torch_chunk_gated_delta_rule(q, k, v, **more)
    return result


def compute_without_kernels(stage: Any) -> None:
    """Let Gated DeltaNet run where there is no GPU, on upstream's torch code.

    Args:
        stage: a `GPTModel` stage.
    """
    if torch.cuda.is_available():
        return
    for module in stage.modules():
        if isinstance(module, GatedDeltaNet):
            module.config = copy.copy(module.config)
            module.config.deterministic_mode = True
            module.use_qk_l2norm = False
            module.gated_delta_rule = _torch_rule
