"""Conversion of models with layers for multi-token prediction, a router's bias, latent attention.

Files are bfloat16 with float32 biases, as published ones are, and repeat what MTP layers share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from test_convert import asked_once, encoded, load, same, save, to_hf, to_megatron

from megatron_patch.convert import rules
from megatron_patch.convert.plan import resolve

CONFIGS = {
    "deepseek_v3": DEEPSEEK_V3 | {"num_nextn_predict_layers": 2},
    "deepseek_v2": DEEPSEEK_V2 | {"q_lora_rank": None},
    "glm4_moe": GLM4_MOE | {"tie_word_embeddings": True},
}


__all__ = ["asked_once"]  # a fixture for every test here


def write(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    folder.mkdir()
    tensors = encoded(folder, config, torch.bfloat16)
    for name in tensors:
        if name.endswith("bias") and "correction" in name:
            tensors[name] = torch.randn(tensors[name].shape)
    for name, original in rules.copies(resolve(folder)).items():
        tensors[name] = tensors[original].clone()
    save(folder, tensors)
    return tensors


@pytest.mark.parametrize(
    "kind", ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.slow), "glm4_moe"]
)
def test_there_and_back_and_into_transformers(kind: str, tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM

    given = write(tmp_path / "hf", CONFIGS[kind])
    assert to_megatron(tmp_path / "hf", tmp_path / "mcore", "--dtype", "bf16") == 0
    assert to_hf(tmp_path / "mcore", tmp_path / "back") == 0
    back = load(tmp_path / "back")
    assert same(given, back)
    biases = {t.dtype for name, t in back.items() if "e_score" in name}
    assert biases == (set() if kind == "deepseek_v2" else {torch.float32})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    # Transformers knows layers for MTP by the numbers of the published models.
    count = CONFIGS[kind]["num_hidden_layers"]
    further = tuple(f"model.layers.{count + k}." for k in range(2))
    assert all(key.startswith(further) for key in info["unexpected_keys"])


def test_a_copy_that_differs_is_refused(tmp_path: Path, capsys: Any) -> None:
    tensors = write(tmp_path / "hf", CONFIGS["deepseek_v3"])
    name = "model.layers.4.shared_head.head.weight"
    tensors[name][3, 3] += 1
    save(tmp_path / "hf", tensors)
    assert to_megatron(tmp_path / "hf", tmp_path / "mcore") == 2
    assert f"{name} differs from lm_head.weight" in capsys.readouterr().err
    assert not (tmp_path / "mcore" / "release").exists()


def test_layers_for_mtp_may_be_left_out_by_config(tmp_path: Path, capsys: Any) -> None:
    given = write(tmp_path / "hf", CONFIGS["deepseek_v3"])
    config = CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 0}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert to_megatron(tmp_path / "hf", tmp_path / "mcore") == 0
    off = [name for name in given if name.startswith(("model.layers.3.", "model.layers.4."))]
    assert f"layers for multi-token prediction ({len(off)} tensors)" in capsys.readouterr().out
    assert to_hf(tmp_path / "mcore", tmp_path / "back") == 0
    assert same({n: t for n, t in given.items() if n not in off}, load(tmp_path / "back"))


def test_files_that_transformers_saved_lack_mtp(tmp_path: Path, capsys: Any) -> None:
    tensors = write(tmp_path / "hf", CONFIGS["glm4_moe"])
    save(tmp_path / "hf", {n: t for n, t in tensors.items() if "layers.3." not in n})
    assert to_megatron(tmp_path / "hf", tmp_path / "mcore") == 2
    assert "set num_nextn_predict_layers to 0" in capsys.readouterr().err
