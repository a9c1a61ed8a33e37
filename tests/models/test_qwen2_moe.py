from __future__ import annotations

from check_family import check_family, check_windows
from configs import QWEN2_MOE


def test_contract(tmp_path):
    check_family("qwen2_moe", QWEN2_MOE, "qwen2_moe", tmp_path)


def test_windows(tmp_path):
    check_windows(QWEN2_MOE | {"max_window_layers": 3}, [1, 0, 1, 0], tmp_path)
