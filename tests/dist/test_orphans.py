"""kill -9 of the launcher, of torchrun or of one rank: nothing that the run started is left.

Everything below carries a mark in its environment: ranks, workers of data loaders, writers of
checkpoints and their queues, and the probes of the machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from megatron_patch.training import metrics
from tests.dist.tiny import COMMON, write_corpus, write_model

pytestmark = pytest.mark.slow

#: Seconds until nothing is left. torchrun gives ranks 30 to follow its SIGTERM.
LIMITS = {"launcher": 10, "torchrun": 15, "rank": 50}


def marked(mark: str) -> dict[int, str]:
    """Live processes with `mark` in their environment: id -> command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            dead = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            if not dead and mark.encode() in (folder / "environ").read_bytes():
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(folder.name)] = line
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


@pytest.mark.parametrize("victim", LIMITS)
def test_nothing_is_left(victim: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    small = {"num_hidden_layers": 2, "model_type": "qwen3", "tie_word_embeddings": True}
    model = write_model(tmp_path / "hf", COMMON | small)
    mark = f"MARK_OF_A_TEST={uuid.uuid4()}"
    name, value = mark.split("=")
    argv = [
        *("--hf-model", str(model), "--data-path", str(tmp_path / "corpus")),
        *("--output-dir", str(tmp_path / "run"), "--seq-length", "32", "--lr", "1e-3"),
        *("--global-batch-size", "4", "--train-iters", "100000", "--save-interval", "5"),
        *("--keep-last", "1", "--async-save", "--num-workers", "2", "--gpus-per-node", "2"),
    ]
    root = Path(__file__).resolve().parents[2]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron_patch.launch",
                "run",
                "pretrain",
                "run.sh",
                "0",
                *argv,
            ],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(root), name: value},
        )
    try:
        deadline = time.monotonic() + 200
        done = tmp_path / "run" / metrics.FILE
        while not done.exists() or len(metrics.read(done)) < 7:
            assert launcher.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        before = marked(mark)
        agents = [p for p, line in before.items() if "torch" in line and "--nproc-per-node" in line]
        ranks = [
            p
            for p, line in before.items()
            if "megatron_patch.pretrain" in line and "--nproc-per-node" not in line
        ]
        assert len(agents) == 1 and len(ranks) >= 2 + 4, (
            f"two ranks with two workers each: {before}"
        )
        started = [p for p in ranks if os.getpgid(p) == p or _parent(p) == agents[0]]
        target = {"launcher": launcher.pid, "torchrun": agents[0], "rank": max(started)}[victim]
        os.kill(target, signal.SIGKILL)
        begun = time.monotonic()
        launcher.wait(LIMITS[victim] + 5)
        while left := marked(mark):
            assert time.monotonic() < begun + LIMITS[victim], left
            time.sleep(0.05)
        print(
            f"\nkill -9 of {victim}: {len(before)} processes, none left after "
            f"{time.monotonic() - begun:.1f} s, status {launcher.returncode}"
        )
        if victim == "rank":
            assert launcher.returncode == 128 + signal.SIGKILL
    finally:
        for process in marked(mark):
            os.kill(process, signal.SIGKILL)
        launcher.wait()


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
