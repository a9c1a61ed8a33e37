"""Stopping and going on: exact at one layout, extended, killed, from weights alone.

Other layouts are in `test_resume_matrix.py`.

The optimizer is the distributed Adam throughout. Losses are the raw ones of `metrics.jsonl`.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.training import metrics
from tests.dist.harness import RankFailure, RankServer
from tests.dist.tiny import MODELS, ODD, stored, write_corpus, write_model

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
PADDING_PATCH = "fully-reshardable-padding"


@dataclass(frozen=True)
class Inputs:
    models: dict[str, Path]
    corpus: Path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    write_corpus(folder / "corpus")
    configs = {**MODELS, "odd": ODD}
    return Inputs(
        {name: write_model(folder / name, config) for name, config in configs.items()},
        folder / "corpus",
    )


def command(inputs: Inputs, model: str, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-model", str(inputs.models[model]), "--data-path", str(inputs.corpus)),
        *("--output-dir", str(output), "--seq-length", "32", "--micro-batch-size", "1"),
        *("--global-batch-size", "4", "--train-iters", "10", "--save-interval", "5"),
        *("--lr", "3e-3", "--warmup-steps", "2", "--seed", "11", *more),
    ]


def train(
    ranks: RankServer, folder: Path, world: int, argv: list[str], **options: Any
) -> list[dict[str, Any]]:
    """Run the entry point; the run's records."""
    result = ranks.run("tests.dist.jobs:train", world, folder, argv=argv, **options)
    assert result.values == [{"status": 0}] * world
    return metrics.read(Path(argv[argv.index("--output-dir") + 1]))


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [row["lm loss"] for row in records]


def gap(a: list[float], b: list[float]) -> float:
    return max(abs(x / y - 1) for x, y in zip(a, b, strict=True))


# --- the same layout: bit for bit ---------------------------------------------------------------

EXACT = [
    pytest.param("dense", 1, ("--precision", "fp32", *DROPOUT), id="dense-fp32-dropout"),
    pytest.param(
        "dense",
        2,
        ("--precision", "bf16", "--tp", "2"),
        id="dense-bf16-tp2",
        marks=pytest.mark.slow,
    ),
    pytest.param("moe", 1, ("--precision", "fp32"), id="moe-fp32"),
    pytest.param(
        "moe",
        2,
        ("--precision", "bf16", "--ep", "2", *DROPOUT),
        id="moe-bf16-ep2-dropout",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("model", "world", "more"), EXACT)
def test_the_same_command_goes_on_exactly(
    model: str,
    world: int,
    more: tuple[str, ...],
    ranks: RankServer,
    inputs: Inputs,
    tmp_path: Path,
) -> None:
    whole = train(ranks, tmp_path / "a", world, command(inputs, model, tmp_path / "whole", *more))
    argv = command(inputs, model, tmp_path / "parts", "--exit-interval", "5", *more)
    first = train(ranks, tmp_path / "b", world, argv)
    assert len(first) == 5
    assert "> stopped at step 5 of 10" in (tmp_path / "b" / "rank0.log").read_text()
    parts = train(ranks, tmp_path / "c", world, argv)
    for key in ("lm loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[key] for row in parts] == [row[key] for row in whole], key
    assert np.ptp(losses(whole)) > 0.05, "losses move, so runs can differ"


# --- the trap of padded buckets; other layouts are in test_resume_matrix.py ---------------------

#: Several gradient buckets of odd sizes, whose ends are padded.
BUCKETS = ("--ddp-bucket-size", "40000", "--global-batch-size", "12", "--train-iters", "10")


def masters_differ(found: dict[str, Any]) -> list[str]:
    """Weights that are not their fp32 master bit for bit; they are in an fp32 run."""
    prefix = "optimizer.state.param."
    masters = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    weights = {k: v for k, v in found.items() if not k.startswith("optimizer.")}
    assert sorted(masters) == sorted(weights) and len(masters) > 5
    return [k for k in masters if masters[k] != weights[k]]


def test_without_the_patch_masters_are_saved_shifted(
    ranks: RankServer, inputs: Inputs, tmp_path: Path
) -> None:
    """Once upstream mends it this fails, and the patch can go."""
    argv = command(
        inputs, "odd", tmp_path / "run", *BUCKETS, "--train-iters", "1", "--warmup-steps", "0"
    )
    train(ranks, tmp_path / "job", 2, argv, without=[PADDING_PATCH])
    step = tmp_path / "run" / "checkpoints" / "iter_0000001"
    assert len(masters_differ(stored(step))) > 3
    argv[argv.index(str(tmp_path / "run"))] = str(tmp_path / "mended")
    train(ranks, tmp_path / "job2", 2, argv)
    assert not masters_differ(stored(tmp_path / "mended" / "checkpoints" / step.name))


# --- extending, being killed, weights only ------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    output: Path
    records: list[dict[str, Any]]


@pytest.fixture(scope="module")
def whole(ranks: RankServer, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Ten steps of the dense model on one rank."""
    output = tmp_path_factory.mktemp("whole") / "run"
    records = train(ranks, output.parent / "job", 1, command(inputs, "dense", output))
    return Whole(output, records)


def test_the_data_directory_is_left_alone(whole: Whole, inputs: Inputs) -> None:
    beside = sorted(p.name for p in inputs.corpus.parent.iterdir())
    assert beside == ["corpus.bin", "corpus.idx", *sorted(inputs.models)]
    assert list((whole.output / "cache").glob("*/*GPTDataset*"))


def test_a_finished_run_is_extended(
    ranks: RankServer, inputs: Inputs, whole: Whole, tmp_path: Path
) -> None:
    short = command(inputs, "dense", tmp_path / "run", "--train-iters", "6")
    assert len(train(ranks, tmp_path / "b", 1, short)) == 6
    longer = command(inputs, "dense", tmp_path / "run")
    records = train(ranks, tmp_path / "c", 1, longer)
    log = (tmp_path / "c" / "rank0.log").read_text()
    assert "> the run is extended from 6 to 10 steps" in log
    assert "the data is now read" not in log
    assert [row["iteration"] for row in records] == list(range(1, 11))
    rates = [row["learning_rate"] for row in records]
    assert rates[6:] == [row["learning_rate"] for row in whole.records][6:]
    assert rates[5] == pytest.approx(3e-4), "the short run had reached its end"
    assert [row["consumed_samples"] for row in records] == [4 * i for i in range(1, 11)]
    # The same sequences in the same order: only the rate of steps 3 to 6 differed.
    assert gap(losses(records)[:3], losses(whole.records)[:3]) == 0
    assert gap(losses(records)[6:], losses(whole.records)[6:]) < 0.05

    again = train(ranks, tmp_path / "d", 1, longer)
    assert again == records, "a finished run trains no further"

    more = command(
        inputs, "dense", tmp_path / "run", "--train-iters", "100", "--exit-interval", "11"
    )
    train(ranks, tmp_path / "e", 1, more)
    assert (
        "> the data is now read 2 times in place of 1" in (tmp_path / "e" / "rank0.log").read_text()
    )


def test_a_finished_run_restarts_its_schedule(
    ranks: RankServer, inputs: Inputs, whole: Whole, tmp_path: Path
) -> None:
    """Ten steps once more after ten steps, interrupted on the way: the rates of the first ten."""
    shutil.copytree(whole.output, tmp_path / "run")
    again = ("--train-iters", "20", "--restart-schedule-at", "10", "--exit-interval", "13")
    argv = command(inputs, "dense", tmp_path / "run", *again)
    assert len(train(ranks, tmp_path / "a", 1, argv)) == 13
    log = (tmp_path / "a" / "rank0.log").read_text()
    assert "> the schedule is restarted at step 10: 2 steps of warm-up" in log
    records = train(ranks, tmp_path / "b", 1, argv)
    rates = [row["learning_rate"] for row in records]
    assert rates[10:] == rates[:10] and len(set(rates)) > 8
    assert [row["consumed_samples"] for row in records] == [4 * i for i in range(1, 21)]
    assert losses(records)[10] < losses(records)[0] - 0.1, "weights and moments are kept"


def test_another_batch_goes_on_by_sequences(
    ranks: RankServer, inputs: Inputs, tmp_path: Path
) -> None:
    """40 sequences at 4 a step, from the 20th on at 8: the schedule ends with the last of them."""

    def argv(output: Path, *more: str) -> list[str]:
        line = " ".join(command(inputs, "dense", output, *more))
        return line.replace("--train-iters 10", "--train-samples 40").split()

    whole = train(ranks, tmp_path / "a", 1, argv(tmp_path / "whole"))
    train(ranks, tmp_path / "b", 1, argv(tmp_path / "run", "--exit-interval", "5"))
    records = train(ranks, tmp_path / "c", 1, argv(tmp_path / "run", "--global-batch-size", "8"))
    assert [row["iteration"] for row in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["consumed_samples"] for row in records[4:]] == [20, 28, 36]
    rate = {row["consumed_samples"]: row["learning_rate"] for row in whole}
    assert records[5]["learning_rate"] == pytest.approx(rate[28])
    assert records[6]["learning_rate"] == pytest.approx(rate[36])
    log = (tmp_path / "c" / "rank0.log").read_text()
    assert "20 were read in 5 steps" in log and "2 more steps run, up to step 7" in log
    assert losses(records)[:5] == losses(whole)[:5]


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    ranks: RankServer, inputs: Inputs, tmp_path: Path
) -> None:
    whole = train(ranks, tmp_path / "a", 2, command(inputs, "dense", tmp_path / "whole"))
    argv = command(inputs, "dense", tmp_path / "run")
    with pytest.raises(RankFailure, match="rank 0: exit status -9"):
        train(ranks, tmp_path / "b", 2, argv, die_in_step=7)
    deadline = time.monotonic() + 5
    while ranks.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ranks.left(), "a rank or a child of one outlived the kill"
    assert len(metrics.read(tmp_path / "run")) == 6
    records = train(ranks, tmp_path / "c", 2, argv)
    assert losses(records) == losses(whole)
    lines = (tmp_path / "run" / metrics.FILE).read_text().splitlines()
    steps = [line for line in lines if '"lm loss"' in line]
    assert len(steps) == 11, "step 6 stands twice, nothing was overwritten"


def test_weights_only_starts_anew(
    ranks: RankServer, inputs: Inputs, whole: Whole, tmp_path: Path
) -> None:
    start = ("--init-from", str(whole.output), "--exit-interval", "5")
    argv = command(inputs, "dense", tmp_path / "run", *start)
    records = train(ranks, tmp_path / "b", 1, argv)
    for key in ("iteration", "learning_rate", "consumed_samples"):
        assert [row[key] for row in records] == [row[key] for row in whole.records][:5], key
    assert records[0]["lm loss"] < whole.records[0]["lm loss"] - 0.1, "trained weights"
    log = (tmp_path / "b" / "rank0.log").read_text()
    assert f"> step 0 has the weights of {whole.output}, nothing random" in log
    assert "initialisation from scratch" not in log
    shown = [float(x) for x in re.findall(r"iteration .*lm loss: (\S+)", log)]
    # Every line is of its own step; upstream's second one was the mean of two.
    assert shown == pytest.approx([row["lm loss"] for row in records], rel=1e-6)
    # From then on the run's own checkpoint counts, not --init-from.
    records = train(ranks, tmp_path / "d", 1, argv)
    assert [row["iteration"] for row in records] == list(range(1, 11))
    assert "--init-from is not used" in (tmp_path / "d" / "rank0.log").read_text()


def test_weights_of_one_step(
    ranks: RankServer, inputs: Inputs, whole: Whole, tmp_path: Path
) -> None:
    """A link to an older step gives that step's weights, and a resume takes none of it."""
    steps = sorted((whole.output / "checkpoints").glob("iter_*"))
    assert len(steps) > 1
    link = tmp_path / "best"
    link.symlink_to(steps[0])
    argv = command(
        inputs, "dense", tmp_path / "run", "--init-from", str(link), "--exit-interval", "5"
    )
    first = train(ranks, tmp_path / "a", 1, argv)[0]["lm loss"]
    argv[argv.index(str(link))] = str(whole.output)
    argv[argv.index(str(tmp_path / "run"))] = str(tmp_path / "newest")
    assert abs(first - train(ranks, tmp_path / "b", 1, argv)[0]["lm loss"]) > 0.01
    argv[argv.index(str(tmp_path / "newest"))] = str(tmp_path / "run")
    argv[argv.index(str(whole.output))] = str(link)
    assert [row["iteration"] for row in train(ranks, tmp_path / "c", 1, argv)][-1] == 10
