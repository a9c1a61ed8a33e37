"""Output layer and cross-entropy in one, without ever holding all logits.

The logits of a chunk of tokens are made, turned into their own gradient in place, used for the
gradients of hidden states and weight, and dropped: memory is one chunk, whatever the sequence
length. Works on a vocabulary split over TP, with tied weights, loss weights, sequence parallelism
and MTP. The kernels are one pass each over a chunk of logits (Triton); CPU ranks use torch.

The gradient is made in the forward pass, so a step costs no extra matrix product. That is exact
where the loss is the plain sum of `loss_mask * token loss` (`--calculate-per-token-loss`, no loss
scaling). The backward pass checks that it is, on the device, without waiting for it.

Shape suffixes: N tokens, H hidden, V vocabulary rows on this rank; S sequence, B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_patch.training.memory import LOGITS_CHUNK_BYTES

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs
    triton = None

#: Tokens of a chunk are a multiple of this, so that matrix products fill their tiles.
_TILE = 256
#: Columns that one program of a kernel holds at a time.
_BLOCK = 4096

if triton is not None:

    @triton.jit
    def _row_stats(
        x_ptr, stride, label_ptr, first, valid, max_ptr, sum_ptr, hit_ptr, BLOCK: tl.constexpr
    ):
        """One row: maximum, sum of exp(x - maximum) and the label's logit if this rank holds it."""
        row = tl.program_id(0).to(tl.int64)
        base = x_ptr + row * stride
        column = tl.arange(0, BLOCK)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, valid, BLOCK):
            at = start + column
            x = tl.load(base + at, mask=at < valid, other=-float("inf")).to(tl.float32)
            new = tl.maximum(top, x)
            # A lane that has seen no column yet is -inf, and -inf - -inf is no number.
            shift = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(top - shift) + tl.exp(x - shift)
            top = new
        highest = tl.max(top, 0)
        total = tl.sum(total * tl.exp(top - highest), 0)
        label = tl.load(label_ptr + row) - first
        mine = (label >= 0) & (label < valid)
        hit = tl.load(base + tl.where(mine, label, 0)).to(tl.float32)
        tl.store(max_ptr + row, highest)
        tl.store(sum_ptr + row, total)
        tl.store(hit_ptr + row, tl.where(mine, hit, 0.0))

    @triton.jit
    def _to_gradient(
        x_ptr, stride, label_ptr, first, valid, columns, lse_ptr, weight_ptr, BLOCK: tl.constexpr
    ):
        """One block of one row, in place: weight * (exp(x - lse) - [label])."""
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        base = x_ptr + row * stride
        lse = tl.load(lse_ptr + row)
        weight = tl.load(weight_ptr + row)
        label = tl.load(label_ptr + row) - first
        x = tl.load(base + at, mask=at < valid, other=-float("inf")).to(tl.float32)
        g = (tl.exp(x - lse) - tl.where(at == label, 1.0, 0.0)) * weight
        g = tl.where((at < valid) & (weight != 0.0), g, 0.0)
        tl.store(base + at, g.to(x_ptr.dtype.element_ty), mask=at < columns)


def _stats(x_NV: Tensor, labels_N: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, sum of exp(x - maximum), and the label's logit or 0; float32 [N] each."""
    rows = x_NV.shape[0]
    if valid <= 0:  # a rank that holds nothing but padding
        zero = torch.zeros(rows, dtype=torch.float32, device=x_NV.device)
        return torch.full_like(zero, torch.finfo(zero.dtype).min), zero, zero
    if x_NV.is_cuda:
        top, total, hit = torch.empty(3, rows, dtype=torch.float32, device=x_NV.device)
        _row_stats[(rows,)](
            x_NV, x_NV.stride(0), labels_N, first, valid, top, total, hit, BLOCK=_BLOCK, num_warps=8
        )
        return top, total, hit
    x = x_NV[:, :valid].float()
    top = x.amax(1)
    total = torch.exp(x - top[:, None]).sum(1)
    local = labels_N - first
    mine = (local >= 0) & (local < valid)
    return top, total, x.gather(1, local.where(mine, 0)[:, None])[:, 0].where(mine, 0)


def _to_gradient_in_place(
    x_NV: Tensor, labels_N: Tensor, first: int, valid: int, lse_N: Tensor, weight_N: Tensor
) -> None:
    """Turn logits into the gradient of `weight * loss` with respect to them."""
    rows, columns = x_NV.shape
    if x_NV.is_cuda:
        _to_gradient[(rows, triton.cdiv(columns, _BLOCK))](
            x_NV, x_NV.stride(0), labels_N, first, valid, columns, lse_N, weight_N,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        return
    column = torch.arange(columns)
    g = torch.exp(x_NV.float() - lse_N[:, None]) - (column == labels_N[:, None] - first).float()
    dead = (column >= valid) | (weight_N == 0)[:, None]
    x_NV.copy_((g * weight_N[:, None]).masked_fill(dead, 0.0))


def _rows_of_a_chunk(tokens: int, columns: int, bytes_each: int) -> int:
    """Tokens a chunk, for chunks of nearly equal size."""
    most = max(_TILE, LOGITS_CHUNK_BYTES // (columns * bytes_each) // _TILE * _TILE)
    chunks = -(-tokens // most)
    return -(-tokens // chunks // _TILE) * _TILE


class LinearCrossEntropy(torch.autograd.Function):
    """Token losses of `hidden @ weight^T`, with the gradients of `sum(mask * loss)`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        mask_N: Tensor,
        group: Any,
        first: int,
        valid: int,
        fuse: bool,
        train: bool,
    ) -> Tensor:
        """Losses in float32, [N].

        Args:
            ctx: autograd's.
            hidden_NH: what the output layer multiplies, whole over TP.
            weight_VH: this rank's rows.
            labels_N: int64, ids of the whole vocabulary; any other id hits no column.
            mask_N: float32 weight of each token's loss.
            group: ranks that share the vocabulary, or None.
            first: id of this rank's first row.
            valid: rows of this rank that are not padding.
            fuse: add the weight's gradient into `weight.main_grad`.
            train: whether there will be a backward pass.
        """
        from megatron_patch.patches.grad_accum_fusion import accumulate_weight_grad

        n, (rows, _) = hidden_NH.shape[0], weight_VH.shape
        step = _rows_of_a_chunk(n, rows, hidden_NH.element_size())
        loss = torch.empty(n, dtype=torch.float32, device=hidden_NH.device)
        d_hidden = torch.empty_like(hidden_NH) if train and hidden_NH.requires_grad else None
        d_weight = None
        if train and weight_VH.requires_grad:
            d_weight = (
                weight_VH.main_grad  # type: ignore[attr-defined]
                if fuse
                else torch.zeros_like(weight_VH, dtype=torch.float32)
            )
        logits = hidden_NH.new_empty(min(n, step), rows)  # one buffer for every chunk
        for lo in range(0, n, step):
            part = slice(lo, min(n, lo + step))
            h, labels = hidden_NH[part], labels_N[part]
            x = torch.mm(h, weight_VH.t(), out=logits[: h.shape[0]])
            top, total, hit = _stats(x, labels, first, valid)
            if group is not None and group.size() > 1:
                highest = top.clone()
                torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=group)
                both = torch.stack([total * torch.exp(top - highest), hit])
                torch.distributed.all_reduce(both, group=group)
                top, (total, hit) = highest, both
            lse = top + torch.log(total)
            loss[part] = lse - hit
            if d_hidden is None and d_weight is None:
                continue
            _to_gradient_in_place(x, labels, first, valid, lse, mask_N[part])
            if d_hidden is not None:
                torch.mm(x, weight_VH, out=d_hidden[part])
            if d_weight is not None:
                accumulate_weight_grad(h, x, d_weight)
        ctx.fuse = fuse
        ctx.save_for_backward(d_hidden, None if fuse else d_weight, mask_N, weight_VH)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """What the forward pass made, after a check that it was the right thing to make."""
        d_hidden, d_weight, mask_N, weight = ctx.saved_tensors
        torch._assert_async(
            torch.isclose(grad_N, mask_N, rtol=1e-5, atol=0.0, equal_nan=True).all(),
            "fused linear cross-entropy: the loss is not the plain sum of loss_mask * token loss "
            "that --linear-cross-entropy needs; give --linear-cross-entropy off",
        )
        if ctx.fuse and weight.requires_grad:
            # As upstream's linear layers do: the gradient is in the buffer already, and what
            # autograd gets only makes the parameter's hook run.
            weight.grad_added_to_main_grad = True
            d_weight = torch.empty_like(weight)
            if getattr(weight, "zero_out_wgrad", False):
                d_weight.zero_()
        elif d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None, None, None, None, None


def install(stage: Any, true_vocab_size: int) -> None:
    """Teach a stage's output layer to return token losses when it is given labels.

    The layer stays the module that upstream calls, so that its hooks (waiting for gathered
    parameters) still run.

    Args:
        stage: a `GPTModel` stage; one without an output layer is left alone.
        true_vocab_size: rows of the embedding that are not padding.
    """
    layer = getattr(stage, "output_layer", None)
    if layer is None:
        return
    logits: Callable[..., Any] = layer.forward
    rows = layer.output_size_per_partition
    first = layer.tp_group.rank() * rows
    valid = max(0, min(rows, true_vocab_size - first))

    def forward(
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Any:
        if labels is None or loss_mask is None:
            return logits(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        from megatron.core.tensor_parallel import mappings

        weight = layer.weight if weight is None else weight
        if layer.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(input_, group=layer.tp_group)
        else:
            hidden = mappings.copy_to_tensor_model_parallel_region(input_, group=layer.tp_group)
        s, b = hidden.shape[:2]
        # Autograd functions run without gradients: ask here whether anybody wants one.
        train = torch.is_grad_enabled()
        loss = LinearCrossEntropy.apply(
            hidden.reshape(s * b, -1),
            weight,
            labels.transpose(0, 1).reshape(-1),
            loss_mask.transpose(0, 1).reshape(-1).float(),
            layer.tp_group,
            first,
            valid,
            layer.gradient_accumulation_fusion and hasattr(weight, "main_grad"),
            train,
        )
        return loss.view(s, b).transpose(0, 1)

    layer.forward = forward
    stage.fused_loss = _token_losses


def _token_losses(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    **_: Any,
) -> Any:
    """For `GPTModel.forward(output_processor=)`: token losses [b, s], float32."""
    return output_layer(hidden_states, weight=output_weight, labels=labels, loss_mask=loss_mask)
