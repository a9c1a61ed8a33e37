"""The defaults a user trains with (distributed Adam, clipping, evaluation) at every layout.

`test_layouts.py` compares gradients and weights under SGD; here losses and validation losses are
compared from one checkpoint on, in fp32 and in bf16, and recomputation under dropout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import MODELS, write_corpus, write_model

STEPS = 6
#: fp32 differs by the order of sums alone.
FP32 = 1e-5
#: bf16 keeps 8 bits: a value is off by 2e-3 at most, a loss is a mean over hundreds of tokens.
BF16 = 1e-3

CASES = [
    pytest.param(
        model,
        precision,
        world,
        tuple(layout.split()),
        id="-".join([model, precision, *layout.replace("--", "").split()]),
        marks=[pytest.mark.slow]
        if world > 2 or (precision == "bf16" and layout != "--cp 2")
        else [],
    )
    for model, precision, world, layout in (
        ("dense", "fp32", 2, ""),
        ("dense", "fp32", 4, "--tp 2"),
        ("moe", "fp32", 4, "--ep 2"),
        ("moe", "fp32", 2, "--pp 2 --vpp 2"),
        ("moe", "fp32", 4, "--cp 2 --ep 2"),
        ("dense", "bf16", 2, "--tp 2"),
        ("dense", "bf16", 2, "--pp 2"),
        ("dense", "bf16", 2, "--cp 2"),
        ("moe", "bf16", 2, "--ep 2"),
    )
]
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "full-block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "selective": "--recompute-granularity selective --recompute-modules core_attn moe",
}


@dataclass(frozen=True)
class Run:
    losses: list[float]
    evaluations: list[tuple[int, str, float]]


@dataclass
class Bench:
    """Runs from one checkpoint a model, and keeps the one-rank runs that others compare with."""

    ranks: RankServer
    folder: Path
    models: dict[str, Path]
    kept: dict[str, Run]

    def train(self, name: str, model: str, world: int, *more: str) -> Run:
        output = self.folder / name / "run"
        argv = [
            *("--hf-model", str(self.models[model]), "--data-path", str(self.folder / "corpus")),
            *("--output-dir", str(output), "--seq-length", "32", "--micro-batch-size", "1"),
            *("--global-batch-size", "8", "--train-iters", str(STEPS), "--warmup-steps", "0"),
            *("--lr", "3e-3", "--seed", "11", "--split", "90,5,5", "--eval-iters", "2"),
            *("--eval-interval", "4", "--no-save-optim", *more),
        ]
        result = self.ranks.run(
            "tests.dist.jobs:train", world, self.folder / name / "job", argv=argv
        )
        assert result.values == [{"status": 0}] * world
        rows = [json.loads(line) for line in (output / metrics.FILE).read_text().splitlines()]
        return Run(
            [row["lm loss"] for row in rows if not {"evaluation", "event"} & row.keys()],
            [(r["iteration"], r["evaluation"], r["lm loss"]) for r in rows if "evaluation" in r],
        )

    def one_rank(self, model: str, *more: str) -> Run:
        name = "-".join(["one", model, *(m.lstrip("-") for m in more)])
        if name not in self.kept:
            start = self.folder / f"start-{model}" / "run"
            if not start.exists():
                self.train(f"start-{model}", model, 1, "--train-iters", "2")
            self.kept[name] = self.train(name, model, 1, "--init-from", str(start), *more)
        return self.kept[name]

    def start(self, model: str) -> tuple[str, str]:
        return "--init-from", str(self.folder / f"start-{model}" / "run")


@pytest.fixture(scope="module")
def bench(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    write_corpus(folder / "corpus")
    models = {name: write_model(folder / name, config) for name, config in MODELS.items()}
    return Bench(ranks, folder, models, {})


@pytest.mark.parametrize(("model", "precision", "world", "layout"), CASES)
def test_losses_do_not_depend_on_the_layout(
    model: str,
    precision: str,
    world: int,
    layout: tuple[str, ...],
    bench: Bench,
    request: pytest.FixtureRequest,
) -> None:
    one = bench.one_rank(model, "--precision", precision)
    assert np.ptp(one.losses) > 0.1, "losses move, so runs can differ"
    run = bench.train(
        request.node.name, model, world, *bench.start(model), "--precision", precision, *layout
    )
    bound = FP32 if precision == "fp32" else BF16
    gap = max(abs(a / b - 1) for a, b in zip(run.losses, one.losses, strict=True))
    kinds = [(at, kind) for at, kind, _ in one.evaluations]
    assert kinds == [(4, "validation"), (STEPS, "validation"), (STEPS, "test")]
    assert [(at, kind) for at, kind, _ in run.evaluations] == kinds
    evaluation_gap = max(
        abs(a[2] / b[2] - 1) for a, b in zip(run.evaluations, one.evaluations, strict=True)
    )
    print(f"{request.node.name}: loss {gap:.1e}, evaluation {evaluation_gap:.1e}")
    assert gap < bound
    assert evaluation_gap < bound


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputation_changes_no_bit(kind: str, bench: Bench) -> None:
    plain = bench.one_rank("moe", *DROPOUT)
    again = bench.train(
        f"recompute-{kind}", "moe", 1, *bench.start("moe"), *DROPOUT, *RECOMPUTE[kind].split()
    )
    assert again == plain
