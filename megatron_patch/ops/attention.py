"""Core attention on `torch.nn.functional.scaled_dot_product_attention`.

Takes the place of Transformer Engine's `DotProductAttention` where that is absent: causal or full,
grouped-query, different key and value widths (MLA), sliding windows, attention sinks, packed
sequences (`thd`) and context parallel with the zigzag layout that Megatron-Core's batch slicing
uses (rank r of c holds chunks r and 2c-1-r of every sequence).

Shape suffixes: s query length on this rank, t key length, b batch, h query heads on this rank,
g key/value groups on this rank, d key width, v value width, T packed tokens on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_patch.ops import attention_backend

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig


_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
#: Mask types whose mask says which scores count, beside causality.
_MASKED = (AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary)


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0; the backward pass is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        size = group.size()
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        size = ctx.group.size()
        out = grad.new_empty((grad.shape[0] // size, *grad.shape[1:]))
        torch.distributed.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def zigzag_order(cp_size: int) -> list[int]:
    """Chunk numbers in the order in which an all-gather over the CP ranks returns them.

    With c ranks a sequence has 2c chunks; rank r holds (r, 2c-1-r).
    """
    return [chunk for r in range(cp_size) for chunk in (r, 2 * cp_size - 1 - r)]


def to_natural_order(x: Tensor, cp_size: int) -> Tensor:
    """[2c * n, ...] gathered from zigzag ranks -> the same rows in sequence order."""
    chunks = x.chunk(2 * cp_size, dim=0)
    position = {chunk: i for i, chunk in enumerate(zigzag_order(cp_size))}
    return torch.cat([chunks[position[i]] for i in range(2 * cp_size)], dim=0)


def sdpa(
    q_sbhd: Tensor,
    k_tbgd: Tensor,
    v_tbgv: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    look: Callable[[dict[str, Any]], None] | None = None,
) -> Tensor:
    """Attention of one chunk of queries over a prefix of keys.

    Args:
        q_sbhd: queries, any float dtype.
        k_tbgd: keys; g divides h (grouped-query attention).
        v_tbgv: values; v may differ from d.
        causal: bottom-right aligned, so the last query sees every key (t >= s).
        scale: factor on the scores, usually 1/sqrt(d).
        dropout: probability on the attention weights.
        mask: optional boolean [.., s, t], True where a score counts; excludes `causal`.
        window: how many keys before its own a query sees; needs `causal`.
        sink: [h], a score that every softmax holds beside those of the keys; its value is zero.
        look: gets the arguments of torch's function before it is called.

    Returns:
        [s, b, h, v], dtype of the queries.
    """
    s, t = q_sbhd.shape[0], k_tbgd.shape[0]
    if window is not None and s + window < t:  # keys that no query here sees
        k_tbgd, v_tbgv = k_tbgd[t - s - window :], v_tbgv[t - s - window :]
        t = s + window
    if window is not None and window < t - 1:
        assert causal and mask is None
        last = torch.arange(t - s, t, device=q_sbhd.device)[:, None]
        key = torch.arange(t, device=q_sbhd.device)
        mask, causal = (key <= last) & (key >= last - window), False
    width = v_tbgv.shape[3]
    if sink is not None:
        q_sbhd, k_tbgd, v_tbgv, t = *_with_sink(q_sbhd, k_tbgd, v_tbgv, sink, scale), t + 1
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)
    h, g = q_sbhd.shape[2], k_tbgd.shape[2]
    d, v = k_tbgd.shape[3], v_tbgv.shape[3]
    q, k, val = (x.permute(1, 2, 0, 3) for x in (q_sbhd, k_tbgd, v_tbgv))
    if v < d:
        # The flash kernels want one width; zero columns of V stay zero in the output.
        val = F.pad(val, (0, d - v))
    gqa = h != g
    if gqa and not q.is_cuda:
        # CPU kernels have no grouped path: a view per query head is as fast there.
        k, val = (x.repeat_interleave(h // g, dim=1) for x in (k, val))
        gqa = False
    is_causal, bias = False, mask
    if causal and mask is None:
        if s == t:
            is_causal = True
        elif s > 1:
            bias = causal_lower_right(s, t)
            if gqa:
                # The bias subclass does not take the grouped path.
                k, val = (x.repeat_interleave(h // g, dim=1) for x in (k, val))
                gqa = False
    call = {
        "query": q,
        "key": k,
        "value": val,
        "attn_mask": bias,
        "dropout_p": dropout,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": gqa,
    }
    if look is not None:
        look(call)
    out = F.scaled_dot_product_attention(**call)
    return out[..., :width].permute(2, 0, 1, 3)


def _with_sink(
    q_sbhd: Tensor, k_tbgd: Tensor, v_tbgv: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key with score ``sink`` and value zero before the others, one for each query head.

    Queries and keys get eight more channels (flash kernels want a multiple of eight), of which the
    first is 1 in queries and the score in the new key: no kernel has to know, and the sink's
    gradient is the key's.
    """
    b, h, d = q_sbhd.shape[1:]
    repeats = h // k_tbgd.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k_tbgd, v_tbgv))
    q = torch.cat([q_sbhd, q_sbhd.new_ones(*q_sbhd.shape[:3], 1)], dim=-1)
    first = F.pad((sink / scale).to(k.dtype)[:, None], (d, 7)).expand(1, b, h, d + 8)
    return (
        F.pad(q, (0, 7)),
        torch.cat([first, F.pad(k, (0, 8))]),
        F.pad(v, (0, 0, 0, 0, 0, 0, 1, 0)),
    )


class SDPACoreAttention(MegatronModule):
    """Core attention with the constructor and call of `TEDotProductAttention`.

    Source of the interface: `megatron/core/extensions/transformer_engine.py`. Holds no extra state
    and of parameters only its sinks, under the same name, so checkpoints are the same with either.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(
                f"without Transformer Engine only self-attention works, not {attention_type!r}"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        self.attn_mask_type = attn_mask_type
        self.cp_group = groups.cp
        self.cp_size = self.cp_group.size() if config.context_parallel_size > 1 else 1
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        width = k_channels if k_channels is not None else config.kv_channels
        # Query-key layer scaling divides before the softmax and multiplies inside it, against
        # overflow of half-precision scores; here those are float32 on the way anyway.
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(width)
        self.heads = divide(config.num_attention_heads, groups.tp.size())
        self.tp_group = groups.tp
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            left = config.window_size[0]
            self.window = None if left < 0 else left
        #: What torch ran at the first call, and why it is unfused where it is.
        self.kernel: str | None = None
        self.reasons: list[str] = []
        self.only = attention_backend.asked_of_torch(config)
        self.softmax_offset: Tensor | None = None
        if config.softmax_type != "vanilla":
            device = torch.cuda.current_device()
            offset = torch.zeros(self.heads, dtype=config.params_dtype, device=device)
            if config.softmax_type == "learnable":
                self.softmax_offset = torch.nn.Parameter(offset)
                if config.perform_initialization:
                    config.init_method(self.softmax_offset)
            else:
                self.softmax_offset = offset

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, b, h, d], or [T, h, d] when packed.
            key: [t, b, g, d], or [T, g, d] when packed.
            value: [t, b, g, v], or [T, g, v] when packed.
            attention_mask: boolean, True where a score is masked; not read for the mask types
                causal, causal_bottom_right and no_mask, nor when packed.
            attn_mask_type: overrides the constructor's.
            attention_bias: not supported.
            packed_seq_params: boundaries of a packed batch (`thd`).
            num_splits: ignored, a Transformer Engine tuning knob.

        Returns:
            [s, b, h * v], or [T, h * v] when packed.
        """
        if attention_bias is not None:
            raise ValueError("attention bias needs Transformer Engine")
        kind = attn_mask_type or self.attn_mask_type
        # Behind a cache of keys upstream asks for no mask; for one query causality is the same, and
        # a window needs it.
        one = query.shape[0] == 1 and self.attn_mask_type in _CAUSAL
        causal = kind in _CAUSAL or (kind == AttnMaskType.no_mask and one)
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, causal)
        keep = None
        if kind in _MASKED:
            if attention_mask is None:
                raise ValueError(f"mask type {kind.name} needs an attention mask")
            keep = ~attention_mask
            if causal:
                s, t = query.shape[0], key.shape[0]
                keep = keep & keep.new_ones(s, t).tril(t - s)
                if self.window is not None:
                    keep = keep & keep.new_ones(s, t).triu(t - s - self.window)
        if self.cp_size > 1:
            if keep is not None or not causal:
                raise ValueError("context parallel without Transformer Engine is causal only")
            out = self._ring_free(query, key, value)
        else:
            out = self._sdpa(query, key, value, causal=causal, mask=keep)
        return out.reshape(*out.shape[:2], -1)

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        rate = self.dropout if self.training else 0.0
        if not causal and mask is None and self.window is not None:
            raise ValueError("a sliding window without Transformer Engine is causal only")
        attend = partial(
            sdpa,
            causal=causal,
            scale=self.softmax_scale,
            dropout=rate,
            mask=mask,
            window=self.window if mask is None else None,
            sink=self.softmax_offset,
            look=self._look if self.kernel is None else None,
        )
        with attention_backend.only(self.only):
            if rate and not self.config.sequence_parallel:
                # Heads differ between TP ranks, so must the random numbers.
                with tensor_parallel.get_cuda_rng_tracker().fork():
                    return attend(q, k, v)
            return attend(q, k, v)

    def _look(self, call: dict[str, Any]) -> None:
        """Note which kernel the first call gets.

        Raises:
            UserError: the one that was asked for cannot run.
        """
        self.kernel = attention_backend.torch_kernel(call)
        if self.kernel is None or attention_backend.UNFUSED in self.kernel:
            self.reasons = attention_backend.torch_reasons(call)
        if self.kernel is None:
            raise attention_backend.cannot(self.config.attention_backend.name, self.reasons)

    def _ring_free(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Context parallel by gathering keys and values: two causal blocks, no exchange of Q.

        K and V are small under grouped-query attention; the gathered copy is freed with the layer.
        """
        c, rank = self.cp_size, self.cp_group.rank()
        k_all = to_natural_order(_GatherSequence.apply(k, self.cp_group), c)
        v_all = to_natural_order(_GatherSequence.apply(v, self.cp_group), c)
        chunk = q.shape[0] // 2
        parts = []
        for half, number in ((q[:chunk], rank), (q[chunk:], 2 * c - 1 - rank)):
            end = (number + 1) * chunk
            parts.append(self._sdpa(half, k_all[:end], v_all[:end], causal=True))
        return torch.cat(parts, dim=0)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, causal: bool
    ) -> Tensor:
        """`thd`: every sequence attends to itself only; rows of padding give zeros."""
        if packed.qkv_format != "thd":
            raise ValueError(f"packed sequences come as thd, got {packed.qkv_format!r}")
        squeeze = q.dim() == 4  # [T, 1, h, d] from layers that keep the batch dimension
        if squeeze:
            if q.shape[1] != 1:
                raise ValueError(
                    f"packed sequences are one row of tokens, got {q.shape[1]}: set "
                    "--micro-batch-size 1 and raise --global-batch-size instead"
                )
            q, k, v = (x.squeeze(1) for x in (q, k, v))
        real = packed.cu_seqlens_q.tolist()
        padded = real if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.tolist()
        c = self.cp_size
        if packed.local_cp_size is not None:
            raise ValueError("dynamic context parallel needs Transformer Engine")
        rank = self.cp_group.rank() if c > 1 else 0
        if c > 1:
            if not causal:
                raise ValueError("context parallel without Transformer Engine is causal only")
            k = _GatherSequence.apply(k, self.cp_group).view(c, *k.shape)
            v = _GatherSequence.apply(v, self.cp_group).view(c, *v.shape)
        out = []
        attended = False
        for i in range(len(real) - 1):
            length = real[i + 1] - real[i]
            room = padded[i + 1] - padded[i]
            if room % (2 * c if c > 1 else 1):
                raise ValueError(
                    f"packed sequence {i} takes {room} tokens, not a multiple of 2 x CP = {2 * c}"
                )
            lo, hi = padded[i] // c, padded[i + 1] // c
            if c == 1:
                attended = True
                qs = q[lo : lo + length].unsqueeze(1)
                ks, vs = (x[lo : lo + length].unsqueeze(1) for x in (k, v))
                part = self._sdpa(qs, ks, vs, causal=causal).squeeze(1)
            else:
                ks, vs = (
                    to_natural_order(x[:, lo:hi].reshape(room, *x.shape[2:]), c).unsqueeze(1)
                    for x in (k, v)
                )
                chunk = room // (2 * c)
                pieces = []
                for half, number in ((0, rank), (1, 2 * c - 1 - rank)):
                    start = number * chunk
                    rows = max(0, min(chunk, length - start))
                    if rows:
                        attended = True
                        qs = q[lo + half * chunk : lo + half * chunk + rows].unsqueeze(1)
                        end = start + rows
                        pieces.append(self._sdpa(qs, ks[:end], vs[:end], causal=True).squeeze(1))
                    if rows < chunk:
                        pieces.append(q.new_zeros(chunk - rows, q.shape[1], v.shape[-1]))
                part = torch.cat(pieces, dim=0)
            if part.shape[0] < hi - lo:
                part = torch.cat([part, part.new_zeros(hi - lo - part.shape[0], *part.shape[1:])])
            out.append(part)
        done = padded[-1] // c
        if done < q.shape[0]:
            out.append(q.new_zeros(q.shape[0] - done, q.shape[1], v.shape[-1]))
        if not attended:
            # Only padding on this rank: no rows of every input, so that its backward pass takes
            # part in the reduce-scatters that the other ranks wait in.
            used = (q, k, v) if self.softmax_offset is None else (q, k, v, self.softmax_offset)
            out += [x.reshape(-1)[:0].view(0, q.shape[1], v.shape[-1]) for x in used]
        result = torch.cat(out, dim=0).reshape(q.shape[0], -1)
        return result.unsqueeze(1) if squeeze else result

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sinks, where they are learnt; split over TP."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
