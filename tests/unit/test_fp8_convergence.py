"""The arithmetic and the weights of the FP8 convergence benchmark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megatron_patch.convert import hf_io

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = ROOT / "toolkits" / "benchmark" / "fp8_convergence.py"
    spec = importlib.util.spec_from_file_location("fp8_convergence", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gaps_are_those_of_the_same_steps(bench: ModuleType) -> None:
    noise = np.random.default_rng(0).normal(size=60)
    rows = [
        {"case": "fp32", "losses": list(noise + 3.0)},
        {"case": "bf16", "losses": list(noise + 3.01)},
        {"case": "delayed", "losses": list(noise + 3.05)},
        {"case": "blockwise", "failed": "out of memory"},
    ]
    made = {row["case"]: row for row in bench.gaps(rows)}
    assert made["delayed"]["gap_to_bf16"] == pytest.approx(0.04)
    assert made["delayed"]["gap_to_fp32"] == pytest.approx(0.05)
    assert made["delayed"]["largest_to_bf16"] == pytest.approx(0.04)
    assert "blockwise" not in made and "gap_to_bf16" not in made["bf16"]


def test_weights_are_bf16_numbers_of_the_shape_asked_for(bench: ModuleType, tmp_path: Path) -> None:
    config = bench.shape() | {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    bench.write_weights(tmp_path, config | {"num_attention_heads": 2, "num_key_value_heads": 1})
    found = hf_io.read_model(tmp_path)
    down = found["model.layers.1.mlp.down_proj.weight"]
    assert down.shape == (64, 96) and down.dtype == "bfloat16"

    def values(name: str) -> np.ndarray:
        one = found[name]
        raw = np.fromfile(one.path, "<u2", int(np.prod(one.shape)), offset=one.offset)
        return (raw.astype(np.uint32) << 16).view(np.float32)

    assert values("model.layers.1.mlp.down_proj.weight").std() == pytest.approx(0.01, rel=0.05)
    assert values("model.layers.0.mlp.up_proj.weight").std() == pytest.approx(0.02, rel=0.05)
    assert (values("model.norm.weight") == 1).all()
