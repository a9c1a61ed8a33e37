"""Query, key and value from the fused projection in one pass: split, norm and rotary embedding.

Megatron-Core splits the projection (a copy), normalises queries and keys (rows of one head, for
which norm kernels are not made) and turns them: four reads and writes of the same numbers each
way. Here each number is read and written once in either direction, norms and rotation are computed
in float32 without rounding between them, and only the projection itself is kept for the backward
pass.

Shape suffixes: S sequence, B batch, G query groups of this rank, R query heads a group, D channels
of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs
    triton = None

#: Tokens that one step of a kernel works on, and warps of a program. On an H200, 16,384 tokens with
#: 8 groups of 2 heads of 128 channels take 78 us forward and 122 us back; reading and writing
#: everything once takes 62 and 94.
_TOKENS, _WARPS = 2, 2
#: Programs a multiprocessor in the backward pass; each sums its share of the norms' gradients.
_PROGRAMS = 16

if triton is not None:

    @triton.jit
    def _forward(
        x_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, at_ptr,
        tokens, batch, groups, eps,
        PACKED: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
        HALF: tl.constexpr, T: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0) * T + tl.arange(0, T)[:, None, None]
        group = tl.program_id(1)
        row = tl.arange(0, ROWS)[None, :, None]
        lane = tl.arange(0, HALF)[None, None, :]
        live = (token < tokens) & (row < HEADS + 2)
        at = ((token.to(tl.int64) * groups + group) * (HEADS + 2) + row) * (2 * HALF) + lane
        low = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        high = tl.load(x_ptr + at + HALF, mask=live, other=0.0).to(tl.float32)
        is_q, is_v = row < HEADS, row == HEADS + 1
        if NORM:
            square = tl.sum(low * low + high * high, 2) / (2 * HALF)
            scale = tl.where(is_v, 1.0, (1.0 / tl.sqrt(square + eps))[:, :, None])
            weights = _weights(q_weight_ptr, k_weight_ptr, is_q, is_v, lane, HALF)
            low, high = low * scale * weights[0], high * scale * weights[1]
        if PACKED:
            position = tl.load(at_ptr + token, mask=token < tokens, other=0)
        else:
            position = token // batch
        angle = position * HALF + lane
        turned = (token < tokens) & (row < HEADS + 1)
        cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
        low, high = low * cos - high * sin, high * cos + low * sin
        # Heads of a group lie side by side in the query; one key and one value head each.
        to_q = ((token.to(tl.int64) * groups + group) * HEADS + row) * (2 * HALF) + lane
        to_kv = (token.to(tl.int64) * groups + group) * (2 * HALF) + lane + row * 0
        kind = q_ptr.dtype.element_ty
        low, high = low.to(kind), high.to(kind)
        tl.store(q_ptr + to_q, low, mask=live & is_q)
        tl.store(q_ptr + to_q + HALF, high, mask=live & is_q)
        tl.store(k_ptr + to_kv, low, mask=live & (row == HEADS))
        tl.store(k_ptr + to_kv + HALF, high, mask=live & (row == HEADS))
        tl.store(v_ptr + to_kv, low, mask=live & is_v)
        tl.store(v_ptr + to_kv + HALF, high, mask=live & is_v)

    @triton.jit
    def _weights(q_weight_ptr, k_weight_ptr, is_q, is_v, lane, HALF: tl.constexpr):
        """Both halves of each row's norm weight; 1 for values."""
        low = tl.where(is_q, tl.load(q_weight_ptr + lane), tl.load(k_weight_ptr + lane))
        high = tl.where(
            is_q, tl.load(q_weight_ptr + HALF + lane), tl.load(k_weight_ptr + HALF + lane)
        )
        return tl.where(is_v, 1.0, low.to(tl.float32)), tl.where(is_v, 1.0, high.to(tl.float32))

    @triton.jit
    def _backward(
        x_ptr, dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
        dx_ptr, dw_ptr, at_ptr, tokens, batch, groups, eps,
        PACKED: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
        HALF: tl.constexpr, T: tl.constexpr,
    ):  # fmt: skip
        row = tl.arange(0, ROWS)[None, :, None]
        lane = tl.arange(0, HALF)[None, None, :]
        is_q, is_k, is_v = row < HEADS, row == HEADS, row == HEADS + 1
        # Whole tiles are summed in registers, and over tokens and rows once, at the end.
        sum_low = tl.zeros([T, ROWS, HALF], tl.float32)
        sum_high = tl.zeros([T, ROWS, HALF], tl.float32)
        if NORM:
            weights = _weights(q_weight_ptr, k_weight_ptr, is_q, is_v, lane, HALF)
        tiles = tl.cdiv(tokens, T) * groups
        tile = tl.program_id(0)
        while tile < tiles:
            group = tile % groups
            token = (tile // groups) * T + tl.arange(0, T)[:, None, None]
            live = (token < tokens) & (row < HEADS + 2)
            place = token.to(tl.int64) * groups + group
            at = (place * (HEADS + 2) + row) * (2 * HALF) + lane
            from_q = (place * HEADS + row) * (2 * HALF) + lane
            from_kv = place * (2 * HALF) + lane + row * 0
            low = tl.load(dq_ptr + from_q, mask=live & is_q, other=0.0).to(tl.float32)
            high = tl.load(dq_ptr + from_q + HALF, mask=live & is_q, other=0.0).to(tl.float32)
            low += tl.load(dk_ptr + from_kv, mask=live & is_k, other=0.0).to(tl.float32)
            high += tl.load(dk_ptr + from_kv + HALF, mask=live & is_k, other=0.0).to(tl.float32)
            low += tl.load(dv_ptr + from_kv, mask=live & is_v, other=0.0).to(tl.float32)
            high += tl.load(dv_ptr + from_kv + HALF, mask=live & is_v, other=0.0).to(tl.float32)
            if PACKED:
                position = tl.load(at_ptr + token, mask=token < tokens, other=0)
            else:
                position = token // batch
            angle = position * HALF + lane
            turned = (token < tokens) & (row < HEADS + 1)
            cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
            sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
            low, high = low * cos + high * sin, high * cos - low * sin
            if NORM:
                x_low = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
                x_high = tl.load(x_ptr + at + HALF, mask=live, other=0.0).to(tl.float32)
                square = tl.sum(x_low * x_low + x_high * x_high, 2) / (2 * HALF)
                scale = (1.0 / tl.sqrt(square + eps))[:, :, None]
                x_low, x_high = x_low * scale, x_high * scale
                sum_low += low * x_low
                sum_high += high * x_high
                w_low, w_high = low * weights[0], high * weights[1]
                inner = tl.sum(w_low * x_low + w_high * x_high, 2)[:, :, None] / (2 * HALF)
                low = tl.where(is_v, low, scale * (w_low - x_low * inner))
                high = tl.where(is_v, high, scale * (w_high - x_high * inner))
            kind = dx_ptr.dtype.element_ty
            tl.store(dx_ptr + at, low.to(kind), mask=live)
            tl.store(dx_ptr + at + HALF, high.to(kind), mask=live)
            tile += tl.num_programs(0)
        if NORM:
            part = dw_ptr + tl.program_id(0) * 4 * HALF + tl.arange(0, HALF)
            tl.store(part, tl.sum(tl.sum(tl.where(is_q, sum_low, 0.0), 1), 0))
            tl.store(part + HALF, tl.sum(tl.sum(tl.where(is_q, sum_high, 0.0), 1), 0))
            tl.store(part + 2 * HALF, tl.sum(tl.sum(tl.where(is_k, sum_low, 0.0), 1), 0))
            tl.store(part + 3 * HALF, tl.sum(tl.sum(tl.where(is_k, sum_high, 0.0), 1), 0))


class SplitNormRotate(torch.autograd.Function):
    """Projection to query, key and value."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBGF: Tensor,
        q_weight_D: Tensor | None,
        k_weight_D: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        eps: float,
        position_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [S, B, G * R, D], key and value [S, B, G, D], contiguous, in the input's dtype.

        Args:
            ctx: autograd's.
            x_SBGF: the projection; F is `(R + 2) * D`, a group's query heads, its key, its value.
            q_weight_D: weight of the queries' RMS norm; None for no norm on either.
            k_weight_D: weight of the keys' RMS norm.
            cos: float32 [S, D / 2], or, with positions, [more than the largest, D / 2].
            sin: the same.
            heads: query heads a group, R.
            eps: the norms' epsilon.
            position_S: int32, the row of `cos` and `sin` for each token of a packed row; B is 1.
        """
        s, b, groups, width = x_SBGF.shape
        size = width // (heads + 2)
        x_SBGF = x_SBGF.contiguous()
        q = x_SBGF.new_empty(s, b, groups * heads, size)
        k, v = (x_SBGF.new_empty(s, b, groups, size) for _ in range(2))
        norm = q_weight_D is not None
        ctx.shape = (s * b, b, groups, eps)
        ctx.sizes = {
            "PACKED": position_S is not None,
            "NORM": norm,
            "HEADS": heads,
            "ROWS": triton.next_power_of_2(heads + 2),
            "HALF": size // 2,
            "T": _TOKENS,
        }
        _forward[(triton.cdiv(s * b, _TOKENS), groups)](
            x_SBGF, q, k, v, cos, sin, q_weight_D if norm else cos, k_weight_D if norm else cos,
            cos if position_S is None else position_S, *ctx.shape, **ctx.sizes, num_warps=_WARPS,
        )  # fmt: skip
        # Without a norm the rotation alone is linear: nothing but its angles is needed again.
        ctx.save_for_backward(
            x_SBGF if norm else None, q_weight_D, k_weight_D, cos, sin, position_S
        )
        ctx.input_shape = x_SBGF.shape
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Gradients of the projection and of the norms' weights."""
        x, q_weight, k_weight, cos, sin, position = ctx.saved_tensors
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        dx = dq.new_empty(ctx.input_shape)
        norm, size = ctx.sizes["NORM"], 2 * ctx.sizes["HALF"]
        programs = _programs(dq.device)
        parts = torch.empty(programs if norm else 1, 2, size, dtype=torch.float32, device=dq.device)
        _backward[(programs,)](
            x if norm else dx, dq, dk, dv, cos, sin, q_weight if norm else cos,
            k_weight if norm else cos, dx, parts, cos if position is None else position,
            *ctx.shape, **ctx.sizes, num_warps=_WARPS,
        )  # fmt: skip
        no = (None,) * 5
        if not norm:
            return dx, None, None, *no
        sums = parts.sum(0)
        return dx, sums[0].to(q_weight.dtype), sums[1].to(k_weight.dtype), *no


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _angles(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D / 2] of upstream's angles [S, 1, 1, D]; made once for all layers."""
    made: tuple[Tensor, Tensor] | None = getattr(freqs, "_cos_sin", None)
    if made is None:
        half = freqs[:, 0, 0, : freqs.shape[-1] // 2].float()
        made = half.cos().contiguous(), half.sin().contiguous()
        freqs._cos_sin = made  # type: ignore[attr-defined]
    return made


def packed_positions(edges: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    """Position in its own sample of each token that a context-parallel rank holds.

    A rank holds of every sample the pieces number `rank` and `2 * size - 1 - rank` of twice as many
    as there are ranks. Nothing here waits for the device.

    Args:
        edges: int [n + 1], where samples begin in the whole row, alignment counted.
        tokens: on this rank; those behind the last sample get some position or other.
        size: context-parallel ranks.
        rank: this one.

    Returns:
        int32 [tokens].
    """
    here = torch.arange(tokens, device=edges.device, dtype=torch.int32)
    begins = (edges // size).to(torch.int32)
    sample = torch.searchsorted(begins[1:-1].contiguous(), here, right=True)
    offset = here - begins[sample]
    if size == 1:
        return offset
    piece = (edges.diff() // (2 * size)).to(torch.int32)[sample]
    second = offset >= piece
    number = torch.where(second, 2 * size - 2 - rank, rank)  # pieces in front, less one's own first
    return number * piece + offset


def _row_positions(attention: Any, packed: Any, tokens: int, rows: int) -> Tensor:
    """`packed_positions` of a row, within a table of so many rows; made once for all layers."""
    made: Tensor | None = getattr(packed, "_positions", None)
    if made is None:
        padded = packed.cu_seqlens_q_padded
        edges = packed.cu_seqlens_q if padded is None else padded
        group = attention.pg_collection.cp
        made = packed_positions(edges, tokens, group.size(), group.rank()).clamp_(max=rows - 1)
        packed._positions = made
    return made


def _norms(attention: Any) -> list[Any]:
    """The norms on query and key heads, of those that do anything."""
    from megatron.core.transformer.identity_op import IdentityOp

    both = (attention.q_layernorm, attention.k_layernorm)
    return [norm for norm in both if norm is not None and not isinstance(norm, IdentityOp)]


def covers(attention: Any) -> bool:
    """Whether the kernel does all that an attention module of Megatron-Core does here."""
    from megatron.core.transformer.attention import SelfAttention

    if triton is None or type(attention) is not SelfAttention:
        return False
    config, size = attention.config, attention.hidden_size_per_attention_head
    norms = _norms(attention)
    return not (
        size & (size - 1)  # a power of two
        or size > 256
        or config.attention_output_gate
        or config.rotary_interleaved
        or getattr(config, "rotary_percent", 1.0) != 1.0
        or config.mrope_section is not None
        or attention._yarn_concentration_factor != 1.0
        or config.num_query_groups < attention.world_size
        or len(norms) == 1
        or (norms and config.normalization != "RMSNorm")
        or config.layernorm_zero_centered_gamma
        or (config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1])
        or attention.offload_qkv_linear
        or config.test_mode
    )


def _packed_as_known(packed: Any) -> bool:
    """No packed row, or one whose samples are cut over the ranks in the one way."""
    if packed is None:
        return True
    return packed.qkv_format == "thd" and getattr(packed, "local_cp_size", None) is None


#: Asks a norm for its weight: by a call, so that hooks (waiting for gathered parameters) run.
_WEIGHT = object()


def _weight_on_request(layer: Any, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def forward(given: Any) -> Any:
        return layer.weight if given is _WEIGHT else plain(given)

    return forward


def install(stage: Any) -> None:
    """Let the attention of a stage take queries, keys and values from `SplitNormRotate`.

    Inference and whatever the kernel does not cover go upstream's way.
    """
    for module in stage.modules():
        if covers(module):
            _install(module)


def _install(attention: Any) -> None:
    plain_forward, plain_qkv = attention.forward, attention.get_query_key_value_tensors
    norms = _norms(attention)
    for layer in norms:
        layer.forward = _weight_on_request(layer, layer.forward)
    groups = attention.num_query_groups_per_partition
    heads = attention.num_attention_heads_per_partition // groups
    angles: list[tuple[Tensor, Any]] = []

    def forward(*args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        freqs = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        inference = kwargs.get("inference_context") or kwargs.get("inference_params")
        if (
            freqs is None
            or not freqs.is_cuda
            or not _packed_as_known(kwargs.get("packed_seq_params"))
            or inference is not None
            or freqs.shape[-1] != attention.hidden_size_per_attention_head
            or freqs.shape[1] != 1
        ):
            return plain_forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        angles.append((freqs, kwargs.get("packed_seq_params")))
        try:
            return plain_forward(*args, rotary_pos_emb=None, **kwargs)
        finally:
            angles.clear()

    def qkv(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not angles:
            return plain_qkv(hidden_states, *args, **kwargs)
        mixed, _ = attention.linear_qkv(hidden_states)
        s, b = mixed.shape[:2]
        weights = [layer(_WEIGHT) for layer in norms] or [None, None]
        freqs, packed = angles[0]
        at = None if packed is None else _row_positions(attention, packed, s, freqs.shape[0])
        return SplitNormRotate.apply(
            mixed.view(s, b, groups, -1),
            *weights,
            *_angles(freqs),
            heads,
            attention.config.layernorm_epsilon,
            at,
        )

    attention.forward = forward
    attention.get_query_key_value_tensors = qkv
