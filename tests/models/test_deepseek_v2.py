from __future__ import annotations

from check_family import check_family
from configs import DEEPSEEK_V2

#: As V2-Lite: queries without low rank, no groups, plain rope.
LITE = DEEPSEEK_V2 | {
    "n_group": 1,
    "num_experts_per_tok": 3,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-3,
    "rope_scaling": None,
    "topk_group": 1,
    "topk_method": "greedy",
}


def test_contract(tmp_path):
    check_family("deepseek_v2", DEEPSEEK_V2, "deepseek_v2", tmp_path)


def test_queries_without_low_rank(tmp_path):
    check_family("deepseek_v2", LITE, "deepseek_v2_lite", tmp_path)
