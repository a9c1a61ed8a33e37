"""The forward step that Megatron-Core's schedules call for every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from megatron_patch.training.batch import get_batch
from megatron_patch.training.loss import checked, token_loss


def _loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return checked(token_loss(loss_mask, output))


def forward_step(
    data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[Tensor], Any]]:
    """Run one micro-batch.

    Args:
        data_iterator: this virtual stage's data.
        model: the (wrapped) stage.
        return_schedule_plan: asked by `--overlap-moe-expert-parallel-comm`.

    Returns:
        The stage's output, or a schedule plan, and the function that turns it into a loss.
    """
    from megatron.core.utils import get_attr_wrapped_model, get_model_config
    from megatron.training import get_timers

    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, get_model_config(model), vp_stage)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        output_processor=get_attr_wrapped_model(model, "fused_loss"),
    )
    return output, partial(_loss, batch["loss_mask"])
