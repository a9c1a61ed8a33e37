"""The fused output layer and loss against the plain ones."""

from __future__ import annotations

import pytest
import torch

from megatron_patch.ops import linear_cross_entropy as fused

N, H, V, REAL = 37, 16, 64, 60


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    mask = (torch.rand(N) > 0.3).float() * torch.rand(N)
    return hidden, weight, torch.randint(0, REAL, (N,)), mask


def _fused(hidden, weight, labels, mask, fuse=False, train=True):  # type: ignore[no-untyped-def]
    return fused.LinearCrossEntropy.apply(hidden, weight, labels, mask, None, 0, REAL, fuse, train)


@pytest.fixture(params=[37, 8])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk, and five with a short last one."""
    monkeypatch.setattr(fused, "_TILE", request.param)
    monkeypatch.setattr(fused, "LOGITS_CHUNK_BYTES", 1)


def test_losses_and_gradients(chunk: None) -> None:
    hidden, weight, labels, mask = _inputs()
    loss = _fused(hidden, weight, labels, mask)
    (loss * mask).sum().backward()
    h, w = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logits = (h @ w.t())[:, :REAL]
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (expected * mask).sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, h.grad)
    torch.testing.assert_close(weight.grad, w.grad)
    assert not weight.grad[REAL:].any(), "rows of padding have no gradient"


def test_gradient_is_added_into_the_buffer() -> None:
    hidden, weight, labels, mask = _inputs()
    plain = torch.autograd.grad((_fused(hidden, weight, labels, mask) * mask).sum(), weight)[0]
    weight.main_grad = torch.ones_like(weight)
    (_fused(hidden, weight, labels, mask, fuse=True) * mask).sum().backward()
    torch.testing.assert_close(weight.main_grad, plain + 1)
    assert weight.grad_added_to_main_grad


def test_evaluation_leaves_the_buffer_alone() -> None:
    hidden, weight, labels, mask = _inputs()
    weight.main_grad = torch.zeros_like(weight)
    with torch.no_grad():
        _fused(hidden, weight, labels, mask, fuse=True, train=False)
    assert not weight.main_grad.any()


def test_another_loss_than_the_sum_is_an_error() -> None:
    hidden, weight, labels, mask = _inputs()
    with pytest.raises(RuntimeError, match="--linear-cross-entropy off"):
        (_fused(hidden, weight, labels, mask) * mask).mean().backward()


def test_labels_that_are_masked_may_be_anything() -> None:
    hidden, weight, labels, mask = _inputs()
    labels[mask == 0] = -100
    loss = _fused(hidden, weight, labels, mask)
    (loss * mask).sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(hidden.grad).all()


def test_a_rank_of_padding_only() -> None:
    """What a rank past the vocabulary's end adds to the others: nothing."""
    hidden, weight, labels, _ = _inputs()
    top, total, hit = fused._stats(hidden @ weight.t(), labels, V, REAL - V)
    assert not total.any()
    assert not hit.any()
    assert torch.isfinite(top).all()
