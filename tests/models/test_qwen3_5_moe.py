from __future__ import annotations

from check_family import check_family
from configs import QWEN3_5_MOE


def test_contract(tmp_path):
    check_family("qwen3_5_moe", QWEN3_5_MOE, "qwen3_5_moe", tmp_path)
