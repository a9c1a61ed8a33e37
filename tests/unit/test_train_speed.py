"""The speed benchmark's arithmetic."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "train_speed", ROOT / "toolkits" / "benchmark" / "train_speed.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flops_of_a_published_model(bench: ModuleType) -> None:
    config = json.loads((ROOT / "tests" / "fixtures" / "configs" / "qwen3-1.7b.json").read_text())
    layer = 2048 * 128 * (16 + 8 + 8) + 16 * 128 * 2048 + 3 * 2048 * 6144
    weights = 28 * layer + 2048 * 151936
    attention = 28 * 16 * 128 * 4096 / 2 * 2 * 2 * 3  # two products, three passes, half the square
    assert bench.flops_per_token(config, 4096) == pytest.approx(6 * weights + attention)


def test_flops_of_a_mixture_count_the_chosen_experts(bench: ModuleType) -> None:
    path = ROOT / "tests" / "fixtures" / "configs" / "qwen3-30b-a3b.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 8}
    attention = 2048 * 128 * (32 + 4 + 4) + 32 * 128 * 2048
    layer = attention + 8 * 3 * 2048 * 768 + 2048 * 128
    weights = 8 * layer + 2048 * 151936
    scores = 8 * 32 * 128 * 4096 / 2 * 2 * 2 * 3
    assert bench.flops_per_token(config, 4096) == pytest.approx(6 * weights + scores)


def test_cases(bench: ModuleType) -> None:
    assert bench.parse_case("ours,mbs=8,fp8=delayed,x") == (
        "ours",
        8,
        ["--fp8", "delayed", "--x"],
    )
    assert bench.parse_case("ours,recompute-modules=mlp+layernorm")[2] == [
        "--recompute-modules",
        "mlp",
        "layernorm",
    ]
    with pytest.raises(ValueError, match="liger case takes mbs only"):
        bench.parse_case("liger,fp8=delayed")
    with pytest.raises(ValueError, match="no case 'theirs'"):
        bench.parse_case("theirs")


@pytest.mark.parametrize(("speed", "status"), [(96.0, 0), (94.0, 1), (120.0, 0)])
def test_a_ratio_that_falls(
    bench: ModuleType, speed: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(ours: float) -> list[dict[str, object]]:
        return [
            {"case": "liger,mbs=4", "tokens_per_second": 50.0},
            {"case": "ours,mbs=4", "tokens_per_second": ours},
            {"case": "ours,mbs=64", "failed": "out of memory"},
        ]

    assert bench.compare(rows(100.0), rows(speed)) == status
    assert ("FELL" in capsys.readouterr().out) == bool(status)


def test_what_cannot_be_compared_is_no_success(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    known = json.loads((Path(bench.__file__).parent / "h200.json").read_text())["rows"]
    ours = [row for row in known if row["name"] == "ours"]
    assert bench.compare(known, known) == 0
    assert bench.compare(known, ours) == 1
    assert "nothing to compare" in capsys.readouterr().out
