"""The losses: (sum, what the step's gradients are divided by, report)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over trained tokens, with their number, so that any split of a batch adds up exactly.

    Args:
        loss_mask: [b, s] float, 1 where a token is trained.
        output: [b, s] per-token cross-entropy, any float dtype.

    Returns:
        The loss sum (float32 scalar, differentiable), the token count (int32 scalar) and the
        report `{"lm loss": [sum, count]}` that upstream averages over data-parallel ranks.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    count = mask.sum().detach().to(torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.to(loss.dtype)])}


def weighted_loss(
    loss_mask: Tensor, padding: Tensor, scale: float, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of rows whose mask holds weights; see `megatron_patch.data.sft_dataset`.

    Args:
        loss_mask: [1, s] float32; over a step the weights add up to its real tokens.
        padding: [1, s] bool, True where there is no real token.
        scale: weight of one unit (a trained token, or a sample).
        output: [1, s] per-token cross-entropy, any float dtype.

    Returns:
        The weighted sum (float32 scalar, differentiable), the number of real tokens (int32 scalar)
        and the report `{"lm loss": [sum, count]}` in units.
    """
    mask = loss_mask.reshape(-1)
    loss = torch.sum(output.reshape(-1).float() * mask)
    count = (~padding).sum().to(torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), mask.sum()]) / scale}


def checked(result: tuple[Tensor, Tensor, dict[str, Any]]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Pass a loss through upstream's re-run state machine, which stops on NaN and Inf."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    if get_args().check_for_nan_in_loss_and_grad:
        machine = get_rerun_state_machine()
        for name, reject in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            machine.validate_result(
                result=result[0],
                rejection_func=reject,
                message=f"{name} in the loss of this rank's micro-batch",
                tolerance=0.0,
                fatal=True,
            )
    return result
