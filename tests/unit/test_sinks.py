"""Where figures go: trackers that are missing, fail, or go on with an earlier run."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.training import args, metrics, parallel, sinks
from megatron_patch.util import UserError

CONFIG = Path(__file__).parent.parent / "fixtures" / "configs" / "qwen3-0.6b.json"


@pytest.fixture
def hf(tmp_path: Path) -> str:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG.read_text())
    return str(folder)


def plan(hf: str, *flags: str) -> args.Plan:
    base = f"--hf-model {hf} --seq-length 64 --lr 1e-3 --train-iters 10 --gbs 2 --mock-data"
    return args.resolve([*base.split(), *flags], device="cpu", world_size=1)


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_a_tracker_that_is_not_installed_names_its_extra(
    hf: str, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    made = plan(hf, "--output-dir", str(tmp_path / "run"), f"--{package}-project", "mine")
    refusals = parallel.check(made, start=True).refusals
    assert any(f"pip install 'megatron-patch[{package}]'" in text for text in refusals), refusals


def test_trackers_without_a_run_directory_are_refused(hf: str) -> None:
    made = plan(hf, "--swanlab-project", "mine")
    assert any("add --output-dir" in text for text in parallel.check(made).refusals)
    named = plan(hf, "--swanlab-exp-name", "mine")
    assert any("without --swanlab-project" in text for text in parallel.check(named).refusals)


class _Wandb(types.ModuleType):
    """Stands for the package: keeps what it is told."""

    def __init__(self, refuse: bool = False) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended = 0
        self.refuse = refuse

    def init(self, **given: Any) -> None:
        if self.refuse:
            raise RuntimeError("api_key not configured (no-tty)")
        self.begun.append(given)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended += 1


def test_starts_of_a_run_directory_are_one_run(
    hf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    output = tmp_path / "run"
    (output / "logs").mkdir(parents=True)
    made = plan(hf, "--output-dir", str(output), "--wandb-project", "mine")
    for _ in range(2):
        _board, tracker = sinks.sinks(made, output)
        tracker.write(3, {"lm loss": 2.0})
        tracker.close()
    first, second = package.begun
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["project"], first["name"]) == ("mine", "run")
    assert json.dumps(first["config"]) and first["config"]["seq_length"] == 64
    assert package.logged == [(3, {"lm loss": 2.0})] * 2 and package.ended == 2


def test_a_tracker_that_cannot_begin_is_an_error(
    hf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", _Wandb(refuse=True))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    made = plan(hf, "--output-dir", str(tmp_path / "run"), "--wandb-project", "mine")
    with pytest.raises(UserError, match=r"wandb cannot begin: api_key not.*WANDB_MODE=offline"):
        sinks.sinks(made, tmp_path / "run")


def test_a_tracker_that_fails_later_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        def write(self, step: int, values: Mapping[str, float]) -> None:
            raise ConnectionError("network is down")

        def close(self) -> None: ...

    class Good:
        seen: list[tuple[int, Mapping[str, float]]] = []  # noqa: RUF012

        def write(self, step: int, values: Mapping[str, float]) -> None:
            self.seen.append((step, values))

        def close(self) -> None: ...

    recorder = metrics.Recorder(
        tmp_path / metrics.FILE, rank=0, world_size=1, pipeline=1, sinks=[Failing(), Good()]
    )
    for step in (1, 2):
        recorder.step(step, {"lm loss": 2.0}, moe_layers=[2, 4], moe_load=[1.5, 1.25])
    recorder.evaluation(2, "validation-web", {"lm loss": 3.0})
    recorder.close()
    assert capsys.readouterr().out.count("gets no more figures: network is down") == 1
    assert [step for step, _ in Good.seen] == [1, 2, 2]
    values = dict(Good.seen[0][1])
    assert values["moe_load/layer 4"] == 1.25 and values["lm loss"] == 2.0
    assert dict(Good.seen[2][1]) == {"lm loss validation-web": 3.0}
