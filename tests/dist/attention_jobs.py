"""Context-parallel attention on real ranks, against attention written out on the whole sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEADS = 4


def reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    sink: Any = None,
) -> Any:
    """[s, b, h, d], [t, b, g, d], [t, b, g, v] -> [s, b, h, v]; scores written out."""
    import torch

    s, t, repeat = q.shape[0], k.shape[0], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    if causal:
        row, column = torch.arange(s)[:, None], torch.arange(t)[None]
        scores = scores.masked_fill(column > row + t - s, -torch.inf)
        if window is not None:
            scores = scores.masked_fill(column < row + t - s - window, -torch.inf)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()[:, None, None]
    return torch.einsum("bhst,tbhv->sbhv", weights / total, v)


def config(context_parallel: int = 1, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": HEADS,
            "attention_dropout": 0.0,
            "context_parallel_size": context_parallel,
            **more,
        }
    )


def core(context_parallel: int = 1, *, width: int, value_width: int | None = None, **more: Any):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_patch.ops.attention import SDPACoreAttention

    return SDPACoreAttention(
        config(context_parallel, **more),
        layer_number=3,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        k_channels=width,
        v_channels=value_width or width,
    )


def packed(lengths: list[int], multiple: int) -> tuple[Any, Any, Any]:
    """Boundaries of padded documents; `pad` is None where there is no padding."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    room = [-(-n // multiple) * multiple for n in lengths]
    real, padded = (
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)
        for x in (lengths, room)
    )
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(room),
        max_seqlen_kv=max(room),
    )
    return params, real.tolist(), padded.tolist()


def chunks_of(rank: int, size: int, start: int, room: int) -> list[int]:
    """Rows of a sequence at [start, start + room) that a context-parallel rank holds."""
    n = room // (2 * size)
    first, second = rank * n, (2 * size - 1 - rank) * n
    return [start + i for i in (*range(first, first + n), *range(second, second + n))]


CASES = {
    "dense": {"batch": 2, "groups": 4, "width": 8, "value": 8},
    "dense-gqa": {"batch": 1, "groups": 2, "width": 8, "value": 8},
    "dense-mla": {"batch": 2, "groups": 4, "width": 12, "value": 8},
    "packed": {"lengths": [16, 32, 8, 8], "groups": 4, "width": 8, "value": 8},
    "packed-odd": {"lengths": [1, 5, 7, 16, 3], "groups": 2, "width": 8, "value": 8},
    # Most ranks hold nothing but padding and still take part.
    "packed-short": {"lengths": [1], "groups": 2, "width": 8, "value": 8},
    "window": {"batch": 2, "groups": 2, "width": 8, "value": 8, "window": 5},
    "packed-sink": {
        "lengths": [13, 2, 9],
        "groups": 2,
        "width": 8,
        "value": 8,
        "window": 3,
        "sink": True,
    },
    "packed-tail": {"lengths": [13, 2], "groups": 2, "width": 12, "value": 8, "tail": 16},
}


def _one(rank: int, size: int, case: dict[str, Any], name: str) -> dict[str, float]:
    import torch

    dtype = torch.float64
    generator = torch.Generator().manual_seed(len(name))
    if "lengths" in case:
        params, _, padded = packed(case["lengths"], 2 * size)
        tail = case.get("tail", 0)  # rows after the last document
        rows = padded[-1] + tail
        batch = 1
        mine = [
            row
            for i in range(len(padded) - 1)
            for row in chunks_of(rank, size, padded[i], padded[i + 1] - padded[i])
        ] + [padded[-1] + rank * (tail // size) + i for i in range(tail // size)]
        valid = torch.zeros(rows, dtype=torch.bool)
        for i, n in enumerate(case["lengths"]):
            valid[padded[i] : padded[i] + n] = True
    else:
        params, rows, batch = None, 32, case["batch"]
        mine = chunks_of(rank, size, 0, rows)
        valid = torch.ones(rows, dtype=torch.bool)

    def make(heads: int, width: int) -> torch.Tensor:
        return torch.randn(rows, batch, heads, width, dtype=dtype, generator=generator)

    q, k = make(HEADS, case["width"]), make(case["groups"], case["width"])
    v, weight = make(case["groups"], case["value"]), make(HEADS, case["value"])
    # On the whole sequence, in this process.
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    sink = torch.randn(HEADS, dtype=dtype, generator=generator) if "sink" in case else None
    if sink is not None:
        whole.append(sink.clone().requires_grad_())
    scale = case["width"] ** -0.5
    more = {"causal": True, "scale": scale, "window": case.get("window"), "sink": sink}
    more |= {"sink": whole[3]} if sink is not None else {}
    expected = torch.zeros_like(weight)
    if params is None:
        expected = reference(*whole[:3], **more)
    else:
        pieces, done = [], 0
        for start, n in zip(padded[:-1], case["lengths"], strict=True):
            piece = reference(*(x[start : start + n] for x in whole[:3]), **more)
            pieces += [expected[done:start], piece]
            done = start + n
        expected = torch.cat([*pieces, expected[done:]])
    (expected * weight).sum().backward()
    # On this rank. Whatever stands in rows of padding must not matter.
    local = []
    for x in (q, k, v):
        x = x.clone()
        x[~valid] = torch.nan
        x = x[mine] if params is None else x[mine].squeeze(1)
        local.append(x.requires_grad_())
    flags = {"window_size": (case["window"], 0)} if "window" in case else {}
    flags |= {"softmax_type": "learnable"} if sink is not None else {}
    layer = core(size, width=case["width"], value_width=case["value"], **flags)
    if sink is not None:
        layer.softmax_offset = torch.nn.Parameter(sink)
    out = layer(*local, None, packed_seq_params=params)
    want = expected[mine].reshape(*out.shape)
    # `where`, since the loss mask cuts padding out of the loss, not out of the graph.
    (out * weight[mine].reshape(*out.shape)).sum().backward()
    gaps = {"output": (out - want).abs().max().item()}
    assert torch.equal(out[~valid[mine]], torch.zeros_like(out[~valid[mine]])), "rows of padding"
    for label, ours, theirs in zip("qkv", local, whole[:3], strict=True):
        gaps[label] = (ours.grad - theirs.grad[mine].reshape(ours.shape)).abs().max().item()
    if sink is not None:
        torch.distributed.all_reduce(layer.softmax_offset.grad)
        gaps["sink"] = (layer.softmax_offset.grad - whole[3].grad).abs().max().item()
    assert all(gap == gap for gap in gaps.values()), gaps
    return gaps


def attend(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, float]]:
    """Every case with as many context-parallel ranks as there are."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(context_parallel_size=world_size)
    model_parallel_cuda_manual_seed(1)
    return {name: _one(rank, world_size, case, name) for name, case in CASES.items()}


def refuse(rank: int, world_size: int, directory: Path) -> list[str]:
    """What context parallelism cannot do here, in the messages' words."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(context_parallel_size=world_size)
    layer = core(world_size, width=8)
    dense = [torch.randn(8, 1, HEADS, 8) for _ in range(3)]
    row = [torch.randn(6, HEADS, 8) for _ in range(3)]
    uneven, _, _ = packed([6], 6)
    even, _, _ = packed([12], 4)
    dynamic, _, _ = packed([12], 4)
    dynamic.local_cp_size = 2
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    calls = [
        lambda: layer(*dense, mask, attn_mask_type=AttnMaskType.no_mask),
        lambda: layer(*dense, mask, attn_mask_type=AttnMaskType.padding_causal),
        lambda: layer(*row, None, packed_seq_params=uneven),
        lambda: layer(*row, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=even),
        lambda: layer(*row, None, packed_seq_params=dynamic),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")
    return messages
