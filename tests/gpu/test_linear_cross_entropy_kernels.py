"""The fused output layer and loss: Triton kernels against float64."""

from __future__ import annotations

import pytest
import torch

from megatron_patch.ops import linear_cross_entropy as fused

N, H = 1300, 256


@pytest.mark.parametrize(
    ("rows", "real"), [(151_936, 151_936), (50_304, 50_257), (384, 300)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_losses_and_gradients(
    rows: int, real: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three chunks, the last one short.
    monkeypatch.setattr(fused, "LOGITS_CHUNK_BYTES", 512 * rows * dtype.itemsize)
    torch.manual_seed(0)
    hidden = torch.randn(N, H, device="cuda", dtype=dtype)
    weight = torch.randn(rows, H, device="cuda", dtype=dtype) * 0.2
    labels = torch.randint(0, real, (N,), device="cuda")
    mask = (torch.rand(N, device="cuda") > 0.3).float() * torch.rand(N, device="cuda")
    labels[mask == 0] = -100
    hidden.requires_grad_()
    weight.requires_grad_()
    weight.main_grad = torch.ones(rows, H, device="cuda")
    loss = fused.LinearCrossEntropy.apply(hidden, weight, labels, mask, None, 0, real, True, True)
    (loss * mask).sum().backward()

    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        (h @ w.t())[:, :real], labels, reduction="none", ignore_index=-100
    )
    (expected * mask).sum().backward()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3  # tf32 may be on in the second
    kept = mask > 0
    assert _error(loss[kept], expected[kept]) < tolerance
    assert _error(hidden.grad, h.grad) < tolerance
    assert _error(weight.main_grad - 1, w.grad) < tolerance
    assert (weight.main_grad[real:] == 1).all(), "rows of padding have no gradient"
    assert not hidden.grad[~kept].any(), "masked tokens have no gradient"


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def test_logits_are_never_all_there() -> None:
    """Peak memory is that of a chunk: 4 GiB of logits, in a quarter of it."""
    tokens, rows = 16_384, 131_072
    hidden = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, rows, (tokens,), device="cuda")
    mask = torch.ones(tokens, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = fused.LinearCrossEntropy.apply(hidden, weight, labels, mask, None, 0, rows, False, True)
    loss.sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.1 * fused.LOGITS_CHUNK_BYTES + 2**28
    assert used < 0.5 * tokens * rows * 2
