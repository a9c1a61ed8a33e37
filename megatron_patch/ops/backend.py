"""A backend in Transformer Engine's shape for machines that have none.

`TorchSpecProvider` answers the questions that `megatron.core.models` asks of a backend the way
`TESpecProvider` does (norm fused into the following linear layer), with modules from this package.
Layer specs built on it therefore have Transformer Engine's checkpoint keys by construction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_patch.ops.attention import SDPACoreAttention
from megatron_patch.ops.linear import (
    ExpertRowParallelLinear,
    Norm,
    NormColumnParallelLinear,
    ReplicatedLinear,
)


class TorchSpecProvider(BackendSpecProvider):
    """Modules that need torch only."""

    def linear(self) -> type:
        """A linear layer that every TP rank holds whole."""
        return ReplicatedLinear

    def column_parallel_linear(self) -> type:
        """Linear layer split over its output."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Linear layer split over its input."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """The norm belongs to the linear layer after it, as with Transformer Engine."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and column-parallel linear layer in one module."""
        return NormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """The stand-alone norm; which kind comes from the config."""
        return Norm

    def core_attention(self) -> type:
        """Scaled-dot-product attention."""
        return SDPACoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Experts one after another: there is no grouped GEMM without Transformer Engine.

        Upstream builds some specs with it while importing, so that asking for it is refused where
        the flags are checked, not here.
        """
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(
                linear_fc1=ColumnParallelLinear,
                linear_fc2=ExpertRowParallelLinear,
                activation_func=self.activation_func(),
            ),
        )

    def activation_func(self) -> None:
        """No fused activation module."""
        return None


def torch_backend(transformer_impl: str) -> BackendSpecProvider:
    """What `megatron.core.models.backends.get_backend` answers on this backend."""
    if transformer_impl != "transformer_engine":
        raise ValueError(
            f"--transformer-impl {transformer_impl}: leave the flag out; without Transformer "
            "Engine this library's own modules are used under the same name"
        )
    return TorchSpecProvider()


def backend_for_config(config: Any) -> BackendSpecProvider:
    """What the builder of experimental attention variants asks, with its `TransformerConfig`."""
    return TorchSpecProvider()
