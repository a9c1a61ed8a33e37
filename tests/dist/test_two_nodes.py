"""Two nodes that share nothing but the run directory train, one of them is lost, the run goes on.

Each is a launcher of its own with its own home, temporary folder, working directory and caches;
`pytest -m slow -s tests/dist/test_two_nodes.py` prints what their terminals show.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import COMMON, write_corpus, write_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "examples/qwen3/run_mcore_qwen.sh"
STEPS = 40


class Nodes:
    """The same command on two made-up nodes."""

    def __init__(self, place: Path, flags: list[str]) -> None:
        self.place, self.flags, self.starts = place, flags, 0

    def start(self, *, steps: int = STEPS) -> list[subprocess.Popen[bytes]]:
        """Start both, node 1 first; each one's terminal is the file of its start."""
        with socket.socket() as s:
            s.bind(("", 0))
            port = s.getsockname()[1]
        self.starts += 1
        jobs = []
        for k in (1, 0):
            own = self.place / f"node{k}"
            environ = {
                "PATH": os.environ["PATH"],
                "MP_PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "NNODES": "2",
                "NODE_RANK": str(k),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "SLURMD_NODENAME": f"gpu-{'ab'[k]}",
            }
            for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
                (own / name).mkdir(parents=True, exist_ok=True)
                environ[name] = str(own / name)
            (own / "here").mkdir(exist_ok=True)
            with open(self.terminal(k), "wb") as terminal:
                jobs.append(
                    subprocess.Popen(
                        ["bash", str(LAUNCHER), *self.flags, "--train-iters", str(steps)],
                        env=environ,
                        cwd=own / "here",
                        stdin=subprocess.DEVNULL,
                        stdout=terminal,
                        stderr=subprocess.STDOUT,
                    )
                )
        return jobs[::-1]

    def terminal(self, k: int) -> Path:
        """What node k showed at the last start."""
        return self.place / f"start{self.starts}-node{k}.txt"

    def show(self) -> None:
        """Print what of the terminals is about the nodes, the steps and the end."""
        telling = re.compile(
            r"megatron_patch|world:|this is|all here|waiting|> \d+ ranks|> finished|> lm loss|"
            r"error|the whole|>.*(checkpoint|goes on)| \[?.*iteration +(\d*[05]|11) ?[|/]"
        )
        for k in (0, 1):
            lines = self.terminal(k).read_text(errors="replace").splitlines()
            told = [line[:200] for line in lines if telling.match(line)]
            print(f"\n--- start {self.starts}, terminal of node {k}", *told, sep="\n")


def tree(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    write_corpus(tmp_path / "corpus")
    small = {"num_hidden_layers": 2, "model_type": "qwen3", "tie_word_embeddings": True}
    model = write_model(tmp_path / "hf", COMMON | small)
    return Nodes(
        tmp_path,
        [
            *("--hf-model", str(model), "--data-path", str(tmp_path / "corpus")),
            # Each node's working directory is its own, and so is this cache.
            *("--output-dir", str(tmp_path / "run"), "--data-cache-path", "index"),
            *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
            *("--save-interval", "10", "--lr", "1e-3", "--warmup-steps", "5", "--seed", "11"),
        ],
    )


def wait_for_step(nodes: Nodes, job: subprocess.Popen[bytes], step: int) -> None:
    end = time.monotonic() + 300
    rows = nodes.place / "run" / metrics.FILE
    while not rows.exists() or rows.read_text().count("\n") < step:
        assert job.poll() is None, nodes.terminal(0).read_text()[-3000:]
        assert time.monotonic() < end, "no step"
        time.sleep(0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [1, 0])
@pytest.mark.parametrize("what", ["agent", "machine", "frozen"])
def test_a_lost_node_is_named_and_the_run_goes_on(
    nodes: Nodes, ranks: RankServer, lost: int, what: str
) -> None:
    """The agent (torchrun) and its ranks are killed, all of the machine is, or it falls silent."""
    jobs = nodes.start()
    try:
        wait_for_step(nodes, jobs[0], 14)
        victims, other = tree(jobs[lost]), tree(jobs[1 - lost])
        if what == "machine":
            jobs[lost].kill()
        if what == "frozen":
            jobs[lost].send_signal(signal.SIGSTOP)
        for process in victims:
            process.suspend() if what == "frozen" else process.kill()
        begun = time.monotonic()
        status = jobs[1 - lost].wait(timeout=60)
        took = time.monotonic() - begun
        if what == "frozen":
            jobs[lost].kill()
            for process in victims:
                process.kill()
        killed = jobs[lost].wait(timeout=60)
    finally:
        for job in jobs:
            job.kill()
    nodes.show()
    print(f"\nnode {1 - lost} ended {took:.1f} s after node {lost} was lost, status {status}")
    assert (status, killed) == (75, 137 if what == "agent" else -signal.SIGKILL)
    shown = nodes.terminal(1 - lost).read_text()
    (line,) = [x for x in shown.splitlines() if x.startswith(f"error: node {lost}")]
    assert line.startswith(f"error: node {lost} (gpu-{'ab'[lost]}) is lost: ")
    assert "Traceback" not in shown
    psutil.wait_procs([*victims, *other], timeout=10)
    assert not alive([*victims, *other]), "a process outlived the run"

    jobs = nodes.start()
    assert [job.wait(timeout=300) for job in jobs] == [0, 0], nodes.terminal(0).read_text()[-2000:]
    nodes.show()
    shown = nodes.terminal(0).read_text()
    assert "holds a checkpoint: the run goes on from it" in shown
    assert all(list((nodes.place / f"node{k}/here/index").rglob("*.npy")) for k in (0, 1))
    steps = [int(n) for n in re.findall(r"^ iteration (\d+) \| lm", shown, re.M)]
    print("steps of the second start on node 0's terminal:", steps[:3], "...", steps[-3:])
    assert steps[0] == 11 and steps[-1] == STEPS

    resumed = [row["lm loss"] for row in metrics.read(nodes.place / "run")]
    argv = [*nodes.flags, "--train-iters", str(STEPS), "--output-dir", str(nodes.place / "whole")]
    argv += ["--data-cache-path", str(nodes.place / "index")]
    ranks.run("tests.dist.jobs:train", 2, nodes.place / "job", argv=argv)
    right = [row["lm loss"] for row in metrics.read(nodes.place / "whole")]
    assert len(right) == STEPS and resumed == right, "every loss of both starts is the right one"
    print(f"{STEPS} losses equal an uninterrupted run's: {right[0]:.6f} -> {right[-1]:.6f}")
