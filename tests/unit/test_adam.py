"""The group-step Adam against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_patch.ops.adam import GroupStepAdam


def parameters():
    generator = torch.Generator().manual_seed(1)
    shapes = [(7, 5), (3,), (4, 4), (1,), (2, 3, 2)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def groups(params):
    """No decay for some, as Megatron groups them."""
    return [
        {"params": params[:3], "weight_decay": 0.1},
        {"params": params[3:], "weight_decay": 0.0, "lr": 0.02},
    ]


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) * (1 + step)
        for group in optimizer.param_groups:
            group["lr"] *= 0.97  # a scheduler sets it every step
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"betas": (0.8, 0.95), "eps": 1e-5}, {"betas": (0.9, 0.999), "lr": 0.1}]
)
def test_twenty_steps_are_those_of_torch(decoupled, settings):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.01, **settings}
    a = GroupStepAdam(groups(ours), adam_w_mode=decoupled, weight_decay=0.3, **settings)
    b = kind(groups(theirs), weight_decay=0.3, foreach=False, fused=False, **settings)
    start = [p.detach().clone() for p in ours]
    run(a, ours, 20)
    run(b, theirs, 20)
    for before, p, q in zip(start, ours, theirs, strict=True):
        assert (p - before).abs().min() > 0
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a.state[p][name], b.state[q][name], rtol=1e-5, atol=1e-7)
    assert [g["step"] for g in a.param_groups] == [20, 20]


def test_default_weight_decay_is_none():
    (p,) = ours = [torch.ones(3, requires_grad=True)]
    optimizer = GroupStepAdam(ours)
    p.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(p, torch.ones(3))


def test_saved_and_loaded_it_goes_on_bit_for_bit():
    straight = parameters()
    a = GroupStepAdam(groups(straight), lr=0.01)
    run(a, straight, 20)
    halves = parameters()
    b = GroupStepAdam(groups(halves), lr=0.01)
    run(b, halves, 10)
    saved = copy.deepcopy(b.state_dict())
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in saved["state"].values())
    assert [g["step"] for g in saved["param_groups"]] == [10, 10]
    again = [p.detach().clone().requires_grad_() for p in halves]
    c = GroupStepAdam(groups(again), lr=0.5, weight_decay=0.7)
    c.load_state_dict(saved)
    run(c, again, 10, first=10)
    for p, q in zip(straight, again, strict=True):
        assert torch.equal(p, q)


def test_a_group_without_gradients_counts_its_steps():
    """Ranks of the distributed optimizer may hold nothing of a group; the step is the group's."""
    p = torch.ones(2, requires_grad=True)
    nothing = torch.zeros(0, requires_grad=True)
    optimizer = GroupStepAdam([{"params": [p]}, {"params": []}, {"params": [nothing]}], lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert [g["step"] for g in optimizer.param_groups] == [3, 3, 3]
    assert torch.equal(p, torch.ones(2))
    assert not optimizer.state


def test_closure():
    p = torch.ones(2, requires_grad=True)
    optimizer = GroupStepAdam([p], lr=0.1)

    def closure():
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = (p**2).sum()
            loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert optimizer.step(closure) == pytest.approx(2 * 0.9**2, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capturable": True}, "capturable"),
        ({"bias_correction": False}, "bias_correction=False"),
        ({"master_weights": True, "exp_avg_dtype": torch.bfloat16}, "exp_avg_dtype, master_weig"),
    ],
)
def test_refusals(options, named):
    with pytest.raises(ValueError, match=rf"{named}.*te-cu12.*--use-precision-aware-optimizer"):
        GroupStepAdam(parameters(), **options)
