"""From indexed documents to the loss, through the entry point: what is taught, how it scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.data.idxmap import Writer
from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import MODELS, tensors, write_corpus, write_model

END = 0
STEPS, MICRO_BATCH, GLOBAL_BATCH = 2, 2, 4


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense"), MODELS["dense"])


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that count upwards, so that every trained pair of tokens can be judged alone."""
    prefix = tmp_path_factory.mktemp("counting") / "corpus"
    rng = np.random.default_rng(1)
    with Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(80):
            first = int(rng.integers(1, 400))
            ids = np.array([*range(first, first + int(rng.integers(5, 90))), END])
            writer.write(ids, np.array([len(ids)]), np.array([1]))
        writer.commit()
    return prefix


def argv(model: Path, corpus: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-model", str(model), "--data-path", str(corpus), "--output-dir", str(output)),
        *("--seq-length", "64", "--micro-batch-size", str(MICRO_BATCH)),
        *("--global-batch-size", str(GLOBAL_BATCH), "--train-iters", str(STEPS)),
        *("--lr", "1e-3", "--min-lr", "1e-3", "--warmup-steps", "0", "--seed", "3"),
        *("--clip-grad", "1e9", "--weight-decay", "0"),
        *more,
    ]


def see(
    ranks: RankServer, folder: Path, world: int, model: Path, corpus: Path, *more: str
) -> list[dict[str, Any]]:
    values = ranks.run(
        "tests.dist.entry_jobs:batches",
        world,
        folder / "job",
        argv=argv(model, corpus, folder / "run", *more),
    ).values
    for value in values:
        assert value["status"] == 0
        value["batches"] = value["batches"][: STEPS * GLOBAL_BATCH // MICRO_BATCH]
    return values


@pytest.fixture(scope="module")
def whole(
    ranks: RankServer, dense: Path, counting: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    (value,) = see(ranks, tmp_path_factory.mktemp("one"), 1, dense, counting)
    return value["batches"]


def test_every_token_is_taught_from_the_one_before(whole: list[dict[str, Any]]) -> None:
    """Shifted once: not twice, not never, and no answer's first token is lost."""
    assert len(whole) == STEPS * GLOBAL_BATCH // MICRO_BATCH
    taught = 0
    for batch in whole:
        tokens, labels, mask = (np.array(batch[key]) for key in ("tokens", "labels", "loss_mask"))
        assert tokens.shape == labels.shape == mask.shape == (MICRO_BATCH, 64)
        assert batch["attention_mask"] is None, "causal attention needs none"
        np.testing.assert_array_equal(batch["position_ids"], [list(range(64))] * MICRO_BATCH)
        assert (mask == 1).all()
        np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
        # Inside a document the label is the next number; after its last token, its end.
        inside = (tokens != END) & (labels != END)
        np.testing.assert_array_equal(labels[inside], tokens[inside] + 1)
        assert inside.sum() > 64
        taught += mask.sum()
    assert taught == STEPS * GLOBAL_BATCH * 64


@pytest.mark.parametrize(
    ("world", "more"), [(4, ("--tp", "2", "--cp", "2")), (2, ("--pp", "2"))], ids=["tp-cp", "pp"]
)
def test_ranks_see_their_part_of_the_same_batch(
    world: int,
    more: tuple[str, ...],
    ranks: RankServer,
    dense: Path,
    counting: Path,
    whole: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    values = see(ranks, tmp_path, world, dense, counting, *more)
    cp = 2 if "--cp" in more else 1
    assert len({(v["tp"], v["cp"], v["pp"]) for v in values}) == world
    for value in values:
        n = 64 // (2 * cp)
        chunks = [value["cp"], 2 * cp - 1 - value["cp"]] if cp > 1 else [0, 1]
        columns = [c * n + i for c in chunks for i in range(n)]
        for ours, theirs in zip(value["batches"], whole, strict=True):
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                if ours[key] is None:  # a pipeline stage without use for it
                    assert (value["pp"], key) in {
                        *((0, k) for k in ("labels", "loss_mask")),
                        *((1, k) for k in ("tokens", "position_ids")),
                    }
                    continue
                np.testing.assert_array_equal(ours[key], np.array(theirs[key])[:, columns])


def test_loss_and_gradient_do_not_grow_with_the_sequence(
    ranks: RankServer, dense: Path, counting: Path, tmp_path: Path
) -> None:
    found = {}
    for length in (32, 128):
        # As many tokens in both, so that the noise of the gradient is the same.
        more = ("--seq-length", str(length), "--global-batch-size", str(512 // length))
        folder = tmp_path / str(length)
        see(ranks, folder, 1, dense, counting, *more)
        found[length] = metrics.read(folder / "run")[0]
    short, long = found[32], found[128]
    # An untrained model guesses: the mean over tokens is near the entropy of a uniform choice.
    for row in (short, long):
        assert row["lm loss"] == pytest.approx(math.log(500), rel=0.05)
        assert 0.05 < row["grad_norm"] < 20
    assert short["grad_norm"] == pytest.approx(long["grad_norm"], rel=0.3)


def test_balancing_loss_is_added_exactly_once(
    ranks: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("balancing")
    write_corpus(folder / "corpus")
    found, grads = {}, {}
    for coefficient in (0.0, 0.25):
        model = write_model(
            folder / f"hf-{coefficient}",
            MODELS["moe"] | {"router_aux_loss_coef": coefficient},
        )
        place = folder / str(coefficient)
        (found[coefficient],) = ranks.run(
            "tests.dist.entry_jobs:balancing",
            1,
            place,
            argv=argv(model, folder / "corpus", place / "run", "--train-iters", "1"),
            top_k=MODELS["moe"]["num_experts_per_tok"],
            micro_batches=GLOBAL_BATCH // MICRO_BATCH,
        ).values
        assert found[coefficient]["status"] == 0
        assert found[coefficient]["calls"] == GLOBAL_BATCH // MICRO_BATCH
        grads[coefficient] = tensors(ranks, place / "grads", place / "g")
    # The rest of the loss is the same in both, and cancels.
    (name,) = [n for n in grads[0.0] if n.endswith("decoder.layers.3.mlp.router.weight")]
    expected = 0.25 * np.array(found[0.25]["gradient"])
    assert np.abs(expected).max() > 1e-4
    difference = grads[0.25][name] - grads[0.0][name]
    np.testing.assert_allclose(difference, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    losses = {c: metrics.read(folder / str(c) / "run")[0]["lm loss"] for c in (0.0, 0.25)}
    assert losses[0.0] == losses[0.25], "reported on its own, not in the loss of the tokens"
