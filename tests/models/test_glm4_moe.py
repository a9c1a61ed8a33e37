from __future__ import annotations

from check_family import check_family
from configs import GLM4_MOE


def test_contract(tmp_path):
    check_family("glm4_moe", GLM4_MOE, "glm4_moe", tmp_path)


def test_tied_without_norms_and_biases_three_groups(tmp_path):
    config = GLM4_MOE | {
        "attention_bias": False,
        "n_group": 4,
        "n_routed_experts": 16,
        "num_nextn_predict_layers": 2,
        "partial_rotary_factor": 0.25,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "topk_group": 3,
        "use_qk_norm": False,
    }
    check_family("glm4_moe", config, "glm4_moe_groups", tmp_path)
