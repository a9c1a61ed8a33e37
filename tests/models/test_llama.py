from __future__ import annotations

import pytest
from check_family import check_family, resolve
from configs import LLAMA

from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("llama", LLAMA, "llama", tmp_path)


def test_multi_head_with_biases_and_linear_rope(tmp_path):
    config = LLAMA | {
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": None,
        "head_dim": None,
        "rope_scaling": {"type": "linear", "factor": 2.5},
        "tie_word_embeddings": False,
    }
    check_family("llama", config, "llama_biases", tmp_path)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_one_bias_without_the_other_is_refused(tmp_path, key):
    with pytest.raises(UserError, match=r"attention_bias.*mlp_bias"):
        resolve(LLAMA | {key: True}, tmp_path)


def _llama_2(version: str | None) -> dict:
    config = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "transformers_version")}
    config["rope_scaling"] = None
    return config | ({"transformers_version": version} if version else {})


def test_a_file_older_than_the_rope_key_has_the_only_base_there_was(tmp_path):
    spec = resolve(_llama_2("4.31.0.dev0"), tmp_path)
    assert spec.rope.theta == spec.args["rotary_base"] == 10000
    assert any("rope base" in note for note in spec.notes)


@pytest.mark.parametrize("version", ["4.33.0", "5.1.0", None])
def test_a_newer_file_without_rope_base_is_refused(tmp_path, version):
    with pytest.raises(UserError, match=r'"rope_theta": 10000.0'):
        resolve(_llama_2(version), tmp_path)
