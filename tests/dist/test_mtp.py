"""Multi-token prediction trains, and every layout has the gradients of one rank.

A model in DeepSeek V3's shape with two further tokens, from its configuration, three steps of SGD
without clipping. The routers' biases stand still: a step of theirs is a jump, not a gradient.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_patch.training import args, memory, metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import tensors, worst, write_corpus, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import configs

CONFIG = configs.DEEPSEEK_V3 | {
    "aux_loss_alpha": 0.0,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_nextn_predict_layers": 2,
}


@dataclass(frozen=True)
class Start:
    model: Path
    corpus: Path
    checkpoint: Path


def run(
    ranks: RankServer, start: Start, folder: Path, world: int, *more: str
) -> tuple[list[float], dict[str, np.ndarray]]:
    argv = [
        *("--hf-model", str(start.model), "--data-path", str(start.corpus)),
        *("--output-dir", str(folder / "run"), "--seq-length", "64", "--micro-batch-size", "2"),
        *("--global-batch-size", "4", "--train-iters", "3", "--lr", "0.1", "--min-lr", "0.1"),
        *("--warmup-steps", "0", "--optimizer", "sgd", "--no-use-distributed-optimizer"),
        *("--no-overlap-param-gather", "--clip-grad", "0", "--weight-decay", "0", "--seed", "11"),
        *("--moe-router-bias-update-rate", "0", "--mtp-loss-scaling-factor", "0.6", *more),
    ]
    result = ranks.run("tests.dist.jobs:train", world, folder, argv=argv, grads_after=1)
    assert result.values == [{"status": 0}] * world
    names = ("lm loss", "mtp_1 loss", "mtp_2 loss")
    losses = [row[name] for row in metrics.read(folder / "run") for name in names]
    return losses, tensors(ranks, folder / "grads", folder / "g")


@pytest.fixture(scope="module")
def start(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("mtp")
    write_corpus(folder / "corpus")
    model = write_model(folder / "hf", CONFIG)
    made = Start(model, folder / "corpus", folder / "first" / "run")
    run(ranks, made, folder / "first", 1, "--train-iters", "1")
    return made


@pytest.fixture(scope="module")
def one_rank(
    ranks: RankServer, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[float], dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("mtp-one") / "one"
    more = ("--init-from", str(start.checkpoint), "--no-save-optim")
    return run(ranks, start, folder, 1, *more)


def test_further_tokens_take_part(one_rank: tuple[list[float], dict[str, np.ndarray]]) -> None:
    _, grads = one_rank
    further = [name for name in grads if ".mtp." in name or name.startswith("mtp.")]
    assert len(further) > 30
    for name in further:
        assert np.isfinite(grads[name]).all() and grads[name].any(), f"{name} takes no part"


@pytest.mark.parametrize(
    "layout",
    [
        ("--tp", "2"),
        pytest.param(("--pp", "2"), marks=pytest.mark.slow),
        ("--cp", "2"),
        pytest.param(("--ep", "2"), marks=pytest.mark.slow),
        pytest.param(("--micro-batch-size", "1"), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout[0].strip("-"),
)
def test_layout_changes_nothing(
    layout: tuple[str, ...],
    ranks: RankServer,
    start: Start,
    one_rank: tuple[list[float], dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    losses, grads = one_rank
    more = ("--init-from", str(start.checkpoint), "--no-save-optim", *layout)
    world = 1 if layout[0] == "--micro-batch-size" else 2
    found_losses, found = run(ranks, start, tmp_path / "job", world, *more)
    gap, name = worst(found, grads)
    print(f"{layout}: gradient {gap:.1e} ({name})")
    assert gap < 1e-5, name
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)


@pytest.mark.parametrize(
    "layout", [("--pp", "2"), ("--tp", "2"), ("--ep", "2")], ids=lambda layout: layout[0].strip("-")
)
def test_the_preflight_knows_what_a_rank_holds(
    layout: tuple[str, ...], ranks: RankServer, start: Start, tmp_path: Path
) -> None:
    argv = [
        *("--hf-model", str(start.model), "--data-path", str(start.corpus)),
        *("--output-dir", str(tmp_path / "run"), "--seq-length", "64", "--lr", "0.1"),
        *("--global-batch-size", "4", "--train-iters", "1", *layout),
    ]
    plan = args.resolve(argv, world_size=2, device="cpu")
    result = ranks.run("tests.dist.jobs:count_parameters", 2, tmp_path / "job", argv=argv)
    stages = memory.rank_parameters(plan.values, 2)
    assert [value["count"] for value in result.values] == [
        stages[value["stage"]] for value in result.values
    ]
