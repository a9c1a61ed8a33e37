from __future__ import annotations

from check_family import check_family
from configs import DEEPSEEK_V3


def test_contract(tmp_path):
    check_family("deepseek_v3", DEEPSEEK_V3, "deepseek_v3", tmp_path)
