"""Kernels against plain torch, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import torch
from megatron_patch.ops import qkv

S, B = 7, 2
for heads, groups, size, norm in ((2, 3, 16, True), (4, 2, 8, True), (1, 2, 16, False)):
    torch.manual_seed(heads)
    x = torch.randn(S, B, groups, (heads + 2) * size, requires_grad=True)
    weights = [torch.randn(size, requires_grad=True) for _ in range(2 * norm)]
    angle = torch.randn(S, size // 2) * 3
    cos, sin = angle.cos(), angle.sin()

    def turn(t):
        low, high = t.chunk(2, -1)
        c, s = cos[:, None, None], sin[:, None, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    def scale(t, i):
        if not norm:
            return t
        return torch.nn.functional.rms_norm(t, (size,), weights[i], 1e-6)

    q, k, v = torch.split(x, [heads * size, size, size], 3)
    expected = turn(scale(q.reshape(S, B, -1, size), 0)), turn(scale(k, 1)), v
    found = qkv.SplitNormRotate.apply(x, *(weights or [None, None]), cos, sin, heads, 1e-6)
    grads = [torch.randn_like(t) for t in expected]
    torch.testing.assert_close(found, expected)
    inputs = [x, *weights]
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, grads), torch.autograd.grad(expected, inputs, grads)
    )

from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd


class Group:
    def __init__(self, size, rank):
        self.of, self.at = size, rank

    def size(self):
        return self.of

    def rank(self):
        return self.at


edges = torch.tensor([0, 8, 12, 32, 36], dtype=torch.int32)
for ranks, rank in ((1, 0), (2, 0), (2, 1)):
    heads, groups, size, S = 2, 3, 16, 36 // ranks
    x = torch.randn(S, 1, groups, (heads + 2) * size, requires_grad=True)
    weights = [torch.randn(size, requires_grad=True) for _ in range(2)]
    freqs = (torch.randn(24, 1, 1, size // 2) * 3).repeat(1, 1, 1, 2)

    def turn(t, w):
        t = torch.nn.functional.rms_norm(t, (size,), w, 1e-6).squeeze(1)
        given = {"cp_group": Group(ranks, rank)}
        return _apply_rotary_pos_emb_thd(t, edges, freqs, **given)[:, None]

    q, k, v = torch.split(x, [heads * size, size, size], 3)
    expected = turn(q.reshape(S, 1, -1, size), weights[0]), turn(k, weights[1]), v
    at = qkv.packed_positions(edges, S, ranks, rank)
    table = qkv._angles(freqs)
    found = qkv.SplitNormRotate.apply(x, *weights, *table, heads, 1e-6, at)
    grads = [torch.randn_like(t) for t in expected]
    torch.testing.assert_close(found, expected)
    inputs = [x, *weights]
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, grads), torch.autograd.grad(expected, inputs, grads)
    )

from megatron_patch.ops.swiglu import swiglu

x, grad = torch.randn(5, 2, 600, requires_grad=True), torch.randn(5, 2, 300)
gate, up = x.chunk(2, -1)
expected, found = torch.nn.functional.silu(gate) * up, swiglu(x)
torch.testing.assert_close(found, expected)
torch.testing.assert_close(
    torch.autograd.grad(found, x, grad), torch.autograd.grad(expected, x, grad)
)
print("equal")
"""


def test_agree_with_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]
