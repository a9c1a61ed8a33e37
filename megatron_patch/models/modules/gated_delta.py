"""Gated DeltaNet with the weights of Hugging Face files, and on CPU ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor

from megatron_patch.patches import registry
from megatron_patch.patches.registry import Patch


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


#: What Megatron-Core calls these models.
VARIANT = "gated_delta_net"


def layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Upstream's layer specs with `PlainNorm` in Gated DeltaNet.

    For layers of multi-token prediction upstream asks for the decoder's specs once more, by a
    function that refuses a configuration that names the variant. Nothing else reads the name while
    a model is built: it is taken away until `model_config`'s hook puts it back.

    Args:
        config: the `GPTModelConfig`.
        vp_stage: virtual pipeline stage, or None.
    """
    inner = config.transformer
    inner.experimental_attention_variant = VARIANT
    if isinstance(inner.linear_attention_freq, list):
        inner.linear_attention_freq = inner.linear_attention_freq[: inner.num_layers]
    spec = default_layer_spec(config, vp_stage)
    if inner.mtp_num_layers is not None:
        inner.experimental_attention_variant = None
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is GatedDeltaNet:
            norm = attention.submodules.out_norm
            if not isinstance(norm, ModuleSpec):  # layers share their attention's spec
                norm = ModuleSpec(module=PlainNorm, params={"kind": norm})
                attention.submodules.out_norm = norm
    return spec


def _torch_rule(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """Upstream's rule in torch, with the norm of queries and keys that is else a kernel's.

    Args:
        q: queries, [b, s, h, d].
        k: keys, the same.
        v: values.
        cu_seqlens: where packed sequences begin, and the end; each starts from an empty state.
        **more: as `torch_chunk_gated_delta_rule` takes it; decay and beta are [b, s, h].
    """
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if cu_seqlens is None:
        result: tuple[Tensor, Tensor | None] = torch_chunk_gated_delta_rule(q, k, v, **more)
        return result
    sizes = cu_seqlens.diff().tolist()
    along = [x.split(sizes, dim=1) for x in (q, k, v, more.pop("g"), more.pop("beta"))]
    parts = [
        torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **more)[0]
        for q, k, v, g, beta in zip(*along, strict=True)
    ]
    return torch.cat(parts, dim=1), None


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal convolution of each channel, as ``fla.modules.convolution.causal_conv1d``.

    Args:
        x: [b, s, d].
        weight: [d, w], the last one a token's own.
        bias: [d], or None.
        activation: ``silu`` or ``swish``; None for none.
        cu_seqlens: where packed sequences begin, and the end; none sees the one before.
    """
    size, width = x.shape[1], weight.shape[1]
    place = torch.arange(size, device=x.device)
    if cu_seqlens is not None:
        edges = cu_seqlens.long()
        place = place - edges[:-1].repeat_interleave(edges.diff())
    out = x * weight[:, -1]
    for back in range(1, min(width, size)):
        before = F.pad(x, (0, 0, back, 0))[:, :size]
        out = out + torch.where(place[:, None] >= back, before, 0) * weight[:, -1 - back]
    if bias is not None:
        out = out + bias
    return (F.silu(out) if activation is not None else out), None


#: Upstream calls the kernel by the name it imported it under.
_CONVOLUTION = Patch(
    name="cpu:convolution",
    target="megatron.core.ssm.gated_delta_net.gdn.causal_conv1d",
    mode="replace",
    func=convolution,
    group="cpu",
    why="the convolution before Gated DeltaNet is a Triton kernel",
    upstream="https://github.com/NVIDIA/Megatron-LM",
    remove_when="upstream's deterministic mode takes packed sequences",
)


def compute_without_kernels(stage: Any) -> None:
    """Let Gated DeltaNet run where there is no GPU, packed or not.

    Args:
        stage: a `GPTModel` stage.
    """
    if torch.cuda.is_available():
        return
    for module in stage.modules():
        if isinstance(module, GatedDeltaNet):
            registry.apply_records((_CONVOLUTION,))
            module.use_qk_l2norm = False
            module.gated_delta_rule = _torch_rule
