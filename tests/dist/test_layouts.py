"""One checkpoint, ten steps, every layout: the same losses, gradients and weights.

Optimizer: SGD with momentum, no clipping, so that nothing hides a wrong gradient (Adam divides by
its size). Everything is compared per parameter and whole, in float32, at 1e-5 relative to the
parameter's largest entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import MODELS, tensors, worst, write_corpus, write_model

STEPS = 10


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    flags: tuple[str, ...]
    moe: bool = True
    dense: bool = True
    #: Kinds for which other layouts say nearly the same: run with `-m ""`.
    slow: tuple[str, ...] = ()


LAYOUTS = (
    Layout("tp2", 2, ("--tp", "2", "--no-sequence-parallel"), moe=False),
    Layout("tp2-sp", 2, ("--tp", "2")),
    Layout("pp2", 2, ("--pp", "2"), slow=("dense",)),
    Layout("pp2-vpp2", 2, ("--pp", "2", "--vpp", "2"), slow=("moe",)),
    Layout("pp2-uneven", 2, ("--pp", "2", "--decoder-first-pipeline-num-layers", "1"),
           slow=("dense",)),
    Layout("cp2", 2, ("--cp", "2"), slow=("dense",)),
    Layout("ep2", 2, ("--ep", "2"), dense=False),
    Layout("etp2", 2, ("--tp", "2", "--etp", "2"), dense=False),
    Layout("dp2", 2, (), slow=("moe",)),
    Layout("tp2-pp2", 4, ("--tp", "2", "--pp", "2"), slow=("moe",)),
    Layout("cp2-tp2", 4, ("--tp", "2", "--cp", "2"), slow=("dense",)),
    Layout("recompute", 1, ("--recompute-granularity", "full", "--recompute-method", "uniform",
                            "--recompute-num-layers", "1"), slow=("dense",)),
    Layout("linear-ce", 1, ("--linear-cross-entropy", "on"), slow=("dense", "moe")),
    Layout("linear-ce-tp2", 2, ("--linear-cross-entropy", "on", "--tp", "2",
                                "--no-sequence-parallel"), moe=False),
    Layout("linear-ce-tp2-pp2", 4, ("--linear-cross-entropy", "on", "--tp", "2", "--pp", "2"),
           slow=("dense",)),
)  # fmt: skip

CASES = [
    pytest.param(
        kind,
        layout,
        id=f"{kind}-{layout.name}",
        marks=[pytest.mark.slow] if kind in layout.slow else [],
    )
    for kind in MODELS
    for layout in LAYOUTS
    if getattr(layout, kind)
]


def flags(model: Path, corpus: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-model", str(model), "--data-path", str(corpus), "--output-dir", str(output)),
        *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
        *("--train-iters", str(STEPS), "--lr", "0.1", "--min-lr", "0.1", "--warmup-steps", "0"),
        *("--optimizer", "sgd", "--no-use-distributed-optimizer", "--no-overlap-param-gather"),
        *("--clip-grad", "0", "--weight-decay", "0", "--seed", "11"),
        *more,
    ]


@dataclass(frozen=True)
class Start:
    model: Path
    corpus: Path
    checkpoint: Path
    losses: list[float]
    grads: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def starts(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    return {k: start_of(ranks, tmp_path_factory.mktemp(k), c) for k, c in MODELS.items()}


def start_of(ranks: RankServer, folder: Path, config: dict[str, Any]) -> Start:
    """For a model: one saved checkpoint, and the one-rank run from it."""
    model = write_model(folder / "hf", config)
    write_corpus(folder / "corpus")
    first = flags(model, folder / "corpus", folder / "first", "--train-iters", "1")
    ranks.run("tests.dist.jobs:train", 1, folder / "first-job", argv=first)
    start = Start(model, folder / "corpus", folder / "first", [], {}, {})
    losses, grads, weights = _train(ranks, start, folder / "one", 1, ())
    return replace(start, losses=losses, grads=grads, weights=weights)


def _train(
    ranks: RankServer, start: Start, folder: Path, world: int, more: tuple[str, ...]
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    argv = flags(
        start.model,
        start.corpus,
        folder / "run",
        *("--init-from", str(start.checkpoint), "--no-save-optim"),
        *more,
    )
    result = ranks.run(
        "tests.dist.jobs:train", world, folder, argv=argv, grads_after=1, weights=True
    )
    assert result.values == [{"status": 0}] * world
    losses = [row["lm loss"] for row in metrics.read(folder / "run")]
    grads = tensors(ranks, folder / "grads", folder / "g")
    return losses, grads, tensors(ranks, folder / "weights", folder / "w")


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_layout_changes_nothing(
    kind: str,
    layout: Layout,
    ranks: RankServer,
    starts: dict[str, Start],
    tmp_path: Path,
) -> None:
    start = starts[kind]
    check_layout(ranks, start, tmp_path, layout.ranks, layout.flags, f"{kind} {layout.name}")


def check_layout(
    ranks: RankServer,
    start: Start,
    folder: Path,
    world: int,
    more: tuple[str, ...],
    label: str,
    gradient: float = 1e-5,
) -> None:
    """Run a layout from a start and compare everything with the one-rank run."""
    assert len(start.losses) == STEPS
    assert np.ptp(start.losses) > 0.05, "losses move, so runs can differ"
    losses, grads, weights = _train(ranks, start, folder, world, more)
    loss_gap = max(abs(a / b - 1) for a, b in zip(losses, start.losses, strict=True))
    grad_gap, grad_name = worst(grads, start.grads)
    weight_gap, weight_name = worst(weights, start.weights)
    print(f"{label}: loss {loss_gap:.1e}, gradient {grad_gap:.1e} ({grad_name}), "
          f"weight {weight_gap:.1e} ({weight_name})")  # fmt: skip
    assert loss_gap < 1e-5
    assert grad_gap < gradient, grad_name
    assert weight_gap < 1e-5, weight_name
