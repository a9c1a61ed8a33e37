"""SIGKILL at random moments of training and saving; the same command goes on, and nothing is wrong.

Every step is saved, by turns at once and in the background, and the model is large enough for that
to take a good half of the time, so that many moments fall into a save. Five kills by default;
`KILLS=50 pytest tests/dist/test_kill.py -s` prints the moments and what came of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_patch import cli
from megatron_patch.patches.tracker_file import TRACKER
from megatron_patch.training import metrics, resume
from tests.dist.harness import RankFailure, RankServer
from tests.dist.tiny import MODELS, write_corpus, write_model

KILLS = int(os.environ.get("KILLS", "5"))
STEPS = 10
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400 + 90 * KILLS)]

#: About 30 MB a checkpoint.
MODEL = MODELS["moe"] | {
    "hidden_size": 192,
    "intermediate_size": 384,
    "moe_intermediate_size": 192,
}


def saved(output: Path) -> int:
    """The step that the next start has to go on from."""
    tracker = output / "checkpoints" / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0


def rows(output: Path) -> list[dict[str, Any]]:
    """Records of steps in metrics.jsonl, as they stand, without a last one that is cut off."""
    path = output / metrics.FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [record for record in found if "lm loss" in record]


def test_kill_it_anywhere(ranks: RankServer, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", MODEL)
    write_corpus(tmp_path / "corpus")

    def argv(output: Path, *more: str) -> list[str]:
        return [
            *("--hf-model", str(tmp_path / "hf"), "--data-path", str(tmp_path / "corpus")),
            *("--output-dir", str(output), "--seq-length", "32", "--micro-batch-size", "1"),
            *("--global-batch-size", "4", "--train-iters", str(STEPS), "--save-interval", "1"),
            *("--lr", "3e-3", "--warmup-steps", "2", "--seed", "11", "--keep-last", "2"),
            *("--tp", "2", "--hidden-dropout", "0.1", *more),
        ]

    begun = time.monotonic()
    ranks.run("tests.dist.jobs:train", 2, tmp_path / "a", argv=argv(tmp_path / "whole"))
    right = {row["iteration"]: row["lm loss"] for row in metrics.read(tmp_path / "whole")}
    assert len(right) == STEPS
    length = time.monotonic() - begun
    shutil.rmtree(tmp_path / "whole")

    rng, outcomes, kills = random.Random(3), Counter[str](), 0
    output, job = tmp_path / "run", tmp_path / "job"
    while kills < KILLS:
        before, seen = saved(output), len(rows(output))
        moment = length * rng.uniform(0.1, 1.0)
        way = rng.choice(["at once", "in the background"])
        more = ("--async-save",) if way == "in the background" else ()
        try:
            ranks.run("tests.dist.jobs:train", 2, job, argv=argv(output, *more), die_after=moment)
            killed = False
        except RankFailure as failure:
            killed = "exit status -9" in str(failure)
            assert killed, failure
        gone = time.monotonic()
        while left := ranks.left():
            assert time.monotonic() < gone + 20, left
            time.sleep(0.05)
        kills += killed
        new = rows(output)[seen:]
        if new:
            assert new[0]["iteration"] == before + 1, "from the last complete checkpoint"
        assert [r["lm loss"] for r in new] == [right[r["iteration"]] for r in new]
        after = saved(output)
        places = sorted(p.name for p in (output / "checkpoints").glob("iter_*"))
        half = set(places) - set(resume.steps(output / "checkpoints"))
        where = f"in a save {way}" if half else "in a step" if new else "before the first step"
        if killed:
            outcomes[where] += 1
            print(
                f"{kills:3} after {moment:5.2f} s of {length:.2f}, {where}: "
                f"{before} -> {after} of {STEPS} saved",
                flush=True,
            )
        if after:
            assert cli.call("ckpt", ["verify", str(output)]) == 0, "what the tracker names is whole"
        if not killed:
            assert after == STEPS and not half, places
            assert [r["lm loss"] for r in metrics.read(output)] == list(right.values())
            outcomes["finished with every loss right"] += 1
            shutil.rmtree(output)
    ranks.run("tests.dist.jobs:train", 2, job, argv=argv(output))
    assert [r["lm loss"] for r in metrics.read(output)] == list(right.values())
    print(f"{kills} kills, 0 wrong: {dict(outcomes)}")
