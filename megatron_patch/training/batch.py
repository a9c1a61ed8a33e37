"""One micro-batch on every rank: broadcast over TP, cut over CP.

Shapes: tokens, labels, position_ids int64 [b, s]; loss_mask float32 [b, s], where s is the sequence
length divided by the context-parallel size. Stages that need no tensor get None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_patch.util import UserError

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def needs_batch(config: Any, vp_stage: int | None) -> bool:
    """Whether this stage reads tokens or labels: the first, the last, and those with MTP layers."""
    from megatron.training.utils import is_first_or_last_pipeline_stage

    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(config, vp_stage)


def _has_mtp(config: Any, vp_stage: int | None) -> bool:
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _check_ids(tokens_bs: Tensor, vocab_size: int) -> None:
    """Ids of another tokenizer would end in an index error, on a GPU long after the fact.

    Args:
        tokens_bs: int64 on the CPU.
        vocab_size: ids that the model knows.
    """
    largest = int(tokens_bs.max())
    if largest >= vocab_size:
        raise UserError(
            f"the data holds token id {largest}, and the model's vocabulary ends at "
            f"{vocab_size - 1}: --data-path was made with another tokenizer than --hf-model's"
        )


def get_batch(
    data_iterator: Iterator[dict[str, Tensor]], config: Any, vp_stage: int | None
) -> dict[str, Tensor | None]:
    """The next micro-batch as this rank needs it.

    Args:
        data_iterator: yields CPU tensors on TP rank 0, unused elsewhere.
        config: the model's `TransformerConfig`.
        vp_stage: virtual pipeline stage, or None.

    Returns:
        A dict with the names in `KEYS`.
    """
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training import get_args

    if not needs_batch(config, vp_stage):
        return dict.fromkeys(KEYS)
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        item = next(data_iterator)
        _check_ids(item["tokens"], args.vocab_size or args.padded_vocab_size)
        batch = {
            key: item[key].cuda(non_blocking=True) if item.get(key) is not None else None
            for key in KEYS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_has_mtp(config, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return {key: batch.get(key) for key in KEYS}
