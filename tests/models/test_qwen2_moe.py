from __future__ import annotations

from check_family import check_family
from configs import QWEN2_MOE


def test_contract(tmp_path):
    check_family("qwen2_moe", QWEN2_MOE, "qwen2_moe", tmp_path)
