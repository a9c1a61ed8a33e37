"""Files of a language model with a vision tower beside it, as Qwen3.5's are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import QWEN3_5_MOE, multimodal
from test_convert import asked_once, encoded, load, same, save, to_hf, to_megatron

from megatron_patch.convert import commands, plan, rules
from megatron_patch.models.registry import load_config
from megatron_patch.util import UserError

__all__ = ["asked_once"]  # a fixture for every test here

CONFIG = multimodal(QWEN3_5_MOE | {"num_hidden_layers": 2, "full_attention_interval": 2})


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Experts of the decoder in two tensors a layer, those of MTP apart."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir()
    tensors = encoded(folder, CONFIG, torch.bfloat16)
    spec = plan.resolve(folder)
    stacks = [stack for stack in rules.stacks(spec) if not stack.name.startswith("mtp.")]
    assert len(stacks) == 4
    for stack in stacks:
        parts = [tensors.pop(name) for name in stack.parts]
        tensors[stack.name] = torch.cat(parts).reshape(stack.shape)
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    for name, tensor in whole.state_dict().items():
        if name.startswith("model.visual."):
            tensors[name] = torch.randn(tensor.shape).bfloat16()
    save(folder, tensors)
    return tensors


def test_the_language_model_alone_and_with_its_vision_tower(tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    given = write(tmp_path / "hf")
    tower = {name for name in given if name.startswith("model.visual.")}
    assert to_megatron(tmp_path / "hf", tmp_path / "mcore", "--workers", "2") == 0
    assert f"skipped: vision tower ({len(tower)} tensors)" in capsys.readouterr().out
    assert to_hf(tmp_path / "mcore", tmp_path / "alone") == 0
    assert "without the original's vision tower: name its directory" in capsys.readouterr().out
    assert same({n: t for n, t in given.items() if n not in tower}, load(tmp_path / "alone"))
    again = ("--hf-dir", str(tmp_path / "hf"), "--workers", "2")
    assert to_hf(tmp_path / "mcore", tmp_path / "back", *again) == 0
    said = capsys.readouterr().out
    assert f"vision tower ({len(tower)} tensors) copied along" in said
    assert same(given, load(tmp_path / "back"))
    where = ["--hf-dir", str(tmp_path / "hf"), "--mcore-dir", str(tmp_path / "mcore")]
    assert commands.verify(where) == 0
    for folder, kind in (("alone", AutoModelForCausalLM), ("back", AutoModelForImageTextToText)):
        _, info = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info[what] for what in ("missing_keys", "mismatched_keys"))
        assert not info["unexpected_keys"] or folder == "alone"


def test_tying_is_found_in_either_place_and_has_to_agree(tmp_path: Path) -> None:
    inner = CONFIG["text_config"]
    bare = {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}
    text = {k: v for k, v in inner.items() if k != "tie_word_embeddings"}
    for config, tied in (
        (bare | {"text_config": text | {"tie_word_embeddings": True}}, True),
        (bare | {"tie_word_embeddings": True, "text_config": text}, True),
        (bare | {"text_config": text}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert plan.resolve(tmp_path).tied is tied
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    with pytest.raises(
        UserError, match="'tie_word_embeddings' is True, but False in 'text_config'"
    ):
        plan.resolve(tmp_path)
    hf = load_config(tmp_path)
    assert hf.nested and hf.model_type == "qwen3_5_moe" and hf.get("num_experts") == 8
