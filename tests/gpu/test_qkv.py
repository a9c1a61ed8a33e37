"""The fused path from the projection to rotated queries and keys, at the sizes of real models."""

from __future__ import annotations

import pytest
import torch

from megatron_patch.ops import qkv


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "norm"),
    [
        (2, 8, 128, True),
        (4, 8, 128, False),
        (8, 2, 128, True),
        (7, 4, 64, False),
        (1, 16, 256, True),
    ],
    ids=str,
)
def test_agrees_with_float64(heads: int, groups: int, size: int, norm: bool, packed: bool) -> None:
    s, b = 515, 1 if packed else 2
    torch.manual_seed(0)
    x = torch.randn(s, b, groups, (heads + 2) * size, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    weights = [
        torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(2 * norm)
    ]
    angle = torch.arange(s, device="cuda")[:, None] / 10000 ** torch.linspace(
        0, 1, size // 2, device="cuda"
    )
    cos, sin = angle.cos(), angle.sin()
    at = None
    if packed:
        edges = torch.tensor([0, 130, 131, 400, 515], device="cuda", dtype=torch.int32)
        at = qkv.packed_positions(edges, s, 1, 0)
    found = qkv.SplitNormRotate.apply(x, *(weights or [None, None]), cos, sin, heads, 1e-6, at)
    if at is not None:
        restarted = [torch.arange(n) for n in edges.diff().tolist()]
        assert at.tolist() == torch.cat(restarted).tolist()
        cos, sin = cos[at], sin[at]

    wide = x.detach().double().requires_grad_()
    wide_weights = [w.detach().double().requires_grad_() for w in weights]

    def scale(t: torch.Tensor, i: int) -> torch.Tensor:
        return torch.nn.functional.rms_norm(t, (size,), wide_weights[i], 1e-6) if norm else t

    def turn(t: torch.Tensor) -> torch.Tensor:
        low, high = t.chunk(2, -1)
        c, s = cos.double()[:, None, None], sin.double()[:, None, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    q, k, v = torch.split(wide, [heads * size, size, size], 3)
    expected = turn(scale(q.reshape(s, b, -1, size), 0)), turn(scale(k, 1)), v
    grads = [torch.randn(t.shape, device="cuda", dtype=torch.bfloat16) for t in expected]
    for a, e in zip(found, expected, strict=True):
        assert _error(a, e) < 4e-3
    made = torch.autograd.grad(found, [x, *weights], grads)
    wanted = torch.autograd.grad(expected, [wide, *wide_weights], [g.double() for g in grads])
    for a, e in zip(made, wanted, strict=True):
        assert _error(a, e) < 4e-3


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())
