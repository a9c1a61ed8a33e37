from __future__ import annotations

from check_family import check_family
from configs import QWEN3_5


def test_contract(tmp_path):
    check_family("qwen3_5", QWEN3_5, "qwen3_5", tmp_path)
