"""torchrun itself, from another working directory, as a user starts it; and when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_patch.training import metrics
from tests.dist.tiny import COMMON, write_corpus, write_model

pytestmark = pytest.mark.slow
STEPS = 60


def processes_naming(text: str) -> list[int]:
    """Live processes with `text` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if text.encode() in line and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def test_two_ranks_killed_and_started_again(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    small = {"num_hidden_layers": 2, "model_type": "qwen3", "tie_word_embeddings": True}
    model = write_model(tmp_path / "hf", COMMON | small)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    output = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megatron_patch.pretrain", "--hf-model", str(model)),
        # Relative, as a user types it.
        *("--data-path", "../corpus", "--output-dir", str(output)),
        *("--seq-length", "64", "--micro-batch-size", "4", "--global-batch-size", "8"),
        *("--train-iters", str(STEPS), "--save-interval", "20", "--lr", "1e-2"),
        *("--warmup-steps", "5", "--seed", "11"),
    ]

    with open(tmp_path / "first.log", "wb") as log:
        job = subprocess.Popen(command, cwd=elsewhere, stdout=log, stderr=subprocess.STDOUT)
    try:
        tracker = output / "checkpoints" / "latest_checkpointed_iteration.txt"
        deadline = time.monotonic() + 300
        while not tracker.exists():
            assert job.poll() is None, (tmp_path / "first.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.05)
        ranks = [p for p in processes_naming(str(output)) if p != job.pid]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert job.wait(timeout=120) != 0
        assert not processes_naming(str(output)), "a process outlived the job"
    finally:
        job.kill()
        job.wait()

    again = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "holds a checkpoint: the run goes on from it" in again.stdout
    assert not processes_naming(str(output))

    rows = metrics.read(output)
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    last = [row["lm loss"] for row in rows[-5:]]
    print(f"{rows[0]['lm loss']:.3f} -> {sum(last) / 5:.3f}")
    assert sum(last) / 5 < rows[0]["lm loss"] - 1.0, "the corpus is learnable"
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert all(p.stat().st_size for p in (output / "tensorboard").glob("events.out.tfevents.*"))
    assert len(list((output / "tensorboard").glob("events.out.tfevents.*"))) == 2
    assert (output / "checkpoints" / f"iter_{STEPS:07}" / ".metadata").exists()
    assert tracker.read_text() == str(STEPS)
    assert json.loads((output / "resolved_args.json").read_text())["world_size"] == 2
    assert "megatron-core" in (output / "env.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "corpus.bin", "corpus.idx", "elsewhere", "first.log", "hf", "run",
    ]  # fmt: skip
    assert not list(elsewhere.iterdir()), "nothing is written to the working directory"
