from __future__ import annotations

from check_family import check_family
from configs import DEEPSEEK_V3


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
