from __future__ import annotations

from check_family import check_family
from configs import QWEN2


def test_contract(tmp_path):
    check_family("qwen2", QWEN2, "qwen2", tmp_path)
