"""Before a run over several nodes: does every rank answer, and how fast are the ways between them?

Ranks find each other through torch's store, each pair of neighbouring nodes exchanges a few
megabytes rank by rank (gloo; NCCL too where there are GPUs), and rank 0 says in one line what came
of it. Everything has a time limit of its own, so that a rank that hangs is named and not waited
for. Nothing of it stays: the groups are made apart from those of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron_patch.launch.meeting import host_name
from megatron_patch.util import UserError, human_bytes

#: Bytes that a pair sends to and fro over gloo and over NCCL, and how often.
_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_TIMES = 3
#: A rank below this share of the median bandwidth is called slow.
_SLOW = 0.5
#: Up to so many ranks all of them talk over gloo, which connects each with each; else one a node.
_GLOO_RANKS = 64
#: Seconds after the first rank from which a late one is named.
_LATE = 5.0

#: Keeps rank 0's store alive where no torchrun holds it: the run connects to the same.
_STORES: list[Any] = []


@dataclass(frozen=True)
class Member:
    """A rank, and where it runs."""

    rank: int
    node: int
    host: str
    came: float

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, {self.host})"


@dataclass(frozen=True)
class Way:
    """What a pair of ranks of two nodes measured: bytes a second, seconds there and back."""

    first: int
    second: int
    bandwidth: float
    delay: float


def place() -> tuple[int, int, int, int]:
    """Rank, world size, local rank and ranks a node, as the launcher set them."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return rank, size, int(os.environ.get("LOCAL_RANK", rank % local_size)), local_size


def partners(rank: int, size: int, local_size: int) -> list[tuple[int, int]]:
    """Pairs that ``rank`` is in, in the order in which all ranks go through them.

    Nodes stand in a ring; first the even ones talk to the next, then the odd ones, then, where
    their number is odd, the last one with the first.
    """
    nodes = size // local_size
    ring = [(n, n + 1) for n in range(nodes - 1)]
    ring = ring[::2] + ring[1::2] + ([(nodes - 1, 0)] if nodes > 2 else [])
    local = rank % local_size
    pairs = [(a * local_size + local, b * local_size + local) for a, b in ring]
    return [pair for pair in pairs if rank in pair]


def describe(
    members: Sequence[Member], ways: Sequence[Way], kind: str, local_size: int
) -> tuple[str, list[str]]:
    """One line on the ways between nodes, and warnings about what is slow.

    A rank is as fast as its best way, so that a node beside a slow one is not taken for it.
    """
    pairs: dict[tuple[int, int], list[Way]] = {}
    for way in ways:
        nodes = (way.first // local_size, way.second // local_size)
        pairs.setdefault((min(nodes), max(nodes)), []).append(way)

    def words(pair: tuple[int, int]) -> str:
        total = sum(way.bandwidth for way in pairs[pair])
        delay = max(way.delay for way in pairs[pair])
        return f"{pair[0]}-{pair[1]} {human_bytes(total)}/s {delay * 1e3:.2f} ms"

    ordered = sorted(pairs, key=lambda pair: sum(way.bandwidth for way in pairs[pair]))
    shown = [words(pair) for pair in sorted(ordered[:8])]
    more = f" and {len(ordered) - 8} faster" if len(ordered) > 8 else ""
    line = f"between nodes ({kind}): {', '.join(shown)}{more}"
    if len(ordered) > 1:
        line += f"; slowest: nodes {ordered[0][0]} and {ordered[0][1]}"
    best: dict[int, float] = {}
    for way in ways:
        for rank in (way.first, way.second):
            best[rank] = max(best.get(rank, 0.0), way.bandwidth)
    usual = statistics.median(best.values())
    slow = [rank for rank in sorted(best, key=lambda r: best[r]) if best[rank] < _SLOW * usual]
    warnings = [
        f"warning: {members[rank]} is slow: {human_bytes(best[rank])}/s ({kind}), the median is "
        f"{human_bytes(usual)}/s; look at this node's network and what else runs there"
        for rank in slow[:4]
    ]
    return line, warnings


def late(members: Sequence[Member]) -> str | None:
    """The rank that came last, where the others had to wait for it."""
    first, last = min(m.came for m in members), max(members, key=lambda m: m.came)
    if last.came - first < _LATE:
        return None
    return f"warning: {last} came {last.came - first:.0f} s after the first rank"


class _Watch:
    """Ends the process where a stage does not end: some calls of NCCL know no time limit."""

    def __init__(self, limit: float, words: Callable[[str], str]) -> None:
        self.stage, self._words = "start", words
        self._timer = threading.Timer(limit, self._give_up)
        self._timer.daemon = True

    def __enter__(self) -> _Watch:
        self._timer.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._timer.cancel()

    def _give_up(self) -> None:
        print(f"error: {self._words(self.stage)}", file=sys.stderr, flush=True)
        os._exit(UserError.status)


def _store(limit: float) -> Any:
    """The store that torchrun or rank 0 holds.

    Raises:
        UserError: It cannot be reached.
    """
    import torch

    dist: Any = torch.distributed
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            host,
            port,
            None,
            not agents and place()[0] == 0,
            timedelta(seconds=limit),
            wait_for_workers=False,  # it does not say who is missing
            multi_tenant=not agents,  # the run makes another one at the same port
        )
    except RuntimeError as problem:
        raise UserError(
            f"rank {os.environ['RANK']} ({host_name(os.environ)}) does not reach the store of rank "
            f"0 at {host}:{port} within {limit:.0f} s: check MASTER_ADDR and MASTER_PORT, that "
            f"node 0 runs, and that the port is open ({str(problem).partition(chr(10))[0][:120]})"
        ) from None


def _roll_call(store: Any, me: Member, size: int, limit: float) -> list[Member]:
    """Everybody's name; rank 0 says who is missing, to all.

    Raises:
        UserError: Somebody is.
    """
    keys = [f"rank/{rank}" for rank in range(size)]
    store.set(keys[me.rank], json.dumps([me.node, me.host, me.came]))
    if me.rank == 0:
        verdict = ""
        with contextlib.suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=limit))
        missing = [rank for rank in range(size) if not store.check([keys[rank]])]
        if missing:
            hosts: dict[int, str] = {}
            for rank in set(range(size)) - set(missing):
                node, host, _ = json.loads(store.get(keys[rank]))
                hosts[node] = host
            local = place()[3]
            names = [
                f"rank {rank} (node {rank // local}, "
                f"{hosts.get(rank // local, 'of which no rank came')})"
                for rank in missing[:8]
            ]
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            verdict = (
                f"{', '.join(names)}{more} did not come within {limit:.0f} s, of {size} ranks; "
                "look at the log of that node, and whether it was started with the same NNODES "
                "and MASTER_ADDR"
            )
        store.set("verdict", verdict)
    try:
        store.wait(["verdict"], timedelta(seconds=limit + 15))
    except RuntimeError:
        raise UserError(
            f"rank 0 did not come within {limit + 15:.0f} s; this is {me}. Look at the log of "
            "node 0"
        ) from None
    if verdict := store.get("verdict").decode():
        raise UserError(verdict)
    rows = [json.loads(store.get(key)) for key in keys]
    return [Member(rank, *row) for rank, row in enumerate(rows)]


def _measure(group: Any, pairs: Sequence[tuple[int, int]], rank: int, tensor: Any) -> list[Way]:
    """Send ``tensor`` to and fro between the ranks of each pair; their first rank keeps time."""
    import torch

    def done(work: Any) -> None:
        work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize()

    found = []
    for first, second in pairs:
        other = second if rank == first else first
        best: dict[int, float] = {}
        for piece in (tensor[:1], tensor):
            for _ in range(_TIMES):
                begun = time.perf_counter()
                for sends in (rank == first, rank != first):
                    done((group.send if sends else group.recv)([piece], other, 0))
                took = time.perf_counter() - begun
                best[len(piece)] = min(took, best.get(len(piece), took))
        if rank == first:
            size = tensor.numel() * tensor.element_size()
            found.append(Way(first, second, 2 * size / best[len(tensor)], best[1]))
    return found


def _groups(store: Any, kinds: Sequence[str], limit: float) -> Iterator[tuple[str, Any, Any]]:
    """A group of all ranks over each kind of transport, and the tensor to send."""
    import torch

    dist: Any = torch.distributed

    rank, size, local, _ = place()
    for kind in kinds:
        apart = dist.PrefixStore(kind, store)
        if kind == "gloo":
            group: Any = dist.ProcessGroupGloo(apart, rank, size, timedelta(seconds=limit))
            tensor = torch.zeros(_BYTES[kind] // 4)
        else:
            torch.cuda.set_device(local)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=limit)
            group = dist.ProcessGroupNCCL(apart, rank, size, options)
            tensor = torch.zeros(_BYTES[kind] // 4, device="cuda")
            group.allreduce([tensor[:1]]).wait()
            torch.cuda.synchronize()
        yield kind, group, tensor
        if kind == "nccl":
            with contextlib.suppress(RuntimeError, AttributeError):
                group.shutdown()


def check(limit: float, device: str) -> list[str]:
    """Ask every rank, and time the ways between the nodes.

    Args:
        limit: Seconds until all have to be there, and once more for the measurement.
        device: ``cuda`` or ``cpu``.

    Returns:
        What rank 0 is to print; nothing on the other ranks.

    Raises:
        UserError: A rank is missing, or does not answer.
    """
    import torch

    dist: Any = torch.distributed

    rank, size, _, local_size = place()
    begun = time.monotonic()
    me = Member(rank, rank // local_size, host_name(os.environ), time.time())
    root = _store(limit)
    _STORES.append(root)
    store = dist.PrefixStore("megatron_patch/comm", root)
    members = _roll_call(store, me, size, limit)
    kinds = [*(["gloo"] if size <= _GLOO_RANKS else []), *(["nccl"] if device == "cuda" else [])]
    pairs = partners(rank, size, local_size)

    def stuck(stage: str) -> str:
        return (
            f"{me} got no further than {stage} within {limit:.0f} s, on the way to "
            f"{', '.join(str(members[r]) for p in pairs for r in p if r != rank)}: a firewall or a "
            "wrong network interface between them (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, "
            "NCCL_IB_HCA; NCCL_DEBUG=INFO says more); --comm-check 0 starts without looking"
        )

    lines = [f"{size} ranks on {size // local_size} nodes answer"]
    with _Watch(limit + 5, stuck) as watch:
        warnings = [line] if (line := late(members)) else []
        try:
            watch.stage = "gloo" if kinds[:1] == ["gloo"] else "NCCL"
            for kind, group, tensor in _groups(store, kinds, limit):
                ways = _measure(group, pairs, rank, tensor)
                store.set(f"ways/{kind}/{rank}", json.dumps([vars(way) for way in ways]))
                if rank == 0:
                    keys = [f"ways/{kind}/{r}" for r in range(size)]
                    store.wait(keys, timedelta(seconds=limit))
                    found = [Way(**way) for key in keys for way in json.loads(store.get(key))]
                    line, slow = describe(members, found, kind, local_size)
                    lines.append(line)
                    warnings += slow
                watch.stage = "NCCL"
        except RuntimeError as problem:
            first = str(problem).strip().partition("\n")[0][:160]
            raise UserError(f"{stuck(watch.stage)} ({first})") from problem
    if rank:
        return []
    return [f"{'; '.join(lines)} ({time.monotonic() - begun:.1f} s)", *warnings]
