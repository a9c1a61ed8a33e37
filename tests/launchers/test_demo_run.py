"""The embedded demo for real, cut short: trained, interrupted, gone on with, extended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "qwen3/run_mcore_qwen.sh"
FLAGS = ("--demo", "--train-iters", "6", "--save-interval", "2", "--eval-interval", "100")


def steps(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [r["iteration"] for r in records if not {"evaluation", "event"} & r.keys()]


@pytest.mark.slow
def test_demo_is_interrupted_goes_on_and_is_extended(place: Any) -> None:
    run = place.cwd / "runs" / "demo-qwen3"
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"

    # Stopped as a scheduler does it, as soon as a checkpoint is there: saved once more, and ended.
    process = subprocess.Popen(
        ["bash", str(ROOT / "examples" / SCRIPT), *FLAGS],
        env={"PATH": os.defpath, "HOME": str(place.cwd), "MP_PYTHON": sys.executable},
        cwd=place.cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not tracker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    saved = int(tracker.read_text())
    assert 2 <= saved < 6
    first_log = (run / "logs" / "node0.log").read_text()

    done = place.run(SCRIPT, *FLAGS, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert f"the run stopped at step {saved}; it goes on to step 6" in done.stdout
    assert tracker.read_text().strip() == "6"
    assert sorted(set(steps(run))) == [1, 2, 3, 4, 5, 6]
    log = (run / "logs" / "node0.log").read_text()
    assert log.startswith(first_log) and len(log) > len(first_log)
    assert (place.cwd / "logs" / "demo-qwen3").resolve() == run
    for name in ("loss.png", "resolved_args.json", "env.json", "tensorboard"):
        assert (run / name).exists(), name
    assert "Next:" in done.stdout and "lm loss" in done.stdout

    done = place.run(SCRIPT, *FLAGS, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "had finished at step 6; its schedule is extended by 6 steps, to 12" in done.stdout
    assert tracker.read_text().strip() == "12"
    assert steps(run)[-6:] == [7, 8, 9, 10, 11, 12]
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {
        r["iteration"]: r["lm loss"] for r in losses if "evaluation" not in r and "lm loss" in r
    }
    assert by_step[12] < by_step[6] < by_step[1]
