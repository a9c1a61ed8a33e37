from __future__ import annotations

import pytest
from check_family import check_family, resolve
from configs import QWEN3_NEXT

from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("qwen3_next", QWEN3_NEXT, "qwen3_next", tmp_path)


@pytest.mark.slow
def test_multi_token_prediction_where_config_asks_for_it(tmp_path):
    """The published files have it, and their config.json no word of it."""
    config = QWEN3_NEXT | {"num_nextn_predict_layers": 1}
    check_family("qwen3_next", config, "qwen3_next_mtp", tmp_path)
    for changes, words in (
        ({"num_nextn_predict_layers": 2}, "'num_nextn_predict_layers' is 2; expected 0 or 1"),
        (
            {"full_attention_interval": 3},
            "'num_nextn_predict_layers' is 1, but the decoder's last layer is 'linear_attention'",
        ),
    ):
        with pytest.raises(UserError, match=words):
            resolve(config | changes, tmp_path)


def test_layers_by_name_or_by_interval(tmp_path):
    types = [*["linear_attention"] * 3, "full_attention"]
    named = {k: v for k, v in QWEN3_NEXT.items() if k != "full_attention_interval"}
    named |= {"layer_types": types}
    assert resolve(named, tmp_path).args == resolve(QWEN3_NEXT, tmp_path).args
    with pytest.raises(UserError, match=r"layer_types.*full_attention_interval.*disagree"):
        resolve(QWEN3_NEXT | {"layer_types": types[::-1]}, tmp_path)
    with pytest.raises(UserError, match="no layer of one kind"):
        resolve(named | {"layer_types": types[:1] * 4}, tmp_path)
