"""Storage that fails under a run: a line on every rank and an end, never a hang or a half state."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patch.training import metrics, resume
from tests.dist.harness import RankServer
from tests.dist.tiny import MODELS, write_corpus, write_model


def _argv(folder: Path, *more: str) -> list[str]:
    if not (folder / "hf").exists():
        write_model(folder / "hf", MODELS["dense"])
        write_corpus(folder / "corpus")
    return [
        *("--hf-model", str(folder / "hf"), "--data-path", str(folder / "corpus")),
        *("--output-dir", str(folder / "run"), "--seq-length", "32", "--micro-batch-size", "1"),
        *("--global-batch-size", "4", "--train-iters", "6", "--save-interval", "3"),
        *("--lr", "3e-3", "--warmup-steps", "0", "--seed", "11", *more),
    ]


@pytest.mark.parametrize(
    "more",
    [("--tp", "2"), pytest.param(("--tp", "2", "--async-save"), marks=pytest.mark.slow)],
    ids=["at-once", "in-the-background"],
)
def test_a_full_disk_during_a_save(
    more: tuple[str, ...], ranks: RankServer, tmp_path: Path
) -> None:
    argv = _argv(tmp_path, *more)
    full = ranks.run(
        "tests.dist.jobs:train", 2, tmp_path / "a", argv=argv, file_limit=300_000, timeout=200
    )
    assert full.values == [{"status": 2}] * 2
    for log in full.logs:
        (line,) = [x for x in log.read_text().splitlines() if x.startswith("error: ")]
        assert "Traceback" not in log.read_text()
        assert "the same command goes on from the last whole checkpoint" in line, line
    words = [log.read_text() for log in full.logs]
    assert any(
        f"the checkpoint of step 3 could not be written to {tmp_path}/run/checkpoints: File too "
        "large" in text and "iter_0000003 is unfinished" in text
        for text in words
    ) or "--async-save" in more  # fmt: skip
    assert not resume.steps(tmp_path / "run" / "checkpoints")
    # With room again the same command goes on: from the start, as nothing whole was saved.
    assert (
        ranks.run("tests.dist.jobs:train", 2, tmp_path / "b", argv=argv).values
        == [{"status": 0}] * 2
    )
    assert [row["iteration"] for row in metrics.read(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert resume.steps(tmp_path / "run" / "checkpoints")[-1] == "iter_0000006"


def test_a_limit_by_the_clock_saves_and_ends(ranks: RankServer, tmp_path: Path) -> None:
    argv = _argv(tmp_path, "--train-iters", "100", "--exit-duration-in-mins", "5")
    ended = ranks.run("tests.dist.jobs:train", 1, tmp_path / "a", argv=argv, minutes_ago=6)
    assert ended.values == [{"status": 0}]
    assert "> stopped at step 1 of 100" in ended.logs[0].read_text()
    assert resume.latest(tmp_path / "run" / "checkpoints") == "iter_0000001"


def test_data_that_was_cut_off(ranks: RankServer, tmp_path: Path) -> None:
    argv = _argv(tmp_path)
    with (tmp_path / "corpus.bin").open("r+b") as file:
        file.truncate(1000)
    refused = ranks.run("tests.dist.jobs:train", 2, tmp_path / "a", argv=argv)
    assert refused.values == [{"status": 2}] * 2
    for log in refused.logs:
        (line,) = [x for x in log.read_text().splitlines() if x.startswith("error: ")]
        assert f"{tmp_path}/corpus.bin holds 1000 bytes, its index announces" in line
