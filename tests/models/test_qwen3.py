from __future__ import annotations

import pytest
from check_family import check_family, check_windows
from configs import QWEN3


def test_contract(tmp_path):
    check_family("qwen3", QWEN3, "qwen3", tmp_path)


def test_tied(tmp_path):
    check_family("qwen3", QWEN3 | {"tie_word_embeddings": True}, "qwen3_tied", tmp_path)


def test_yarn(tmp_path):
    """Qwen's recipe for long texts: the attention factor must reach every layer."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    check_family("qwen3", QWEN3 | {"rope_scaling": scaling}, "qwen3_yarn", tmp_path)


@pytest.mark.slow
def test_windows(tmp_path):
    check_windows(QWEN3 | {"max_window_layers": 2}, [0, 0, 1], tmp_path)
