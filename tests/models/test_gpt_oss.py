from __future__ import annotations

import pytest
import torch
from check_family import check_family, resolve
from configs import GPT_OSS

from megatron_patch.training.model import _say_who_shares
from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("gpt_oss", GPT_OSS, "gpt_oss", tmp_path)


def test_windows(tmp_path):
    plain = {k: v for k, v in GPT_OSS.items() if k != "layer_types"}
    assert resolve(plain, tmp_path).args == resolve(GPT_OSS, tmp_path).args
    every = resolve(plain | {"layer_types": ["sliding_attention"] * 4}, tmp_path).args
    assert every["window_size"] == "23,0" and "window_attn_skip_freq" not in every
    none = resolve(plain | {"layer_types": ["full_attention"] * 4}, tmp_path).args
    assert "window_size" not in none
    with pytest.raises(UserError, match="'sliding_window' is missing"):
        resolve(GPT_OSS | {"sliding_window": None}, tmp_path)


def test_other_maths_and_a_loss_that_transformers_does_not_add(tmp_path):
    for key, value in (("swiglu_alpha", 1.0), ("attention_bias", False), ("head_dim", None)):
        changed = {k: v for k, v in GPT_OSS.items() if k != key}
        changed |= {} if value is None else {key: value}
        with pytest.raises(UserError, match=f"'{key}' is"):
            resolve(changed, tmp_path)
    quiet = resolve(GPT_OSS | {"output_router_logits": False}, tmp_path)
    assert quiet.args["moe_aux_loss_coeff"] == 0.0
    assert any("no load-balancing loss" in note for note in quiet.notes)


def test_an_experts_bias_is_shared_by_the_ranks_of_the_expert_only():
    """Else its gradient is added over TP ranks once more (`test_variant_layouts`, slow)."""
    stage = torch.nn.Module()
    layer = "decoder.layers.0."
    bias = f"{layer}mlp.experts.local_experts.0.linear_fc2.bias"
    router, sinks = f"{layer}mlp.router.bias", f"{layer}core_attention.softmax_offset"
    names = (bias, router, sinks)
    for name in names:
        module = stage
        for part in name.split(".")[:-1]:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.sequence_parallel = "bias" in name
        module.register_parameter(name.rpartition(".")[2], parameter)
    _say_who_shares(stage)
    held = dict(stage.named_parameters())
    assert [held[name].sequence_parallel for name in names] == [False, True, False]
    assert held[sinks].tensor_model_parallel
