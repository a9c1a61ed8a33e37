"""Norms and linear layers in the shape of Transformer Engine's, on plain torch.

Source of the interfaces: `megatron/core/extensions/transformer_engine.py` (`TENorm`,
`TELayerNormColumnParallelLinear`, `TELinear`). Parameter names are Transformer Engine's, so a
checkpoint's keys are the same with either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor
from torch.nn.parameter import Parameter


def _norm_parameter(config: TransformerConfig, size: int, fill: float) -> Parameter:
    """A replicated vector; under sequence parallelism its gradient is summed over TP ranks."""
    parameter = Parameter(
        torch.full((size,), fill, dtype=config.params_dtype, device=torch.cuda.current_device())
    )
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: TransformerConfig, eps: float
) -> Tensor:
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if bias is None:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _check_normalization(config: TransformerConfig) -> bool:
    """Whether the normalization has a bias."""
    if config.normalization not in ("RMSNorm", "LayerNorm"):
        raise ValueError(f"--normalization {config.normalization}: RMSNorm and LayerNorm are known")
    return config.normalization == "LayerNorm"


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, by `config.normalization`.

    Unlike upstream's wrapped torch norm it works under sequence parallelism and with
    zero-centered weights (`--apply-layernorm-1p`).
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        one = 0.0 if config.layernorm_zero_centered_gamma else 1.0
        self.weight = _norm_parameter(config, hidden_size, one)
        bias = _norm_parameter(config, hidden_size, 0.0) if _check_normalization(config) else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape and dtype."""
        return _normalize(x, self.weight, self.bias, self.config, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then a linear layer split over its output dimension."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        one = 0.0 if config.layernorm_zero_centered_gamma else 1.0
        self.layer_norm_weight = _norm_parameter(config, input_size, one)
        bias = _norm_parameter(config, input_size, 0.0) if _check_normalization(config) else None
        self.register_parameter("layer_norm_bias", bias)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[s, b, input] -> ([s, b, output / TP], bias or None)."""
        normed = _normalize(
            input_,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.config,
            self.eps,
        )
        return super().forward(normed, *args, **kwargs)


class ReplicatedLinear(torch.nn.Module):
    """A linear layer whose weight every TP rank holds whole (MLA's down projections)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if parallel_mode not in (None, "duplicated") or is_expert or skip_weight_param_allocation:
            raise ValueError(
                f"a replicated linear layer has no parallel mode {parallel_mode!r}; use the column "
                "or row parallel one"
            )
        self.config = config
        self.skip_bias_add = skip_bias_add
        self.tp_group = tp_group
        make = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = Parameter(torch.empty(output_size, input_size, **make))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        if bias:
            self.bias = Parameter(torch.zeros(output_size, **make))
            self.bias.sequence_parallel = config.sequence_parallel
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, input] -> ([s, b, output], bias or None)."""
        bias = None if self.skip_bias_add else self.bias
        if self.config.gradient_accumulation_fusion:
            out = linear_with_grad_accumulation_and_async_allreduce(
                x, self.weight, bias, True, False, False, tp_group=self.tp_group
            )
        else:
            out = F.linear(x, self.weight, bias)
        return out, (self.bias if self.skip_bias_add else None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Replicated over TP."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            # Layers that are told "duplicated" get no group; the copies have one all the same.
            tp_group=get_tensor_model_parallel_group_if_none(self.tp_group),
            dp_cp_group=metadata["dp_cp_group"],
        )

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""


class ExpertRowParallelLinear(RowParallelLinear):
    """The last layer of an expert that may have a bias.

    Upstream's expert adds its bias in place, which autograd refuses for what a collective of one
    rank hands through. Source: ``megatron/core/transformer/mlp.py: MLP.forward``.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens, in] -> [tokens, out] and the bias, which the caller adds."""
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias
