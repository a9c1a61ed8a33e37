"""The pretraining loss adds up over any split and does not scale with the sequence length."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_patch.training import loss as module
from megatron_patch.training.loss import token_loss


def test_sum_and_count_of_trained_tokens():
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]], dtype=torch.float32)
    output = torch.tensor([[1.0, 2.0, 100.0], [100.0, 4.0, 100.0]], requires_grad=True)
    total, count, report = token_loss(mask, output)
    assert total.item() == 7.0
    assert count.item() == 3
    assert count.dtype == torch.int
    assert report["lm loss"].tolist() == [7.0, 3.0]
    assert not report["lm loss"].requires_grad
    total.backward()
    assert torch.equal(output.grad, mask)


def test_half_precision_is_summed_in_float32():
    output = torch.full((1, 4096), 1.0 + 2**-7, dtype=torch.bfloat16)
    total, count, _ = token_loss(torch.ones(1, 4096), output)
    assert total.item() == 4096 * (1 + 2**-7)
    assert count.item() == 4096


def test_a_row_without_a_trained_token_is_no_division():
    output = torch.full((1, 4), torch.inf)
    finite = torch.ones(1, 4, requires_grad=True)
    total, count, report = token_loss(torch.zeros(1, 4), finite)
    assert (total.item(), count.item()) == (0.0, 0)
    assert torch.isfinite(report["lm loss"]).all()
    assert torch.isnan(token_loss(torch.zeros(1, 4), output)[0]), "Inf is never hidden"


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_any_split_adds_up(cuts):
    """Ragged masks, micro-batches of any size: one scalar, one gradient."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 9, 4, 16, 2, 7])
    mask = (torch.arange(16)[None] < lengths[:, None]).double()
    logits = torch.randn(6, 16, 11, dtype=torch.float64, generator=generator)
    labels = torch.randint(11, (6, 16), generator=generator)

    def gradient(rows):
        leaf = logits.clone().requires_grad_()
        sums, counts = 0.0, 0
        for a, b in rows:
            each = torch.nn.functional.cross_entropy(
                leaf[a:b].flatten(0, 1), labels[a:b].flatten(), reduction="none"
            ).view(b - a, 16)
            total, count, report = token_loss(mask[a:b], each)
            assert report["lm loss"].tolist() == pytest.approx([total.item(), count.item()])
            total.backward()  # upstream divides once, by the count over all of the batch
            sums, counts = sums + total.item(), counts + count.item()
        return sums / counts, leaf.grad / counts

    value, grad = gradient(list(pairwise(cuts)))
    leaf = logits.clone().requires_grad_()
    plain = torch.nn.functional.cross_entropy(leaf[mask.bool()], labels[mask.bool()])
    plain.backward()
    assert value == pytest.approx(plain.item(), rel=1e-6)
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-6, atol=1e-9)


def test_checks_are_made_only_where_asked(monkeypatch):
    import megatron.core.rerun_state_machine as rerun
    import megatron.training as training

    calls = []

    class Machine:
        def validate_result(self, *, result, rejection_func, message, tolerance, fatal):
            calls.append((message, bool(rejection_func(result)), tolerance, fatal))

    arguments = SimpleNamespace(check_for_nan_in_loss_and_grad=False)
    monkeypatch.setattr(training, "get_args", lambda: arguments)
    monkeypatch.setattr(rerun, "get_rerun_state_machine", Machine)
    result = token_loss(torch.ones(1, 2), torch.tensor([[1.0, torch.nan]]))
    assert module.checked(result) is result
    assert calls == []
    arguments.check_for_nan_in_loss_and_grad = True
    assert module.checked(result) is result
    assert [(m.split()[0], rejected, t, f) for m, rejected, t, f in calls] == [
        ("NaN", True, 0.0, True),
        ("Inf", False, 0.0, True),
    ]
