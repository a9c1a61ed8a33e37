from __future__ import annotations

from check_family import check_family, check_windows
from configs import QWEN2


def test_contract(tmp_path):
    check_family("qwen2", QWEN2, "qwen2", tmp_path)


def test_windows(tmp_path):
    check_windows(QWEN2 | {"max_window_layers": 1}, [0, 1, 1], tmp_path)
