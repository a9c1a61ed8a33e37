"""Ranks of two and three made-up nodes answer each other before a run, or are named."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from megatron_patch.training import comm
from megatron_patch.training.comm import Member, Way
from megatron_patch.util import UserError
from tests.dist.harness import RankServer


def ask(
    rank: int, size: int, directory: Path, local: int, limit: float, absent: list[int]
) -> dict[str, Any]:
    """Job: the check; ranks of `absent` never come, or come (negative) and then say no more."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(local), "SLURMD_NODENAME": "gpu-a"}
    begun = time.monotonic()
    try:
        if rank in absent:
            return {}
        if -rank in absent and rank:
            comm._groups = lambda *_: time.sleep(3) or iter(())  # type: ignore[assignment]
        lines = comm.check(limit, "cpu")
    except UserError as error:
        return {"error": str(error), "took": time.monotonic() - begun}
    return {"lines": lines, "took": time.monotonic() - begun}


def test_every_way_is_timed(ranks: RankServer, tmp_path: Path) -> None:
    job = "tests.dist.test_comm:ask"
    found = ranks.run(job, 4, tmp_path / "4", local=2, limit=20, absent=[]).values
    (line,) = found[0]["lines"]
    print(line)
    assert line.startswith("4 ranks on 2 nodes answer; between nodes (gloo): 0-1 ")
    assert "iB/s" in line and " ms (" in line
    assert [f["lines"] for f in found[1:]] == [[], [], []]
    assert max(f["took"] for f in found) < 10


def test_a_rank_that_does_not_come_is_named_on_all(ranks: RankServer, tmp_path: Path) -> None:
    job = "tests.dist.test_comm:ask"
    found = ranks.run(job, 4, tmp_path, local=2, limit=1, absent=[1, 2, 3]).values
    assert found[0]["error"].startswith(
        "rank 1 (node 0, gpu-a), rank 2 (node 1, of which no rank came), rank 3 (node 1, of which "
        "no rank came) did not come within 1 s, of 4 ranks; look at the log of that node"
    )
    assert found[0]["took"] < 5


def test_a_rank_that_hangs_is_named(ranks: RankServer, tmp_path: Path) -> None:
    job = "tests.dist.test_comm:ask"
    found = ranks.run(job, 2, tmp_path, local=1, limit=1, absent=[-1]).values
    words = found[0]["error"]
    assert words.startswith("rank 0 (node 0, gpu-a) got no further than gloo within 1 s")
    assert "on the way to rank 1 (node 1, gpu-a)" in words and "GLOO_SOCKET_IFNAME" in words


def members(size: int, local: int, **came: float) -> list[Member]:
    return [Member(r, r // local, f"gpu-{r // local}", came.get(f"r{r}", 0)) for r in range(size)]


def test_the_slow_rank_is_named_not_its_neighbour() -> None:
    pairs = sorted({pair for rank in range(8) for pair in comm.partners(rank, 8, 2)})
    assert pairs == [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 0), (7, 1)]
    ways = [Way(*pair, 1e8 if 5 in pair else 1e9, 1e-4) for pair in pairs]
    line, warnings = comm.describe(members(8, 2), ways, "nccl", 2)
    assert "0-1 1.9 GiB/s 0.10 ms" in line and "slowest: nodes 1 and 2" in line
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: rank 5 (node 2, gpu-2) is slow: 95.4 MiB/s (nccl)")


def test_pairs_meet_in_one_order_whatever_the_number_of_nodes() -> None:
    """Each rank goes through its own list: two must never wait for each other in a circle."""
    for nodes in range(2, 9):
        left = {r: comm.partners(r, nodes, 1) for r in range(nodes)}
        while any(left.values()):
            ready = [p for p in left.values() if p and all(left[r][:1] == p[:1] for r in p[0])]
            assert ready, (nodes, left)
            for first, second in {p[0] for p in ready}:
                left[first].pop(0)
                left[second].pop(0)


def test_a_late_rank_is_named() -> None:
    assert comm.late(members(4, 2, r1=3.0)) is None
    words = "warning: rank 3 (node 1, gpu-1) came 21 s after the first rank"
    assert comm.late(members(4, 2, r3=21.0)) == words
