"""The stand-in for Apex's weight-gradient kernel: Transformer Engine's GEMM and torch's."""

from __future__ import annotations

import pytest
import torch

from megatron_patch.patches.grad_accum_fusion import accumulate_weight_grad


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_products_add_up_in_the_gradient_buffer(dtype, grad_dtype, engine, monkeypatch):
    from megatron.core.extensions import transformer_engine

    if not engine:
        monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    elif not transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    torch.manual_seed(0)
    tokens, inputs, outputs = 512, 256, 1024
    main_grad = torch.randn(outputs, inputs, device="cuda", dtype=grad_dtype)
    wanted = main_grad.double()
    where = main_grad.data_ptr()
    for _ in range(3):
        x = torch.randn(tokens, inputs, device="cuda", dtype=dtype)
        dy = torch.randn(tokens, outputs, device="cuda", dtype=dtype)
        accumulate_weight_grad(x, dy, main_grad)
        wanted += dy.double().t() @ x.double()
    assert main_grad.data_ptr() == where
    # Rounding of one bf16 buffer, or of fp32 sums of half-precision products.
    tolerance = 2e-2 if grad_dtype == torch.bfloat16 else 2e-5
    error = (main_grad.double() - wanted).norm() / wanted.norm()
    assert error < tolerance, float(error)
