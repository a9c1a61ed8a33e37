"""Weight rules: what they refuse, and the parts that a family's round trip does not reach."""

from __future__ import annotations

import pytest
import torch
from check_family import resolve
from configs import LLAMA, QWEN2, QWEN3, QWEN3_MOE

from megatron_patch.convert import rules
from megatron_patch.convert.layout import checkpoint_key
from megatron_patch.convert.rules import GroupedQKV, PadVocab, Rename, Rule, to_hf, to_megatron
from megatron_patch.models import registry
from megatron_patch.util import UserError


def hf_tensors(spec) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        name: torch.randn(shape)
        for rule in rules.spec_rules(spec)
        for name, shape in zip(rule.hf, rule.shapes, strict=True)
    }


@pytest.fixture
def qwen3(tmp_path):
    return resolve(QWEN3, tmp_path)


def test_query_key_value_rows_are_interleaved_by_group():
    q, k, v = torch.arange(8), torch.arange(20, 24), torch.arange(30, 34)
    whole = GroupedQKV(groups=2, queries=2, head_dim=2).forward((q, k, v))
    assert whole.tolist() == [0, 1, 2, 3, 20, 21, 30, 31, 4, 5, 6, 7, 22, 23, 32, 33]


def test_padded_rows_are_zero_and_dropped():
    pad = PadVocab(3, 8)
    whole = pad.forward((torch.ones(3, 2),))
    assert whole.shape == (8, 2) and not whole[3:].any()
    whole[3:] = 7
    assert torch.equal(pad.inverse(whole)[0], torch.ones(3, 2))


def test_dtype_is_kept(qwen3):
    tensors = {n: t.to(torch.bfloat16) for n, t in hf_tensors(qwen3).items()}
    there = dict(to_megatron(tensors, qwen3))
    assert {t.dtype for t in there.values()} == {torch.bfloat16}
    back = dict(to_hf(there, qwen3))
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"lacks 1 .*layers\.1\.mlp\.up_proj"),
        ({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}, r"1 tensors too many .*layers\.3"),
        ({"model.norm.weight": torch.ones(63)}, r"model\.norm\.weight is \[63\].*\[64\]"),
        ({"model.embed_tokens.weight": torch.ones(1024, 64)}, r"\[1024, 64\].*\[1000, 64\]"),
    ],
)
def test_gaps_leftovers_and_shapes_of_hf_tensors_are_refused(qwen3, change, words):
    tensors = hf_tensors(qwen3) | change
    with pytest.raises(UserError, match=words):
        dict(to_megatron({n: t for n, t in tensors.items() if t is not None}, qwen3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder.final_layernorm.weight": None}, r"lacks 1 .*final_layernorm"),
        ({"decoder.layers.7.mlp.linear_fc2.weight": torch.ones(1)}, "too many"),
        ({"output_layer.weight": torch.ones(1000, 64)}, r"\[1000, 64\].*\[1024, 64\]"),
    ],
)
def test_gaps_leftovers_and_shapes_of_megatron_tensors_are_refused(qwen3, change, words):
    tensors = dict(to_megatron(hf_tensors(qwen3), qwen3)) | change
    with pytest.raises(UserError, match=words):
        dict(to_hf({n: t for n, t in tensors.items() if t is not None}, qwen3))


def test_names_are_checked_before_a_tensor_is_read(qwen3):
    class Unread(dict):
        def __getitem__(self, name):
            raise AssertionError(f"{name} was read")

    tensors = Unread(hf_tensors(qwen3))
    del tensors["lm_head.weight"]
    with pytest.raises(UserError, match="lm_head"):
        next(to_megatron(tensors, qwen3))


def test_extra_state_and_derived_buffers_are_not_weights(tmp_path):
    spec = resolve(LLAMA, tmp_path)
    tensors = hf_tensors(spec)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    there = dict(to_megatron(tensors | buffer, spec))
    assert set(there) == set(dict(to_megatron(tensors, spec)))
    extra = {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
    assert set(dict(to_hf(there | extra, spec))) == set(tensors)


def test_tied_model_with_its_head_in_the_file(tmp_path):
    spec = resolve(QWEN2, tmp_path)
    tensors = hf_tensors(spec)
    assert "lm_head.weight" not in tensors
    there = dict(to_megatron(tensors, spec))
    assert "output_layer.weight" not in there
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    again = dict(to_megatron(tensors | head, spec))
    assert set(again) == set(there)
    back = dict(to_hf(there, spec, repeated={"lm_head.weight"}))
    assert set(back) == set(tensors | head)
    assert back["lm_head.weight"].data_ptr() != back["model.embed_tokens.weight"].data_ptr()
    with pytest.raises(UserError, match="tie_word_embeddings"):
        dict(to_megatron(tensors | {"lm_head.weight": head["lm_head.weight"] + 1}, spec))


def test_grouped_experts_have_their_own_names(tmp_path):
    spec = resolve(QWEN3_MOE, tmp_path)
    tensors = hf_tensors(spec)
    grouped = dict(to_megatron(tensors, spec, grouped_experts=True))
    one_by_one = dict(to_megatron(tensors, spec))
    assert torch.equal(
        grouped["decoder.layers.2.mlp.experts.linear_fc1.weight7"],
        one_by_one["decoder.layers.2.mlp.experts.local_experts.7.linear_fc1.weight"],
    )
    back = dict(to_hf(grouped, spec, grouped_experts=True))
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_a_name_in_two_rules_is_a_mistake_of_the_family(qwen3, monkeypatch):
    family = registry.get_family("qwen3")
    again = Rule("head.weight", ("model.norm.weight",), ((64,),), Rename())

    class Doubled:
        def rules(self, spec):
            return (*family.rules(spec), again)

    monkeypatch.setattr(registry, "get_family", lambda name: Doubled())
    with pytest.raises(ValueError, match=r"covered by two rules: model\.norm\.weight"):
        rules.spec_rules(qwen3)


def test_an_unknown_logical_name_is_an_error():
    assert checkpoint_key("layers.12.attention.qkv.bias") == (
        "decoder.layers.12.self_attention.linear_qkv.bias"
    )
    for name in ("layers.0.attention.gate.weight", "layers.0.moe.experts.0.bias.weight", "foo"):
        with pytest.raises(KeyError):
            checkpoint_key(name)
