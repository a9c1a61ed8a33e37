"""Two launchers, each a node, before anything starts; the rest is tests/dist/test_two_nodes.py."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dist.tiny import write_corpus

QWEN3 = "qwen3/run_mcore_qwen.sh"


@pytest.fixture
def start(place: Any, tmp_path: Path) -> Any:
    """Starts one node with its own working directory, and returns how it ended."""
    write_corpus(tmp_path / "corpus")
    with socket.socket() as s:
        s.bind(("", 0))
        port = str(s.getsockname()[1])

    def node(k: int, *flags: str, **environ: str) -> Any:
        cwd = tmp_path / f"node {k}"
        cwd.mkdir(exist_ok=True)
        common = ("--hf-model", str(place.model), "--data-path", str(tmp_path / "corpus"))
        return replace(place, cwd=cwd).run(
            *(QWEN3, *common, "--seq-length", "64", "--train-iters", "3", *flags),
            **{
                "NNODES": "2",
                "NODE_RANK": str(k),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "SLURMD_NODENAME": f"gpu-{'ab'[k]}",
                **environ,
            },
        )

    return node


def test_a_node_that_does_not_come(start: Any, tmp_path: Path) -> None:
    done = start(0, "--comm-check", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: node 1 did not come to 127.0.0.1:")
    assert "(here: node 0 (gpu-a))" in done.stderr and "NNODES=2" in done.stderr
    assert list((tmp_path / "node 0").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ((), {}, "--output-dir runs/Tiny $HOME is not the same folder on node"),
        (("--lr", "3"), {}, "node 1 (gpu-b) was started with --lr 3.0, node 0 (gpu-a) with --lr"),
        (("--data-path", "none"), {}, "node 1 (gpu-b) refuses the run: none.idx is not on this"),
        ((), {"NNODES": "3"}, "node 1 (gpu-b) was started with 3 nodes (NNODES or --nnodes)"),
    ],
    ids=["own disks", "flags", "data", "NNODES"],
)
def test_nodes_that_do_not_fit(
    start: Any, tmp_path: Path, flags: tuple[str, ...], environ: dict[str, str], words: str
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(start, 0, "--comm-check", "30")
        done = [start(1, "--comm-check", "30", *flags, **environ), first.result()]
    assert [d.returncode for d in done] == [2, 2], [d.stdout + d.stderr for d in done]
    assert words in done[1].stderr
    assert all(d.stderr.count("error: ") == 1 and "Traceback" not in d.stderr for d in done)
    assert "is not on this" in done[0].stderr or done[0].stderr == done[1].stderr
    assert not list(tmp_path.glob("node */runs/*")), "nothing is left behind"


@pytest.mark.slow
def test_a_launchers_own_defaults_count_in_the_index(start: Any, tmp_path: Path) -> None:
    done = start(0, "--data-index", "--device", "cpu", NNODES="1", NODE_RANK="0")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "in runs/Tiny $HOME/cache after" in done.stdout
    assert "3 sequences of 64" in done.stdout
