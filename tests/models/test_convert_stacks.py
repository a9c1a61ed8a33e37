"""Files that hold the tensors of all experts in one, in bfloat16 or MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import GPT_OSS
from test_convert import asked_once, encoded, load, same, save, to_hf, to_megatron

from megatron_patch.convert import commands, plan, rules
from megatron_patch.convert.hf_io import INDEX
from megatron_patch.util import UserError

__all__ = ["asked_once"]  # a fixture for every test here

SMALL = GPT_OSS | {"num_hidden_layers": 2, "layer_types": GPT_OSS["layer_types"][:2]}
MXFP4 = SMALL | {
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    }
}


def write(folder: Path, config: dict[str, Any] = SMALL) -> dict[str, torch.Tensor]:
    folder.mkdir()
    tensors = encoded(folder, config, torch.bfloat16)
    save(folder, tensors)
    return tensors


def verdict(hf: Path, mcore: Path) -> int:
    return commands.verify(["--hf-dir", str(hf), "--mcore-dir", str(mcore)])


def test_there_and_back_and_into_transformers(tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM

    given = write(tmp_path / "hf")
    assert given["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 64, 192)
    assert to_megatron(tmp_path / "hf", tmp_path / "mcore", "--workers", "2") == 0
    more = ("--max-shard-size", "250KB", "--workers", "2")
    assert to_hf(tmp_path / "mcore", tmp_path / "back", *more) == 0
    assert same(given, load(tmp_path / "back"))
    index = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert set(index) == set(given) and len(set(index.values())) > 1
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert verdict(tmp_path / "hf", tmp_path / "mcore") == 0
    # An expert in another's place is seen, by name.
    name = "model.layers.1.mlp.experts.down_proj"
    given[name] = given[name].roll(1, 0)
    save(tmp_path / "hf", given)
    assert verdict(tmp_path / "hf", tmp_path / "mcore") == 1
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in capsys.readouterr().out


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model with random bytes for the experts' weights; every exponent occurs."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = (experts, rows, columns // 32)
        found[f"{name}_blocks"] = torch.randint(
            256, (*blocks, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(1, 255, blocks, generator=generator)
        # The smallest exponents leave the range of normal numbers, the largest that of finite ones.
        found[f"{name}_scales"] = scales.clamp(2, 252).to(torch.uint8)
    return found


def test_mxfp4_is_read_as_its_numbers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    given = packed(write(tmp_path / "hf", MXFP4))
    save(tmp_path / "hf", given)
    assert to_megatron(tmp_path / "hf", tmp_path / "mcore") == 0
    assert to_hf(tmp_path / "mcore", tmp_path / "back") == 0
    back = load(tmp_path / "back")
    for name, tensor in given.items():
        if name.endswith("_blocks"):
            plain = name.removesuffix("_blocks")
            numbers = convert_moe_packed_tensors(tensor, given[f"{plain}_scales"])
            assert torch.equal(back.pop(plain), numbers) and numbers.isfinite().all()
        elif not name.endswith("_scales"):
            assert torch.equal(back.pop(name), tensor)
    assert not back
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    assert verdict(tmp_path / "hf", tmp_path / "mcore") == 0


def _cut(tensors: dict[str, torch.Tensor]) -> str:
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(7, 96, 64)
    return r"experts.down_proj is \[7, 96, 64\] in .* config.json says \[8, 96, 64\]"


def _twice(tensors: dict[str, torch.Tensor]) -> str:
    tensors["model.layers.0.mlp.experts.3.down_proj.weight"] = torch.zeros(64, 96)
    return "holds model.layers.0.mlp.experts.down_proj and a part of it, .*3.down_proj.weight"


def _no_scales(tensors: dict[str, torch.Tensor]) -> str:
    name = "model.layers.0.mlp.experts.down_proj"
    del tensors[name]
    tensors[f"{name}_blocks"] = torch.zeros(8, 64, 3, 16, dtype=torch.uint8)
    return "down_proj_scales are missing"


def _other_scales(tensors: dict[str, torch.Tensor]) -> str:
    words = _no_scales(tensors)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = torch.zeros(8, 64, 2, dtype=torch.uint8)
    return words.replace("missing", r"uint8 \[8, 64, 2\]")


@pytest.mark.parametrize("spoil", [_cut, _twice, _no_scales, _other_scales])
def test_refused(spoil: Any, tmp_path: Path) -> None:
    tensors = write(tmp_path / "hf")
    words = spoil(tensors)
    save(tmp_path / "hf", tensors)
    with pytest.raises(UserError, match=words):
        plan.read_source(tmp_path / "hf", plan.resolve(tmp_path / "hf"))


def test_tensors_in_memory(tmp_path: Path) -> None:
    tensors = write(tmp_path / "hf")
    spec = plan.resolve(tmp_path / "hf")
    there = dict(rules.to_megatron(tensors, spec))
    expert = there["decoder.layers.1.mlp.experts.local_experts.5.linear_fc1.weight"]
    both = tensors["model.layers.1.mlp.experts.gate_up_proj"][5]
    assert torch.equal(expert[:96], both[:, 0::2].T) and torch.equal(expert[96:], both[:, 1::2].T)
    assert same(dict(rules.to_hf(there, spec)), tensors)
