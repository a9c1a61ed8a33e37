from __future__ import annotations

import json

import pytest
import torch
from check_family import check_family, random_hf_model, resolve
from configs import DEEPSEEK_V3

from megatron_patch.convert.verify import _transformers_logits
from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("deepseek_v3", DEEPSEEK_V3, "deepseek_v3", tmp_path)


def test_as_moonlight(tmp_path):
    """Queries without low rank, plain rope, one group, an epsilon that the latent norms lack."""
    config = DEEPSEEK_V3 | {
        "n_group": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-3,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "topk_group": 1,
    }
    check_family("deepseek_v3", config, "moonlight", tmp_path)


def test_rope_whose_factor_is_not_one(tmp_path):
    """Cos and sin are multiplied, the softmax scale is another, every group has three votes."""
    scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    config = DEEPSEEK_V3 | {
        "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 2,
        "rope_scaling": scaling | {"mscale_all_dim": 0.5, "attention_factor": 1.3},
    }
    check_family("deepseek_v3", config, "deepseek_v3_factor", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace.*dense"),
        ({"n_group": 5}, "n_group.*n_routed_experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob.*not supported"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok.*n_routed_experts"),
        ({"num_experts_per_tok": 9}, "topk_group.*num_experts_per_tok"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"q_lora_rank": None}, "num_nextn_predict_layers.*q_lora_rank"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*FP8"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_group": 5}, "topk_group"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        resolve(DEEPSEEK_V3 | change, tmp_path)


def test_kimi_k2_is_the_same_architecture(tmp_path):
    spec = resolve(DEEPSEEK_V3 | {"model_type": "kimi_k2"}, tmp_path)
    assert spec.family == "deepseek_v3"
    assert spec.args == resolve(DEEPSEEK_V3, tmp_path).args


def test_code_that_a_model_brings_is_never_run(tmp_path):
    """`verify --logits` takes transformers' class for a type that transformers does not know."""
    resolve(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}, tmp_path / "config")
    model = random_hf_model(tmp_path / "config")
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"model_type": "kimi_k2", "auto_map": DEEPSEEK_V3["auto_map"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(tokens).logits
    assert torch.equal(_transformers_logits(tmp_path, "deepseek_v3", tokens), expected)


def test_queries_need_a_word_on_their_rank(tmp_path):
    """Transformers' default would be 1536, not none."""
    config = {key: value for key, value in DEEPSEEK_V3.items() if key != "q_lora_rank"}
    with pytest.raises(UserError, match=r"q_lora_rank.*null"):
        resolve(config, tmp_path)
