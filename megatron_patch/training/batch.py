"""One micro-batch on every rank: broadcast over TP, cut over CP.

Shapes: tokens, labels, position_ids int64 [b, s]; loss_mask float32 [b, s], where s is the sequence
length divided by the context-parallel size. Stages that need no tensor get None.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_patch.training import metrics
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

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


def _next(data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The next item; the wait for it is one of the step's figures."""
    begun = time.perf_counter()
    item = next(data_iterator)
    if metrics.RECORDER is not None:
        metrics.RECORDER.data_wait += time.perf_counter() - begun
    return item


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
        item = _next(data_iterator)
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


# --- packed rows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A row of samples with boundaries, as this rank's stage needs it.

    Shapes: s is the row's length divided by the context-parallel size.

    Attributes:
        tokens: int64 [1, s]; None where the stage has no embedding.
        position_ids: int64 [1, s], from 0 in each sample; None with `tokens`.
        labels: int64 [1, s]; None where the stage computes no loss.
        loss_mask: float32 [1, s], the weight of each target; None with `labels`.
        padding: bool [1, s], True where there is no real token.
        params: boundaries, the same on every stage.
        lengths: int64 [n], real tokens of each sample, on the CPU.
        samples: numbers of the samples in the run's pool.
        scale: what one unit of the loss weighs in `loss_mask`.
    """

    tokens: Tensor | None
    position_ids: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    padding: Tensor
    params: PackedSeqParams
    lengths: Tensor
    samples: list[int]
    scale: float


def get_packed(
    data_iterator: Iterator[dict[str, Tensor]], config: Any, vp_stage: int | None
) -> Packed:
    """The next packed row as this rank needs it: broadcast over TP, cut over CP sample by sample.

    Boundaries go to every stage: attention of the middle ones must not cross them either.

    Every room (a sample and its alignment) is handed to attention as one sequence. What pads it
    stands behind the real tokens, which causal attention does not let them see, and has no loss.

    Args:
        data_iterator: yields rows of `megatron_patch.data.sft_dataset` on TP rank 0.
        config: the model's `TransformerConfig`.
        vp_stage: virtual pipeline stage, or None.
    """
    from megatron.core import mpu
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.training import get_args

    from megatron_patch.data.packing import cp_index

    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    mtp = _has_mtp(config, vp_stage)
    wanted = (["tokens"] if first or mtp else []) + (["labels", "loss_mask"] if last or mtp else [])
    row = _row(data_iterator, wanted) if mpu.get_tensor_model_parallel_rank() == 0 else {}
    row = _over_tp(row, wanted)
    if "tokens" in wanted and mpu.get_tensor_model_parallel_rank() == 0:
        args = get_args()
        _check_ids(row["tokens"], args.vocab_size or args.padded_vocab_size)
    rooms, real = row["rooms"], row["real"]
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    lengths = real.diff()
    starts = rooms[:-1].repeat_interleave(rooms.diff())
    positions = torch.arange(int(rooms[-1])) - starts
    padding = positions >= lengths.repeat_interleave(rooms.diff())
    whole = {"position_ids": positions, "padding": padding}
    whole |= {name: row[name] for name in wanted}
    if size > 1:
        mine = torch.from_numpy(cp_index(rooms.numpy(), size, rank))
        whole = {name: value[mine] for name, value in whole.items()}
    there = {name: value[None].cuda(non_blocking=True) for name, value in whole.items()}
    edges = rooms.to(torch.int32).cuda(non_blocking=True)
    longest = _bound(int(rooms.diff().max()), int(rooms[-1]))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        # Transformer Engine asks for these under context parallelism, and whether they differ.
        cu_seqlens_q_padded=edges if size > 1 else None,
        cu_seqlens_kv_padded=edges if size > 1 else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
    )
    params.padding = there["padding"]  # for `megatron_patch.training.padding`
    return Packed(
        tokens=there.get("tokens"),
        position_ids=there["position_ids"] if "tokens" in there else None,
        labels=there.get("labels"),
        loss_mask=there.get("loss_mask"),
        padding=there["padding"],
        params=params,
        lengths=lengths,
        samples=row["samples"].tolist(),
        scale=float(row["scale"].view(torch.float64)),
    )


def on_tp_rank(x_1s: Tensor) -> Tensor:
    """This rank's part of [1, s] under sequence parallelism."""
    from megatron.core import mpu

    parts = x_1s.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)
    return parts[mpu.get_tensor_model_parallel_rank()].contiguous()


def _bound(longest: int, total: int) -> int:
    """A bound of the rooms' lengths that takes few values, for kernels are planned by it.

    Never the row's own length unless one room fills it: upstream's rotary embedding takes a table
    of that length for one that holds the positions of the whole row
    (``megatron/core/models/common/embeddings/rope_utils.py: _apply_rotary_pos_emb_thd``).

    Args:
        longest: the largest room.
        total: the row.
    """
    if longest == total:
        return total
    power = max(256, 1 << (longest - 1).bit_length())
    return power if power < total else max(longest, total - 64)


#: What every stage gets of a row; int64 (the scale's bits as such).
_EDGES = ("rooms", "real", "samples", "scale")


def _row(data_iterator: Iterator[dict[str, Tensor]], wanted: list[str]) -> dict[str, Tensor]:
    """A row from the loader, without its batch dimension, on the CPU."""
    item = _next(data_iterator)
    if item["tokens"].shape[0] != 1:
        raise UserError(
            "packed samples come one row at a time: --micro-batch-size 1 (raise "
            "--global-batch-size or --seq-length instead)"
        )
    edges = {
        "rooms": item["cu_seqlens_padded"][0].long(),
        "real": item["cu_seqlens"][0].long(),
        "samples": item["samples"][0].long(),
        "scale": item["scale"].reshape(1).double().view(torch.int64),
    }
    return edges | {name: item[name][0] for name in wanted}


def _over_tp(row: dict[str, Tensor], wanted: list[str]) -> dict[str, Tensor]:
    """The row of TP rank 0 on all ranks of its group: sizes, then everything as int64 in one."""
    from megatron.core import mpu

    group, source = (
        mpu.get_tensor_model_parallel_group(),
        mpu.get_tensor_model_parallel_src_rank(),
    )
    if group.size() == 1:
        return row
    names = (*_EDGES, *wanted)
    leads = group.rank() == 0
    device = torch.cuda.current_device()
    sizes = torch.tensor([row[n].numel() if leads else 0 for n in names], device=device)
    torch.distributed.broadcast(sizes, source, group=group)
    counts = [] if leads else sizes.tolist()  # waits for the device
    if leads:
        # A float's bits fit into an int64, so that one message carries all.
        whole = [v.view(torch.int32).long() if v.is_floating_point() else v for v in
                 (row[n] for n in names)]  # fmt: skip
        flat = torch.cat(whole).to(device)
    else:
        flat = torch.empty(sum(counts), dtype=torch.int64, device=device)
    torch.distributed.broadcast(flat, source, group=group)
    if leads:
        return row
    parts = dict(zip(names, flat.cpu().split(counts), strict=True))
    if "loss_mask" in parts:
        parts["loss_mask"] = parts["loss_mask"].to(torch.int32).view(torch.float32)
    return parts
