"""``data index`` builds, without ranks and from the run's flags, what the run then finds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megatron_patch import cli
from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import MODELS, write_corpus, write_model


def index(_rank: int, _size: int, _directory: Path, argv: list[str]) -> int:
    """Job: the command, in a process that is no rank."""
    import os

    import torch

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    status = cli.call("data", ["index", *argv])
    assert not torch.distributed.is_initialized()
    return status


def files(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> time of writing and digest."""
    return {
        p.name: (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest())
        for p in folder.rglob("*")
        if p.is_file()
    }


@pytest.mark.parametrize(
    "data",
    [
        ("--data-path", "0.7", "{0}/a", "0.3", "{0}/b", "--split", "80,20,0"),
        pytest.param(
            (
                *("--train-data-path", "{0}/a", "--valid-data-path", "{0}/a", "{0}/b"),
                "--multiple-validation-sets",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["blend", "validation sets"],
)
def test_a_run_finds_the_index(ranks: RankServer, tmp_path: Path, data: tuple[str, ...]) -> None:
    write_model(tmp_path / "hf", MODELS["dense"])
    write_corpus(tmp_path / "a")
    write_corpus(tmp_path / "b", documents=40)
    flags = [
        *("--hf-model", str(tmp_path / "hf"), *(word.format(tmp_path) for word in data)),
        *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "4"),
        *("--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1", "--lr", "1e-3"),
        *("--warmup-steps", "1", "--seed", "11", "--device", "cpu"),
    ]

    def run(name: str) -> list[float]:
        argv = [*flags, "--output-dir", str(tmp_path / name), "--no-save-optim"]
        ranks.run("tests.dist.jobs:train", 2, tmp_path / f"job-{name}", argv=argv)
        return [row["lm loss"] for row in metrics.read(tmp_path / name) if "lm loss" in row]

    out = ["--output-dir", str(tmp_path / "indexed")]
    job = "tests.dist.test_data_index:index"
    first = ranks.run(job, 1, tmp_path / "1", argv=[*flags, *out, "--nproc-per-node", "2"])
    assert first.values == [0], first.logs[0].read_text()
    built = files(tmp_path / "indexed/cache")
    assert any("shuffle_index" in name for name in built)
    words = first.logs[0].read_text()
    assert f"{len(built)} files" in words and "16 sequences of 32 in steps of 4" in words

    again = ranks.run(job, 1, tmp_path / "2", argv=[*flags, *out, "--nproc-per-node", "2"])
    assert "nothing to build" in again.logs[0].read_text()

    losses = run("indexed")
    assert files(tmp_path / "indexed/cache") == built, "the run has built something itself"
    assert losses == run("plain") and len(losses) >= 4, "the same samples in the same order"
    digests = [
        sorted(digest for name, (_, digest) in found.items() if name.endswith(".npy"))
        for found in (built, files(tmp_path / "plain/cache"))
    ]
    assert digests[0] == digests[1]


def test_what_it_needs(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_model(tmp_path / "hf", MODELS["dense"])
    flags = ["--hf-model", str(tmp_path / "hf"), "--seq-length", "32"]
    assert cli.call("data", ["index", *flags]) == 2
    assert "--train-iters" in capfd.readouterr().err
    assert cli.call("data", ["index", *flags, "--train-iters", "3"]) == 2
    assert "no data" in capfd.readouterr().err
    gone = ["--data-path", str(tmp_path / "gone")]
    assert cli.call("data", ["index", *flags, "--train-iters", "3", *gone]) == 2
    assert "gone.idx" in capfd.readouterr().err
    assert cli.call("data", ["index", "--help"]) == 0
    assert "--data-index" in capfd.readouterr().out
