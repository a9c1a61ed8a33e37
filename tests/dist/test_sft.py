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

#: Latent attention, routing by a bias, shared experts, a layer for multi-token prediction; and
#: Gated DeltaNet with gated attention between.
MORE = {
    "latent": configs.DEEPSEEK_V3
    | {"num_hidden_layers": 2, "n_routed_experts": 8, "vocab_size": 500, "aux_loss_alpha": 0.0},
    "delta": configs.QWEN3_NEXT
    | {"full_attention_interval": 2, "vocab_size": 500, "router_aux_loss_coef": 0.0},
}
KINDS = (*MODELS, *MORE)

#: Every layout, and the kinds of model that the ordinary run takes it for: each degree once for
#: each kind that it can go wrong for, and what meets only together. `-m ""` runs all of them.
LAYOUTS = {
    Layout("one", 1, ()): {"dense", "delta"},
    Layout("dp2-fused", 2, ("--linear-cross-entropy", "on")): {"dense"},
    Layout("tp2-sp", 2, ("--tp", "2")): {"moe", "latent"},
    Layout("pp2", 2, ("--pp", "2")): {"latent"},
    Layout("pp2-vpp2", 2, ("--pp", "2", "--vpp", "2")): {"moe"},
    Layout("pp4", 4, ("--pp", "4")): {"dense"},
    Layout("cp2", 2, ("--cp", "2")): {"dense", "latent"},
    Layout("cp4", 4, ("--cp", "4")): set(),
    Layout("ep2", 2, ("--ep", "2"), dense=False): {"moe"},
    Layout("tp2-etp2", 2, ("--tp", "2", "--etp", "2"), dense=False): set(),
    Layout("tp2-ep2", 2, ("--tp", "2", "--ep", "2"), dense=False): set(),
    Layout("tp2-pp2", 4, ("--tp", "2", "--pp", "2")): {"dense"},
    Layout("tp2-cp2", 4, ("--tp", "2", "--cp", "2")): set(),
    Layout("pp2-cp2", 4, ("--pp", "2", "--cp", "2")): set(),
    Layout("dp2-pp2", 4, ("--pp", "2")): set(),
}
#: Two layers, or heads of Gated DeltaNet for two ranks only.
IMPOSSIBLE = {("latent", "pp2-vpp2"), ("latent", "pp4"), ("delta", "cp4"), ("delta", "tp2-cp2")}


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
    config = (MODELS | MORE)[kind] | more
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
        *("--seed", "11", "--no-save-optim", "--save-hf", "none"),
        *more,
    ]


#: A step that leaves the weights as they are.
STILL = ("--lr", "1e-30", "--min-lr", "0")


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
    alone: Outcome


@pytest.fixture(scope="module")
def starts(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """For each model, random weights and what every sample gives as a row of its own."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        model = write_sft_model(folder / "hf", kind, **EXTRA.get(kind, {}))
        data = write_data(folder / "data.jsonl")
        argv = flags(model, data, folder / "first", "--no-packing", *STILL)
        argv += ["--global-batch-size", str(len(LENGTHS))]
        if kind == "latent":
            argv += ["--moe-router-bias-update-rate", "0"]
        outcome = run(ranks, folder, 1, argv)
        found[kind] = Start(model, data, folder / "first", outcome)
    return found


CASES = [
    pytest.param(
        kind,
        layout,
        id=f"{kind}-{layout.name}",
        marks=[] if kind in ordinary else pytest.mark.slow,
    )
    for layout, ordinary in LAYOUTS.items()
    for kind in KINDS
    if (kind != "dense" or layout.dense) and (kind, layout.name) not in IMPOSSIBLE
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_packed_is_alone(
    kind: str,
    layout: Layout,
    ranks: RankServer,
    starts: dict[str, Start],
    tmp_path: Path,
) -> None:
    start = starts[kind]
    want = start.alone
    argv = flags(start.model, start.data, tmp_path / "run", "--init-from", str(start.checkpoint),
                 *layout.flags)  # fmt: skip
    got = run(ranks, tmp_path / "job", layout.ranks, argv)
    assert got.record["trained_tokens"] == want.record["trained_tokens"]
    assert got.record["tokens"] == sum(LENGTHS)
    # Gradients of decays are small sums (1e-8) of terms that cancel: rounding leaves 3e-4 of them.
    decays = [name for name in want.grads if name.endswith((".A_log", ".dt_bias", ".alpha"))]
    for name in decays:
        one, two = got.grads.pop(name), want.grads[name]
        assert np.abs(one - two).max() < 1e-3 * np.abs(two).max(), name
    gap, name = worst(got.grads, {n: g for n, g in want.grads.items() if n not in decays})
    print(f"{kind} {layout.name}: loss {abs(got.loss / want.loss - 1):.1e}, "
          f"gradient {gap:.1e} ({name})")  # fmt: skip
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert gap < 1e-5, name


def test_loss_units(ranks: RankServer, starts: dict[str, Start], tmp_path: Path) -> None:
    """Against the losses of the samples, one a step; the same however a step is cut up."""
    start = starts["dense"]

    def of(unit: str, name: str, world: int, *more: str) -> Outcome:
        folder = tmp_path / unit / name
        argv = flags(start.model, start.data, folder / "run", "--init-from", str(start.checkpoint),
                     "--sft-loss-unit", unit, *more)  # fmt: skip
        return run(ranks, folder, world, argv)

    argv = flags(start.model, start.data, tmp_path / "each", "--init-from", str(start.checkpoint),
                 "--no-packing", "--global-batch-size", "1", *STILL)  # fmt: skip
    ranks.run("tests.dist.jobs:train", 1, tmp_path / "each-job", argv=argv, entry="sft")
    each = metrics.read(tmp_path / "each")
    losses = [record["lm loss"] for record in each]
    weights = {"token": [record["trained_tokens"] for record in each], "sample": [1] * len(each)}
    means = {unit: np.average(losses, weights=w) for unit, w in weights.items()}
    assert abs(means["token"] / means["sample"] - 1) > 1e-4, "the units differ on this data"
    whole = ("--seq-length", "256", "--global-batch-size", "1")
    for unit, mean in means.items():
        want = start.alone if unit == "token" else of(unit, "one-pack", 1, *whole)
        got = of(unit, "dp2", 2)
        assert want.loss == pytest.approx(mean, rel=1e-6), unit
        assert got.loss == pytest.approx(mean, rel=1e-6), unit
        gap, parameter = worst(got.grads, want.grads)
        assert gap < 1e-5, (unit, parameter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, id=f"{kind}-{layout.name}")
        for layout in LAYOUTS
        for kind in ("dense", "moe")
        if layout.name not in ("one", "dp2-fused") and (kind != "dense" or layout.dense)
    ],
)
def test_samples_weigh_the_same_at_every_layout(
    kind: str, layout: Layout, ranks: RankServer, starts: dict[str, Start], tmp_path: Path
) -> None:
    start = starts[kind]

    def of(name: str, world: int, *more: str) -> Outcome:
        argv = flags(start.model, start.data, tmp_path / name, "--init-from",
                     str(start.checkpoint), "--sft-loss-unit", "sample", *more)  # fmt: skip
        return run(ranks, tmp_path / f"{name}-job", world, argv)

    want = of("alone", 1, "--no-packing", "--global-batch-size", str(len(LENGTHS)))
    got = of("packed", layout.ranks, *layout.flags)
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    gap, parameter = worst(got.grads, want.grads)
    assert gap < 1e-5, parameter


@pytest.mark.slow
def test_adapters_of_experts_go_on_at_another_layout(ranks: RankServer, tmp_path: Path) -> None:
    model = write_sft_model(tmp_path / "hf", "moe", router_aux_loss_coef=0.0)
    data = write_data(tmp_path / "data.jsonl")

    def go(name: str, world: int, *more: str) -> None:
        argv = flags(model, data, tmp_path / name, "--epochs", "3", "--optimizer", "adam",
                     "--use-distributed-optimizer", "--lora-rank", "4",
                     "--lora-target-modules", "q_proj", "experts", *more)  # fmt: skip
        for word in ("--no-save-optim", "--no-use-distributed-optimizer"):
            argv.remove(word)
        job = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        result = ranks.run("tests.dist.jobs:train", world, job, argv=argv, entry="sft")
        assert result.values == [{"status": 0}] * world, result.logs[0].read_text()[-2000:]

    # Both from one layout: random weights depend on it.
    go("whole", 1)
    go("parts", 1, "--exit-interval", "1")
    go("parts", 2, "--ep", "2", "--exit-interval", "2")
    go("parts", 2, "--tp", "2", "--etp", "2")
    whole, parts = (metrics.read(tmp_path / name) for name in ("whole", "parts"))
    losses = [[record["lm loss"] for record in records] for records in (whole, parts)]
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_padding_is_not_in_the_balancing_loss(ranks: RankServer, tmp_path: Path) -> None:
    """A pack with a padded end, cut over two ranks, gives what the full pack gives on one."""
    model = write_sft_model(tmp_path / "hf", "moe", router_aux_loss_coef=1.0)
    data = write_data(tmp_path / "data.jsonl", (20, 28))

    def of(name: str, world: int, *more: str) -> Outcome:
        argv = flags(model, data, tmp_path / name, "--global-batch-size", "1", *more)
        return run(ranks, tmp_path / f"{name}-job", world, argv)

    full = of("full", 1, "--seq-length", "48", *STILL)
    start = ("--init-from", str(tmp_path / "full"))
    for name, more in (
        ("tp2", ("--tp", "2")),
        ("cp2", ("--cp", "2")),
    ):
        got = of(name, 2, "--seq-length", "64", *more, *start)
        gap, parameter = worst(got.grads, full.grads)
        print(f"{name}: {gap:.1e} {parameter}")
        assert gap < 1e-5, (name, parameter)


def test_resume_in_the_middle_of_an_epoch(
    ranks: RankServer, starts: dict[str, Start], tmp_path: Path
) -> None:
    """Interrupted and gone on with other replicas: samples and losses of a run that was not."""
    from safetensors.numpy import load_file

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
    assert not (tmp_path / "whole" / "hf").exists()
    go("parts", 1, "--save-hf", "best")
    found = metrics.evaluations(tmp_path / "parts")
    best, last = min(found, key=lambda step: found[step]), max(found)
    weights = [load_file(tmp_path / "parts" / name / "model.safetensors")
               for name in ("hf", *(["hf-best"] if best != last else []))]  # fmt: skip
    assert best != last, "this data is learnt by heart"
    assert any(not np.array_equal(weights[0][n], weights[1][n]) for n in weights[0])
    evaluations = [
        [json.loads(line)["lm loss"] for line in (tmp_path / name / "metrics.jsonl").open()
         if "evaluation" in line]
        for name in ("whole", "parts")
    ]  # fmt: skip
    assert len(evaluations[0]) > 2 and len(set(evaluations[0])) > 2
    assert evaluations[1][-1] == pytest.approx(evaluations[0][-1], rel=1e-5)


@pytest.mark.slow
def test_half_precision_scales_the_loss(
    ranks: RankServer, starts: dict[str, Start], tmp_path: Path
) -> None:
    """No step is lost to a scale that is too large, and losses are those of float32."""
    start, losses = starts["dense"], []
    for name, more in (("fp16", ("--fp16",)), ("fp32", ())):
        argv = flags(start.model, start.data, tmp_path / name, "--init-from",
                     str(start.checkpoint), "--epochs", "4", *more)  # fmt: skip
        result = ranks.run("tests.dist.jobs:train", 1, tmp_path / f"{name}-job", argv=argv,
                           entry="sft")  # fmt: skip
        assert result.values == [{"status": 0}], result.logs[0].read_text()[-2000:]
        records = metrics.read(tmp_path / name)
        assert not any(record.get("skipped") for record in records)
        losses.append([record["lm loss"] for record in records])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert losses[1][-1] < losses[1][0] - 0.1


def test_a_loss_that_is_no_number_names_its_sample(ranks: RankServer, tmp_path: Path) -> None:
    """One token's embedding is NaN: the sample that holds it is named, and no other one of its
    pack, for attention does not cross their boundary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = write_sft_model(tmp_path / "hf", "dense", tie_word_embeddings=False)
    torch.manual_seed(1)
    weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    weights.get_input_embeddings().weight.data[77] = float("nan")
    weights.float().save_pretrained(model)
    rows = [{"input_ids": [n + 1] * 20, "labels": [n + 1] * 20} for n in range(3)]
    rows[1]["input_ids"] = rows[1]["labels"] = [5, 6, 77, 8, 9]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    argv = flags(model, data, tmp_path / "run", "--global-batch-size", "1")
    result = ranks.run("tests.dist.jobs:train", 1, tmp_path / "job", argv=argv, entry="sft")
    assert result.values == [{"status": 2}]
    (error,) = [x for x in result.logs[0].read_text().splitlines() if x.startswith("error:")]
    assert "step 1: lm loss is nan" in error
    assert f"not finite on {data} sample 1 (loss nan)" in error and "rank 0, a row" in error
    assert all(f"{data} sample {n}" in error for n in range(3))


def test_frozen_parameters_stay(
    ranks: RankServer, starts: dict[str, Start], tmp_path: Path
) -> None:
    start = starts["moe"]

    def weights(name: str, *more: str) -> dict[str, np.ndarray]:
        folder = tmp_path / name
        argv = flags(start.model, start.data, folder / "run", "--init-from", str(start.checkpoint),
                     "--pp", "2", *more)  # fmt: skip
        result = ranks.run("tests.dist.jobs:train", 2, folder, argv=argv, weights=True, entry="sft")
        assert result.values == [{"status": 0}] * 2, result.logs[0].read_text()[-2000:]
        return tensors(ranks, folder / "weights", folder / "w")

    before = weights("still", *STILL)
    after = weights("frozen", "--freeze", "router", r"layers\.3\.", "embedding")
    for name, value in after.items():
        frozen = "router" in name or "layers.3." in name or "embedding" in name
        assert np.array_equal(before[name], value) == frozen, name
