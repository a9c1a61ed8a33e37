"""Core attention without Transformer Engine, against scores written out in float64."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from megatron_patch.ops import attention, attention_backend
from megatron_patch.util import UserError
from tests.dist.attention_jobs import HEADS, config, core, packed, reference
from tests.models.megatron_model import one_rank


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank(), torch.random.fork_rng():
        yield


def inputs(rows, batch=2, groups=HEADS, width=8, value=8, queries=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    shapes = [
        (queries or rows, batch, HEADS, width),
        (rows, batch, groups, width),
        (rows, batch, groups, value),
    ]
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in shapes]


def check(out, expected, leaves):
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, dtype=expected.dtype)
    ours = torch.autograd.grad((out * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("groups", "width", "value"),
    [(4, 8, 8), (2, 8, 8), (1, 8, 8), (4, 12, 8), (2, 12, 8), (4, 8, 12)],
)
def test_dense(causal, groups, width, value):
    q, k, v = leaves = inputs(9, groups=groups, width=width, value=value)
    layer = core(width=width, value_width=value)
    kind = AttnMaskType.causal if causal else AttnMaskType.no_mask
    expected = reference(q, k, v, causal=causal, scale=width**-0.5)
    out = layer(q, k, v, None, attn_mask_type=kind)
    assert out.shape == (9, 2, HEADS * value)
    check(out, expected.flatten(2), leaves)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("queries", [1, 4])
def test_causal_over_a_prefix_is_aligned_at_its_end(groups, queries):
    """The last query sees every key: decoding, and a chunk of a longer sequence."""
    q, k, v = leaves = inputs(11, groups=groups, queries=queries)
    for kind in (AttnMaskType.causal, AttnMaskType.causal_bottom_right):
        out = core(width=8)(q, k, v, None, attn_mask_type=kind)
        check(out, reference(q, k, v, causal=True, scale=8**-0.5).flatten(2), leaves)


@pytest.mark.parametrize("queries", [1, 5, 11])
@pytest.mark.parametrize("window", [None, 0, 3, 9, 10, 50])
@pytest.mark.parametrize(("groups", "value"), [(2, 8), (4, 12)])
@pytest.mark.parametrize("kind", ["vanilla", "learnable", "off-by-one"])
def test_windows_and_sinks(kind, groups, value, window, queries):
    q, k, v = leaves = inputs(11, groups=groups, queries=queries, value=value)
    size = None if window is None else (window, 0)
    layer = core(width=8, value_width=value, window_size=size, softmax_type=kind)
    sink = None
    if kind == "learnable":
        sink = torch.nn.Parameter(torch.randn(HEADS, dtype=torch.float64))
        layer.softmax_offset, leaves = sink, [*leaves, sink]
    elif kind == "off-by-one":
        sink = torch.zeros(HEADS, dtype=torch.float64)
    expected = reference(q, k, v, causal=True, scale=8**-0.5, window=window, sink=sink)
    check(layer(q, k, v, None), expected.flatten(2), leaves)


@pytest.mark.parametrize(("skip", "window"), [(None, 4), (3, None), (2, 4), ([1, 1, 0], None)])
def test_some_layers_have_no_window(skip, window):
    assert core(width=8, window_size=(4, 0), window_attn_skip_freq=skip).window == window


def test_a_window_of_both_sides_is_refused():
    q, k, v = inputs(6)
    with pytest.raises(ValueError, match="causal only"):
        core(width=8, window_size=(4, 0))(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)


def test_masks_say_what_is_left_out():
    q, k, v = leaves = inputs(6)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, :, 4:] = True  # the first row has four real tokens
    layer = core(width=8)
    for kind in (AttnMaskType.padding, AttnMaskType.arbitrary):
        short = reference(q[:, :1], k[:4, :1], v[:4, :1], causal=False, scale=8**-0.5)
        long = reference(q[:, 1:], k[:, 1:], v[:, 1:], causal=False, scale=8**-0.5)
        out = layer(q, k, v, mask, attn_mask_type=kind)
        check(out, torch.cat([short, long], dim=1).flatten(2), leaves)
    out = layer(q, k, v, mask, attn_mask_type=AttnMaskType.padding_causal)
    real = reference(q[:4, :1], k[:4, :1], v[:4, :1], causal=True, scale=8**-0.5)
    torch.testing.assert_close(out[:4, :1], real.flatten(2))
    # Rows of padding see the real tokens and nothing else.
    torch.testing.assert_close(out[4:, :1], short[4:].flatten(2))
    long = reference(q[:, 1:], k[:, 1:], v[:, 1:], causal=True, scale=8**-0.5)
    torch.testing.assert_close(out[:, 1:], long.flatten(2))


def test_scale():
    q, k, v = (x.detach() for x in inputs(5))

    def scale_of(**kwargs):
        layer = attention.SDPACoreAttention(
            config(**kwargs.pop("config", {})), 3, AttnMaskType.causal, "self", **kwargs
        )
        torch.testing.assert_close(
            layer(q, k, v, None),
            reference(q, k, v, causal=True, scale=layer.softmax_scale).flatten(2),
        )
        return layer.softmax_scale

    assert scale_of() == pytest.approx(8**-0.5)  # hidden size / heads
    assert scale_of(k_channels=16) == 0.25
    assert scale_of(softmax_scale=0.3, k_channels=16) == 0.3
    # It keeps half-precision scores in range and cancels out of the result.
    assert scale_of(config={"apply_query_key_layer_scaling": True}) == pytest.approx(8**-0.5)


# --- dropout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_drawn_from_the_tracker(sequence_parallel):
    """Off in evaluation; repeatable; heads of another TP rank draw from another state."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    q, k, v = (x.detach() for x in inputs(16, dtype=torch.float32))
    layer = core(width=8, attention_dropout=0.5)
    layer.config.sequence_parallel = sequence_parallel
    plain = layer.eval()(q, k, v, None)
    torch.testing.assert_close(
        plain, reference(q, k, v, causal=True, scale=8**-0.5).flatten(2), rtol=1e-5, atol=1e-5
    )
    layer.train()
    model_parallel_cuda_manual_seed(7)
    outside = torch.get_rng_state()
    first, second = layer(q, k, v, None), layer(q, k, v, None)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second), "the state moves on"
    # Under sequence parallelism the whole layer runs inside the tracker's state already.
    assert torch.equal(torch.get_rng_state(), outside) != sequence_parallel
    model_parallel_cuda_manual_seed(7)
    assert torch.equal(layer(q, k, v, None), first)
    get_cuda_rng_tracker().reset()
    model_parallel_cuda_manual_seed(8)
    assert not torch.equal(layer(q, k, v, None), first)
    # Expectation: the weights are scaled up by what is dropped.
    mean = torch.stack([layer(q, k, v, None) for _ in range(300)]).mean(0)
    assert (mean - plain).abs().mean() < 0.1


def test_dropout_argument_wins_over_the_configuration():
    layer = attention.SDPACoreAttention(
        config(attention_dropout=0.5), 1, AttnMaskType.causal, "self", attention_dropout=0.0
    )
    assert layer.dropout == 0.0


# --- packed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_batch", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(4, 8), (2, 8), (4, 12)])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_a_pack_do_not_see_each_other(causal, multiple, groups, width, keep_batch):
    lengths = [5, 1, 8, 3]
    params, _, padded = packed(lengths, multiple)
    if multiple == 1:
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = None
    rows = padded[-1] + 3  # three rows after the last document
    leaves = inputs(rows, batch=1, groups=groups, width=width)
    real = torch.cat([torch.arange(n) + s for n, s in zip(lengths, padded[:-1], strict=True)])
    with torch.no_grad():
        padding = torch.ones(rows, dtype=torch.bool)
        padding[real] = False
        for x in leaves:
            x[padding] = torch.nan
    q, k, v = leaves if keep_batch else [x.squeeze(1) for x in leaves]
    layer = core(width=width, value_width=8)
    kind = AttnMaskType.padding_causal if causal else AttnMaskType.padding
    out = layer(q, k, v, None, attn_mask_type=kind, packed_seq_params=params)
    assert out.shape == ((rows, 1, HEADS * 8) if keep_batch else (rows, HEADS * 8))
    out = out.reshape(rows, -1)
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))
    alone = AttnMaskType.causal if causal else AttnMaskType.no_mask
    expected = []
    for start, n in zip(padded[:-1], lengths, strict=True):
        document = [x[start : start + n] for x in leaves]
        separate = layer(*document, None, attn_mask_type=alone)  # the same layer, run separately
        naive = reference(*document, causal=causal, scale=width**-0.5).flatten(2)
        torch.testing.assert_close(separate, naive, rtol=0, atol=1e-12)
        expected.append(naive.squeeze(1))
    check(out[real], torch.cat(expected), leaves)
    gradients = torch.autograd.grad(
        layer(q, k, v, None, attn_mask_type=kind, packed_seq_params=params).sum(), leaves
    )
    for gradient in gradients:
        assert torch.equal(gradient[padding], torch.zeros_like(gradient[padding]))


def test_packed_dropout_is_repeatable():
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    params, _, _ = packed([5, 3], 1)
    q, k, v = (x.detach().squeeze(1) for x in inputs(8, batch=1))
    layer = core(width=8, attention_dropout=0.3).train()
    runs = []
    for _ in range(2):
        model_parallel_cuda_manual_seed(3)
        runs.append(layer(q, k, v, None, packed_seq_params=params))
    assert torch.equal(*runs)
    assert not torch.equal(runs[0], layer.eval()(q, k, v, None, packed_seq_params=params))


# --- refusals ---------------------------------------------------------------------------------


def test_cross_attention_is_refused():
    with pytest.raises(ValueError, match="only self-attention"):
        attention.SDPACoreAttention(config(), 1, AttnMaskType.causal, "cross")


def test_calls_refused():
    layer = core(width=8)
    q, k, v = inputs(4)
    with pytest.raises(ValueError, match="attention bias"):
        layer(q, k, v, None, attention_bias=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="mask type padding needs an attention mask"):
        layer(q, k, v, None, attn_mask_type=AttnMaskType.padding)
    params, _, _ = packed([4], 1)
    with pytest.raises(ValueError, match=r"one row of tokens, got 2.*--micro-batch-size 1"):
        layer(q, k, v, None, packed_seq_params=params)
    params.qkv_format = "sbhd"
    with pytest.raises(ValueError, match="come as thd, got 'sbhd'"):
        layer(q, k, v, None, packed_seq_params=params)


def test_nothing_to_save():
    layer = core(width=8)
    assert layer.state_dict() == {}
    assert layer.sharded_state_dict("decoder.") == {}


def test_zigzag_is_its_own_proof():
    """Rank r of c holds chunks r and 2c-1-r; putting them back gives the sequence."""
    for size in (1, 2, 3, 4):
        sequence = torch.arange(2 * size * 3)
        chunks = sequence.chunk(2 * size)
        gathered = torch.cat(
            [part for r in range(size) for part in (chunks[r], chunks[2 * size - 1 - r])]
        )
        assert torch.equal(attention.to_natural_order(gathered, size), sequence)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", "attention, window 3, 1 layers: SDPA flash"),
        ("unfused", "attention, window 3, 1 layers: SDPA unfused (math)"),
    ],
)
def test_the_kernel_is_named_at_the_first_call(asked, expected):
    layer = core(width=8, attention_backend=AttnBackend[asked], window_size=(3, 0))
    attending = torch.nn.Module()
    attending.core_attention, attending.config = layer, layer.config
    attending.layer_number = layer.layer_number = 1
    stage = torch.nn.Module()
    stage.self_attention = attending
    said = []
    attention_backend.watch([stage], said.append)
    q, k, v = inputs(4, dtype=torch.float32)
    for _ in range(2):
        layer(q, k, v, None)
    assert said == [expected]


def test_a_backend_that_cannot_run_is_refused():
    layer = core(width=8, attention_backend=AttnBackend.fused)
    with pytest.raises(UserError, match="--attention-backend fused cannot run"):
        layer(*inputs(4, dtype=torch.float32), None)


# --- Transformer Engine with a FlashAttention 4 that reads windows its own way --------------------


def _b36(causal, left, right):
    """How 4.0.0b36 turns a window into (causal, local, left, right)."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    if causal:
        right = 0
    if left is None and right in (0, None):
        return right == 0, False, None, None
    return False, True, left, right


def _fixed(causal, left, right):
    return _b36(causal, None if left == -1 else left, right)


@pytest.mark.parametrize(
    ("resolve", "others", "asked", "outcome"),
    [
        (_b36, False, "flash", UserError),
        (_b36, True, "flash", "left out"),
        (_b36, False, "auto", "left out"),
        (_fixed, False, "flash", None),
    ],
)
def test_a_flash_attention_4_that_would_see_nothing(monkeypatch, resolve, others, asked, outcome):
    class Utils:
        v4_is_installed, v3_is_installed, is_installed = True, False, others
        fa4_version, v4_installation_steps = "4.0.0b36", "pip install it"

    path = "transformer_engine.pytorch.attention.dot_product_attention"
    parts = path.split(".")
    for name in [".".join(parts[: i + 1]) for i in range(len(parts))]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[path].utils = types.SimpleNamespace(FlashAttentionUtils=Utils)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute.interface"]._resolve_causal_local_window = resolve
    said = []
    if outcome is UserError:
        with pytest.raises(UserError, match=r"b36 reads .* window of -1 tokens.*pip install it"):
            attention_backend.without_wrong_flash_attention_4(asked, said.append)
        return
    attention_backend.without_wrong_flash_attention_4(asked, said.append)
    assert Utils.v4_is_installed == (outcome is None)
    assert [outcome in line for line in said] == ([True] if outcome else [])
