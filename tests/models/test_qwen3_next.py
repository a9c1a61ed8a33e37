from __future__ import annotations

import pytest
from check_family import check_family, resolve
from configs import QWEN3_NEXT

from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("qwen3_next", QWEN3_NEXT, "qwen3_next", tmp_path)


def test_layers_by_name_or_by_interval(tmp_path):
    types = [*["linear_attention"] * 3, "full_attention"]
    named = {k: v for k, v in QWEN3_NEXT.items() if k != "full_attention_interval"}
    named |= {"layer_types": types}
    assert resolve(named, tmp_path).args == resolve(QWEN3_NEXT, tmp_path).args
    with pytest.raises(UserError, match=r"layer_types.*full_attention_interval.*disagree"):
        resolve(QWEN3_NEXT | {"layer_types": types[::-1]}, tmp_path)
    with pytest.raises(UserError, match="no layer of one kind"):
        resolve(named | {"layer_types": types[:1] * 4}, tmp_path)
