"""SwiGLU, one pass each way.

Upstream's is compiled by torch: its backward builds both halves of the gradient and joins them,
which costs nearly twice the memory traffic that the operation needs.

Shape suffixes: N tokens, F width of the MLP.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs
    triton = None

#: Elements of a row that one program works on.
_BLOCK = 2048

if triton is not None:

    @triton.jit
    def _forward(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = at < width
        gate = tl.load(x_ptr + row * 2 * width + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + at, mask=live, other=0.0).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up
        tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=live)

    @triton.jit
    def _backward(x_ptr, dy_ptr, dx_ptr, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = at < width
        gate = tl.load(x_ptr + row * 2 * width + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + at, mask=live, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * width + at, mask=live, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_up = dy * gate * sigmoid
        kind = dx_ptr.dtype.element_ty
        tl.store(dx_ptr + row * 2 * width + at, d_gate.to(kind), mask=live)
        tl.store(dx_ptr + row * 2 * width + width + at, d_up.to(kind), mask=live)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], width)
        _forward[(y.numel() // width, triton.cdiv(width, _BLOCK))](x, y, width, BLOCK=_BLOCK)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        width = dy.shape[-1]
        _backward[(dy.numel() // width, triton.cdiv(width, _BLOCK))](x, dy, dx, width, BLOCK=_BLOCK)
        return dx


def swiglu(x_N2F: Tensor) -> Tensor:
    """`silu(first half) * second half`, [..., F] from [..., 2 F], computed in float32."""
    y: Tensor = _SwiGLU.apply(x_N2F)
    return y


def install(stage: Any) -> None:
    """Let the dense MLPs of a stage use these kernels where they cover what upstream's would do.

    Upstream calls an activation that is a module's own where the configuration says so; each MLP
    gets a configuration of its own that does.
    """
    from megatron.core.transformer.mlp import MLP

    for module in stage.modules():
        if triton is None or type(module) is not MLP:
            continue
        config = module.config
        if (
            config.activation_func is not torch.nn.functional.silu
            or not config.gated_linear_unit
            or not config.bias_activation_fusion
            or config.add_bias_linear
            or config.activation_func_fp8_input_store
            or config.cpu_offloading
            or config.activation_func_clamp_value is not None
        ):
            continue
        module.config = copy.copy(config)
        module.config.use_te_activation_func = True
        module.activation_func = swiglu
