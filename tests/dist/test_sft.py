"""Fine-tuning: packed samples give what the same samples give alone, at every layout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.test_layouts import Layout
from tests.dist.tiny import MODELS, tensors, worst

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import configs

#: Lengths of the samples: edges of packs, odd ones, one alone in its pack.
LENGTHS = (63, 3, 21, 30, 17, 37, 23, 5, 22)

#: Balancing losses are of a row, not of a sample: they differ by design.
EXTRA = {"moe": {"router_aux_loss_coef": 0.0}}

#: Latent attention, routing by a bias, shared experts, a layer for multi-token prediction.
LATENT = {
    "latent": configs.DEEPSEEK_V3
    | {"num_hidden_layers": 2, "n_routed_experts": 8, "vocab_size": 500, "aux_loss_alpha": 0.0},
}
KINDS = (*MODELS, *LATENT)

LAYOUTS = (
    Layout("one", 1, ()),
    Layout("tp2-sp", 2, ("--tp", "2")),
    Layout("pp2", 2, ("--pp", "2")),
    Layout("pp2-vpp2", 2, ("--pp", "2", "--vpp", "2")),
    Layout("cp2", 2, ("--cp", "2")),
    Layout("dp2", 2, ()),
    Layout("tp2-pp2", 4, ("--tp", "2", "--pp", "2")),
    Layout("ep2", 2, ("--ep", "2"), dense=False),
    Layout("fused", 1, ("--linear-cross-entropy", "on"), moe=False),
    Layout("cp2-pp4", 8, ("--cp", "2", "--pp", "4"), moe=False),
)


def sample(number: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    ids = rng.integers(1, 500, length).tolist()
    trained = (rng.random(length) < 0.6).astype(int)
    trained[-1] = 1
    return {"input_ids": ids, "loss_mask": trained.tolist()}


def write_data(path: Path, lengths: Any = LENGTHS) -> Path:
    rows = [json.dumps(sample(number, length)) for number, length in enumerate(lengths)]
    path.write_text("\n".join(rows) + "\n")
    return path


def write_sft_model(folder: Path, kind: str, **more: Any) -> Path:
    """Configuration and a tokenizer, which ids that are given need for its size only."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir(parents=True, exist_ok=True)
    config = (MODELS | LATENT)[kind] | more
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{n}": n for n in range(499)} | {"</s>": 499}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def flags(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-model", str(model), "--data-path", str(data), "--output-dir", str(output)),
        *("--seq-length", "64", "--global-batch-size", "4", "--epochs", "1"),
        *("--lr", "0.1", "--min-lr", "0.1", "--warmup-steps", "0", "--clip-grad", "0"),
        *("--optimizer", "sgd", "--no-use-distributed-optimizer", "--no-overlap-param-gather"),
        *("--seed", "11", "--no-save-optim"),
        *more,
    ]


@dataclass(frozen=True)
class Outcome:
    loss: float
    record: dict[str, Any]
    grads: dict[str, np.ndarray]


def run(ranks: RankServer, folder: Path, world: int, argv: list[str]) -> Outcome:
    result = ranks.run("tests.dist.jobs:train", world, folder, argv=argv, grads_after=1,
                       entry="sft")  # fmt: skip
    assert result.values == [{"status": 0}] * world
    (record,) = metrics.read(Path(argv[argv.index("--output-dir") + 1]))
    return Outcome(record["lm loss"], record, tensors(ranks, folder / "grads", folder / "g"))


@dataclass(frozen=True)
class Start:
    model: Path
    data: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def starts(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        model = write_sft_model(folder / "hf", kind, **EXTRA.get(kind, {}))
        data = write_data(folder / "data.jsonl")
        argv = flags(model, data, folder / "first")
        result = ranks.run("tests.dist.jobs:train", 1, folder / "job", argv=argv, entry="sft")
        assert result.values == [{"status": 0}], result.logs[0].read_text()[-2000:]
        found[kind] = Start(model, data, folder / "first")
    return found


@pytest.fixture(scope="module")
def alone(
    ranks: RankServer, starts: dict[str, Start], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Every sample a row of its own, on one rank."""
    found = {}
    for kind, start in starts.items():
        folder = tmp_path_factory.mktemp(f"{kind}-alone")
        rows = str(len(LENGTHS))
        argv = flags(start.model, start.data, folder / "run", "--init-from", str(start.checkpoint),
                     "--no-packing", "--global-batch-size", rows)  # fmt: skip
        found[kind] = run(ranks, folder, 1, argv)
    return found


#: The rest is marked slow: what it would find, one of these finds too, or a test of pretraining.
QUICK = {
    "dense": ("tp2-sp", "cp2", "tp2-pp2"),
    "moe": ("pp2-vpp2", "ep2"),
    "latent": ("tp2-sp", "pp2"),
}

CASES = [
    pytest.param(
        kind,
        layout,
        id=f"{kind}-{layout.name}",
        marks=[] if layout.name in QUICK[kind] else pytest.mark.slow,
    )
    for kind in KINDS
    for layout in LAYOUTS
    if getattr(layout, "dense" if kind == "dense" else "moe")
    if kind != "latent" or layout.name in ("one", "tp2-sp", "pp2", "cp2", "dp2", "ep2")
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_packed_is_alone(
    kind: str,
    layout: Layout,
    ranks: RankServer,
    starts: dict[str, Start],
    alone: dict[str, Outcome],
    tmp_path: Path,
) -> None:
    start, want = starts[kind], alone[kind]
    argv = flags(start.model, start.data, tmp_path / "run", "--init-from", str(start.checkpoint),
                 *layout.flags)  # fmt: skip
    got = run(ranks, tmp_path / "job", layout.ranks, argv)
    assert got.record["trained_tokens"] == want.record["trained_tokens"]
    assert got.record["tokens"] == sum(LENGTHS)
    gap, name = worst(got.grads, want.grads)
    print(f"{kind} {layout.name}: loss {abs(got.loss / want.loss - 1):.1e}, "
          f"gradient {gap:.1e} ({name})")  # fmt: skip
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert gap < 1e-5, name


def losses(folder: Path) -> list[float]:
    return [record["lm loss"] for record in metrics.read(folder)]


@pytest.mark.parametrize("unit", ["token", "sample"])
def test_loss_unit(unit: str, ranks: RankServer, starts: dict[str, Start], tmp_path: Path) -> None:
    """Against the losses of the samples, one a step; the same however a step is cut up."""
    start = starts["dense"]

    def of(name: str, world: int, *more: str) -> Outcome:
        argv = flags(start.model, start.data, tmp_path / name, "--init-from",
                     str(start.checkpoint), "--sft-loss-unit", unit, *more)  # fmt: skip
        return run(ranks, tmp_path / f"{name}-job", world, argv)

    rows = str(len(LENGTHS))
    want = of("alone", 1, "--no-packing", "--global-batch-size", rows)
    argv = flags(start.model, start.data, tmp_path / "each", "--init-from", str(start.checkpoint),
                 *("--no-packing", "--global-batch-size", "1"),
                 *("--lr", "1e-30", "--min-lr", "0"))  # fmt: skip
    ranks.run("tests.dist.jobs:train", 1, tmp_path / "each-job", argv=argv, entry="sft")
    each = metrics.read(tmp_path / "each")
    found = [record["lm loss"] for record in each]
    by_token = np.average(found, weights=[record["trained_tokens"] for record in each])
    mean = np.mean(found) if unit == "sample" else by_token
    assert abs(by_token / np.mean(found) - 1) > 1e-4, "the units differ on this data"
    assert want.loss == pytest.approx(mean, rel=1e-6)
    for name, world, more in (
        ("packed", 1, ()),
        ("one-pack", 1, ("--seq-length", "256", "--global-batch-size", "1")),
        ("dp2", 2, ()),
    ):
        got = of(name, world, *more)
        assert got.loss == pytest.approx(mean, rel=1e-6), name
        gap, parameter = worst(got.grads, want.grads)
        assert gap < 1e-5, (name, parameter)


def test_padding_is_not_in_the_balancing_loss(ranks: RankServer, tmp_path: Path) -> None:
    """A pack with a padded end, on one and on two ranks, gives what the full pack gives."""
    model = write_sft_model(tmp_path / "hf", "moe", router_aux_loss_coef=1.0)
    data = write_data(tmp_path / "data.jsonl", (20, 28))

    def of(name: str, world: int, *more: str) -> Outcome:
        argv = flags(model, data, tmp_path / name, "--global-batch-size", "1", *more)
        return run(ranks, tmp_path / f"{name}-job", world, argv)

    full = of("full", 1, "--seq-length", "48")
    start = ("--init-from", str(tmp_path / "full"), "--no-load-rng")
    plain = of("plain", 1, "--seq-length", "48", *start)
    for name, world, more in (
        ("padded", 1, ()),
        ("tp2", 2, ("--tp", "2")),
        ("cp2", 2, ("--cp", "2")),
        ("pp2", 2, ("--pp", "2")),
    ):
        got = of(name, world, "--seq-length", "64", *more, *start)
        gap, parameter = worst(got.grads, plain.grads)
        print(f"{name}: {gap:.1e} {parameter}")
        assert gap < 1e-5, (name, parameter)
    assert full.loss > 0


def test_resume_in_the_middle_of_an_epoch(
    ranks: RankServer, starts: dict[str, Start], tmp_path: Path
) -> None:
    """Interrupted and gone on with other replicas: samples and losses of a run that was not."""
    start = starts["dense"]
    data = write_data(tmp_path / "data.jsonl", tuple(range(5, 60, 2)))

    def go(name: str, world: int, *more: str) -> None:
        argv = flags(start.model, data, tmp_path / name, "--init-from", str(start.checkpoint),
                     "--epochs", "2", "--lr", "0.01", "--min-lr", "0.01", "--split", "80,20",
                     "--eval-interval", "2", "--optimizer", "adam", "--use-distributed-optimizer",
                     *more)  # fmt: skip
        for word in ("--no-save-optim", "--no-use-distributed-optimizer"):
            argv.remove(word)
        result = ranks.run("tests.dist.jobs:train", world, tmp_path / f"{name}{world}{len(more)}",
                           argv=argv, entry="sft")  # fmt: skip
        assert result.values == [{"status": 0}] * world, result.logs[0].read_text()[-2000:]

    go("whole", 2)
    go("parts", 2, "--exit-interval", "3")
    go("parts", 1)
    whole, parts = (metrics.read(tmp_path / name) for name in ("whole", "parts"))
    assert len(whole) > 5
    for one, two in zip(whole, parts, strict=True):
        assert two["lm loss"] == pytest.approx(one["lm loss"], rel=1e-5)
        assert (one["tokens"], one["epoch"]) == (two["tokens"], two["epoch"])
    evaluations = [
        [json.loads(line)["lm loss"] for line in (tmp_path / name / "metrics.jsonl").open()
         if "evaluation" in line]
        for name in ("whole", "parts")
    ]  # fmt: skip
    assert len(evaluations[0]) > 2 and len(set(evaluations[0])) > 2
    assert evaluations[1][-1] == pytest.approx(evaluations[0][-1], rel=1e-5)
