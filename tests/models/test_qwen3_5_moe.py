from __future__ import annotations

import pytest
from check_family import check_family
from configs import QWEN3_5_MOE


@pytest.mark.slow  # qwen3_5 and qwen3_next, and conversion of this one, say nearly the same
def test_contract(tmp_path):
    check_family("qwen3_5_moe", QWEN3_5_MOE, "qwen3_5_moe", tmp_path)
