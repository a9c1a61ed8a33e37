"""The forward step that Megatron-Core's schedules call for every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_patch.data import pretrain_dataset
from megatron_patch.training import metrics
from megatron_patch.training.batch import Packed, get_batch, get_packed, on_tp_rank
from megatron_patch.training.loss import checked, token_loss, weighted_loss


def _loss(
    loss_mask: Tensor, training: bool, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    result = token_loss(loss_mask, output)
    recorder = metrics.RECORDER
    if training and recorder is not None:
        # Asked for only where the step's loss turns out to be no number, or jumps: no wait for the
        # device.
        number = len(recorder.suspects)
        recorder.suspects.append(
            metrics.MicroBatch(result[2]["lm loss"], pretrain_dataset.naming(number))
        )
    return checked(result)


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
    return output, partial(_loss, batch["loss_mask"], model.training)


def packed_forward_step(
    data_iterator: Iterator[Any],
    model: Any,
    return_schedule_plan: bool = False,
    *,
    name: Callable[[int], str] = str,
) -> tuple[Any, Callable[[Tensor], Any]]:
    """Run one row of packed samples.

    Args:
        data_iterator: this virtual stage's rows.
        model: the (wrapped) stage.
        return_schedule_plan: asked by `--overlap-moe-expert-parallel-comm`.
        name: how a message names a sample.

    Returns:
        As `forward_step`.
    """
    from megatron.core.utils import get_attr_wrapped_model, get_model_config
    from megatron.training import get_args, get_timers
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    config = get_model_config(model)
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    row = get_packed(data_iterator, config, vp_stage)
    timers("batch-generator").stop()
    if get_args().log_throughput and model.training:
        edges = torch.nn.functional.pad(row.lengths.cumsum(0), (1, 0))
        update_seqlen_stats_from_cu_seqlens(edges.to(torch.int32))
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        row.tokens,
        row.position_ids,
        None,
        labels=row.labels,
        loss_mask=row.loss_mask,
        packed_seq_params=row.params,
        output_processor=get_attr_wrapped_model(model, "fused_loss"),
        **_padding_mask(row, config, get_attr_wrapped_model(model, "pre_process")),
    )
    return output, partial(_packed_loss, row, name)


def _padding_mask(row: Packed, config: Any, pre_process: bool) -> dict[str, Tensor]:
    """What keeps padding out of the routers' statistics."""
    if not config.num_moe_experts:
        return {}
    mask = row.padding
    if config.sequence_parallel and not pre_process:
        # Upstream cuts it beside the embedding only.
        mask = on_tp_rank(mask)
    return {"padding_mask": mask}


def _packed_loss(
    row: Packed, name: Callable[[int], str], output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    assert row.loss_mask is not None
    result = weighted_loss(row.loss_mask, row.padding, row.scale, output)
    if metrics.RECORDER is not None:
        metrics.RECORDER.suspects.append(
            metrics.MicroBatch(result[2]["lm loss"], partial(_samples, row, name, output.detach()))
        )
    return result


def _samples(row: Packed, name: Callable[[int], str], output: Tensor) -> str:
    """The samples of a row, and which of them have a loss that is no number."""
    bad = _not_finite(row, output)
    text = f"a row has {', '.join(map(name, row.samples))}"
    return text + (f"; not finite on {', '.join(map(name, bad))}" if bad else "")


def _not_finite(row: Packed, output: Tensor) -> list[int]:
    """Samples of which this rank holds a trained token without a finite loss."""
    assert row.loss_mask is not None
    at = (~torch.isfinite(output) & (row.loss_mask > 0)).reshape(-1).nonzero().reshape(-1)
    size = int(row.params.cu_seqlens_q[-1]) // output.numel()  # context-parallel ranks
    edges = row.params.cu_seqlens_q.cpu() // size
    places = torch.bucketize(at.cpu(), edges[1:], right=True).unique().tolist()
    return [row.samples[place] for place in places if place < len(row.samples)]
