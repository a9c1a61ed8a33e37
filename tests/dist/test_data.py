"""Data of a run: validation sets with a loss each, order across epochs and stops, caches."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.data.idxmap import Writer, write_index
from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import COMMON, write_corpus, write_model

LENGTH = 64


def _argv(folder: Path, name: str, *more: str) -> list[str]:
    return [
        *("--hf-model", str(folder / "hf"), "--data-path", str(folder / "corpus")),
        *("--output-dir", str(folder / name), "--seq-length", str(LENGTH)),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--warmup-steps", "0"),
        *("--lr", "1e-9", "--min-lr", "1e-9", "--seed", "11", *more),
    ]


def _stream(prefix: Path, ids: np.ndarray, size: int) -> None:
    """A data set of documents of `size` tokens."""
    with Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            writer.write(part, np.array([len(part)]), np.array([1]))
        writer.commit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "hf", COMMON | {"model_type": "qwen3", "num_hidden_layers": 2})
    write_corpus(folder / "corpus")
    rng = np.random.default_rng(5)
    _stream(folder / "few", rng.integers(1, 500, LENGTH + 1), 40)  # one sequence
    _stream(folder / "many", rng.integers(1, 500, 40 * LENGTH), 40)
    return folder


def _evaluations(output: Path) -> dict[tuple[int, str], float]:
    rows = map(json.loads, (output / metrics.FILE).read_text().splitlines())
    return {(r["iteration"], r["evaluation"]): r["lm loss"] for r in rows if "evaluation" in r}


def test_each_validation_set_has_its_loss(ranks: RankServer, folder: Path) -> None:
    """In a pipeline, over a stop, and the same sequences every time: nothing is learned here."""
    both = ("--valid-data-path", f"few={folder / 'few'}", f"many={folder / 'many'}")
    flags = ("--pp", "2", "--eval-interval", "2", "--eval-iters", "3")
    for name, more in (("both", "2"), ("both", "4")):
        argv = _argv(folder, name, *both, *flags, "--train-iters", more)
        job = ranks.run("tests.dist.jobs:train", 2, folder / f"job-{name}-{more}", argv=argv)
        assert job.values == [{"status": 0}] * 2
    argv = _argv(folder, "alone", "--valid-data-path", f"many={folder / 'many'}", *flags)
    ranks.run("tests.dist.jobs:train", 2, folder / "job-a", argv=[*argv, "--train-iters", "2"])
    found, alone = _evaluations(folder / "both"), _evaluations(folder / "alone")
    names = ("validation-few", "validation-many")
    assert list(found) == [(step, name) for step in (2, 4) for name in names]
    for name in names:
        assert found[2, name] == pytest.approx(found[4, name], rel=1e-6)
    assert abs(found[2, names[0]] - found[2, names[1]]) > 1e-3
    assert found[2, names[1]] == pytest.approx(alone[2, names[1]], rel=1e-6)
    assert metrics.evaluations(folder / "both")[4] == pytest.approx(
        (found[4, names[0]] + found[4, names[1]]) / 2
    )
    log = job.logs[0].read_text()
    assert "> step 4, validation-few: lm loss:" in log
    means = metrics.evaluations(folder / "both")
    best = (folder / "both" / "checkpoints" / "best").readlink()
    assert str(best) == f"iter_{min(means, key=lambda step: (means[step], step)):07}"


def _batches(
    ranks: RankServer, folder: Path, name: str, job: str, world: int, *more: str
) -> list[list[list[int]]]:
    """Tokens of every step, sequence by sequence in the order of the run."""
    argv = _argv(folder, name, "--train-iters", "12", "--data-path", str(folder / "eleven"))
    argv += ["--micro-batch-size", "1", *more]
    values = ranks.run("tests.dist.entry_jobs:batches", world, folder / job, argv=argv).values
    assert all(v["status"] == 0 for v in values)
    streams = [[row for batch in v["batches"] for row in batch["tokens"]] for v in values]
    flat: list[Any] = [row for rows in zip(*streams, strict=True) for row in rows]
    return [flat[at : at + 4] for at in range(0, len(flat), 4)]


def test_eleven_sequences_keep_their_order_over_epochs_and_stops(
    ranks: RankServer, folder: Path
) -> None:
    """12 steps of 4 over 11 sequences; stopped in the second epoch, gone on with two replicas."""
    _stream(folder / "eleven", np.arange(11 * LENGTH + 1) % 499 + 1, 100)
    whole = _batches(ranks, folder, "whole", "job-w", 1)
    seen = [tuple(row) for step in whole for row in step]
    assert len(whole) == 12 and len(set(seen)) == 48, "an epoch goes on in the next one's tokens"
    first = _batches(ranks, folder, "parts", "job-1", 1, "--exit-interval", "5")
    rest = _batches(ranks, folder, "parts", "job-2", 2)
    assert (len(first), len(rest)) == (5, 7)
    assert [*first, *rest] == whole


@pytest.mark.slow
def test_a_node_that_does_not_see_the_cache_builds_its_own(ranks: RankServer, folder: Path) -> None:
    argv = _argv(folder, "nodes", "--train-iters", "2", "--data-path", "3", str(folder / "corpus"))
    argv += ["1", str(folder / "many")]
    job = ranks.run("tests.dist.entry_jobs:node_of_its_own", 2, folder / "job-n", argv=argv)
    assert [v["status"] for v in job.values] == [0, 0]
    assert job.values[0]["files"] == job.values[1]["files"]
    assert len(job.values[0]["files"]) >= 8, "two data sets and their blend"
    assert re.search(r"is not shared: 1 more nodes built the index of", job.logs[0].read_text())


@pytest.mark.slow
def test_checkpoints_on_disks_of_the_nodes_are_refused(ranks: RankServer, folder: Path) -> None:
    argv = _argv(folder, "apart", "--train-iters", "2")
    job = "tests.dist.entry_jobs:node_of_its_own"
    found = ranks.run(job, 2, folder / "job-o", argv=argv, output=True)
    assert [v["status"] for v in found.values] == [2, 2]
    for log in found.logs:
        assert "is not what 1 of 2 ranks see (1): checkpoints need storage" in log.read_text()


@pytest.mark.slow
def test_ten_million_sequences_begin_anywhere_at_once(tmp_path: Path) -> None:
    """Two and a half passes over ten million: built once, then there at once, in the same order."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    length, count, size = 8, 10_000_000, 800
    documents = length * count // size
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate((length * count + size) * 2)  # a hole: zeros without a block on the disk
    documents += 1
    with open(tmp_path / "large.idx", "w+b") as file:
        lengths, single = np.full(documents, size, np.int32), np.ones(documents, np.int64)
        counts = {"sequences": documents, "documents": documents}
        write_index(file, np.dtype(np.uint16), [lengths], [single], **counts)

    def build() -> Any:
        config = GPTDatasetConfig(
            random_seed=7,
            sequence_length=length,
            blend=([str(tmp_path / "large")], None),
            split="100,0,0",
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=MegatronTokenizer.from_pretrained(
                metadata_path={"library": "null-text"}, vocab_size=512
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        wanted = [5 * count // 2, 0, 0]
        return BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config).build()[0]

    begun = time.process_time()
    whole = build()
    built = time.process_time() - begun
    begun = time.process_time()
    again = build()
    at = 12_345_678
    sampler = MegatronPretrainingSampler(len(again), at, 4, 0, 1)
    assert next(iter(sampler)) == list(range(at, at + 4))
    resumed = time.process_time() - begun
    print(f"built in {built:.1f} s, there again in {resumed:.2f} s")
    places = np.r_[0:50, at : at + 50, len(whole) - 50 : len(whole)]
    assert (whole.shuffle_index[places] == again.shuffle_index[places]).all()
    assert again[at]["tokens"].shape == (length,)
    assert built < 30 and resumed < 3
