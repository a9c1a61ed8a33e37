"""FP8 weights with block scales: read as their products, written again, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import configs
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patch.convert import commands, plan, rows, rules

CONFIG = configs.DEEPSEEK_V3 | {
    "num_hidden_layers": 2,
    "intermediate_size": 320,
    "moe_intermediate_size": 192,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


def expand(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Number by number, another way than the library's."""
    return torch.tensor(
        [[scale[r // 128, c // 128].item() for c in range(shape[1])] for r in range(shape[0])]
    )


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = expand(tensors[f"{name}_scale_inv"], tensor.shape)
            found[name] = (tensor.float() * scale).bfloat16()
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose scales are powers of two, or use the format's whole range."""
    folder = tmp_path_factory.mktemp("fp8") / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    spec = plan.resolve(folder)
    for rule in rules.spec_rules(spec):
        for name, shape in zip(rule.hf, rule.shapes, strict=True):
            values = torch.randn(shape, generator=random)
            if "_proj" not in name:
                tensors[name] = values if rule.keeps_dtype else values.bfloat16()
                continue
            codes = (values * 20).to(torch.float8_e4m3fn)
            blocks = tuple(-(-size // 128) for size in shape)
            exponents = torch.randint(-9, -3, blocks, generator=random).float()
            tensors[name], tensors[f"{name}_scale_inv"] = codes, 2**exponents
    name = "model.layers.0.mlp.up_proj.weight"
    whole, scales = tensors[name].float(), tensors[f"{name}_scale_inv"]
    for row in range(0, whole.shape[0], 128):
        whole[row, 0] = 448
        scales[row // 128, 0] = 0.0123  # no power of two; the bits beyond bfloat16's are lost
    tensors[name] = whole.to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_both_ways(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = load_file(source / "model.safetensors")
    expected = dequantised(given)
    mcore = ["--input-dir", str(tmp_path / "mcore")]
    argv = ["--input-dir", str(source), *("--output-dir", str(tmp_path / "mcore"))]
    assert commands.hf2mcore(argv) == 0
    assert commands.mcore2hf([*mcore, "--output-dir", str(tmp_path / "bf16")]) == 0
    back = load_file(tmp_path / "bf16" / "model.safetensors")
    assert sorted(back) == sorted(expected)
    for name, tensor in expected.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    assert back["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())

    assert commands.mcore2hf([*mcore, "--output-dir", str(tmp_path / "fp8"), "--dtype", "fp8"]) == 0
    again = load_file(tmp_path / "fp8" / "model.safetensors")
    assert {n: t.dtype for n, t in again.items()} == {n: t.dtype for n, t in given.items()}
    for name, tensor in dequantised(again).items():
        rounded = name == "model.layers.0.mlp.up_proj.weight"
        assert torch.allclose(tensor, expected[name], rtol=2**-7 if rounded else 0, atol=0), name
        if rounded:  # the scale is off in its ninth bit, the codes are the same
            assert torch.equal(again[name].view(torch.uint8)[:, :128],
                               given[name].view(torch.uint8)[:, :128])  # fmt: skip
    assert json.loads((tmp_path / "fp8" / "config.json").read_text()) == CONFIG
    where = ["--mcore-dir", str(tmp_path / "mcore")]
    assert commands.verify(["--hf-dir", str(source), *where]) == 0
    assert "PASS" in capsys.readouterr().out


def _no_scale(tensors: dict[str, Any]) -> str:
    tensors.pop("model.layers.0.mlp.down_proj.weight_scale_inv")
    return "model.layers.0.mlp.down_proj.weight is float8_e4m3fn without"


def _wrong_scale(tensors: dict[str, Any]) -> str:
    tensors["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(3, 1)
    return r"down_proj.weight_scale_inv is float32 \[3, 1\]"


def _scale_alone(tensors: dict[str, Any]) -> str:
    tensors["model.norm.weight_scale_inv"] = torch.ones(1)
    return "tensors too many .model.norm.weight_scale_inv"


@pytest.mark.parametrize("spoil", [_no_scale, _wrong_scale, _scale_alone])
def test_refused(spoil: Any, source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    words = spoil(tensors)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(plan.UserError, match=words):
        plan.read_source(tmp_path, plan.resolve(tmp_path))


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "mxfp4", "bitsandbytes"])
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    for config in (CONFIG, configs.QWEN3):
        wrong = config | {"quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(plan.UserError, match=f"quantised by '{method}'"):
            plan.resolve(tmp_path)


def test_powers_of_two_where_the_config_asks_for_them() -> None:
    values = torch.randn(128, 300, generator=torch.Generator().manual_seed(1))
    codes, scale = rows.quantise(values, powers=True)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full((3,), 0.5))
    wide = scale.repeat_interleave(128)[:300]
    assert (codes.float() * wide - values).abs().max() <= values.abs().max() * 2**-4
    assert codes.float().abs().max() <= 448
