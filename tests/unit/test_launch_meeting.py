"""Nodes meet, refuse what does not fit, and notice each other's end; over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.launch import meeting
from megatron_patch.launch.flags import Flags
from megatron_patch.launch.meeting import Link, News, Party, meet
from megatron_patch.launch.world import World
from megatron_patch.util import UserError


@pytest.fixture(autouse=True)
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_LINGER", 0.3)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def party(tmp_path: Path) -> Callable[..., Party]:
    port = free_port()

    def make(k: int, n: int = 2, *, limit: float = 10, **changes: Any) -> Party:
        own = {key: changes.pop(key) for key in ("flags", "folder") if key in changes}
        world = World("torchrun", n, k, 1, "127.0.0.1", port, "cpu")
        base = Party(world, f"gpu-{k}", limit, {"lr": "1"}, tmp_path / "run", lambda _: None)
        return replace(base, world=replace(world, **changes), **own)

    return make


def together(*parties: Party) -> list[Link | str]:
    """What comes of it for each: a link, or the words of its refusal."""

    def one(party: Party) -> Link | str:
        try:
            return meet(party)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(parties)) as pool:
        return list(pool.map(one, parties))


def links(found: list[Link | str]) -> list[Link]:
    assert all(isinstance(link, Link) for link in found), found
    return [link for link in found if isinstance(link, Link)]


def test_all_meet_and_the_port_is_free_for_torchrun(party: Any, tmp_path: Path) -> None:
    found = links(together(*(party(k, 3) for k in range(3))))
    with socket.create_server(("", party(0).world.master_port)):
        pass  # although the connections are still open
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["run", "run/logs"]
    assert [link.finish(0, None, 0) for link in found] == [None] * 3


def test_who_is_missing_is_named(party: Any) -> None:
    lines: list[str] = []
    here = [replace(party(k, 4, limit=0.5, hosts=tuple("wxyz")), say=lines.append) for k in (0, 2)]
    first, second = together(*here)
    assert first == second
    assert str(first).startswith("node 1 (x), node 3 (z) did not come to 127.0.0.1:")
    assert "(here: node 0 (gpu-0), node 2 (gpu-2))" in str(first) and "NNODES=4" in str(first)
    assert not here[0].folder.exists(), "nothing is written"


def test_waiting_is_said(party: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_REPORT", 0.2)
    lines: list[str] = []
    together(replace(party(0, limit=0.5), say=lines.append))
    assert [line.partition(" at ")[0] for line in lines] == ["waiting for node 1"] * 2


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("no-such-host.invalid", "no-such-host.invalid is no known name on gpu-1"),
        ("127.0.0.1", "nothing listens at 127.0.0.1:"),
        ("192.0.2.1", "192.0.2.1:"),
    ],
)
def test_a_master_that_is_not_there(party: Any, address: str, words: str) -> None:
    begun = time.monotonic()
    (said,) = together(party(1, limit=0.6, master_addr=address))
    assert time.monotonic() - begun < 5
    assert str(said).startswith("node 0 was not found within") and words in str(said)
    assert f"MASTER_ADDR={address}" in str(said) and "node 1 (gpu-1) of 2" in str(said)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 3}, "node 1 (gpu-1) was started with 3 nodes (NNODES or --nnodes), node 0"),
        ({"ranks_per_node": 4}, "with 4 ranks a node (--nproc-per-node), node 0 (gpu-0) with 1"),
        ({"device": "cuda"}, "with cuda as its device"),
        (
            {"flags": {"lr": "2"}},
            "node 1 (gpu-1) was started with --lr 2, node 0 (gpu-0) with --lr",
        ),
        ({"flags": {}}, "was started with no --lr"),
    ],
)
def test_nodes_that_do_not_fit(party: Any, change: dict[str, Any], words: str) -> None:
    first, second = together(party(0), party(1, **change))
    assert first == second and words in str(first)


def test_places_may_differ(party: Any) -> None:
    other = {"lr": "1", "data_cache_path": "/scratch/b", "hf_model": "/local/model"}
    for link in links(together(party(0), party(1, flags=other))):
        link.finish(0, None, 0)


def test_one_rank_twice(party: Any) -> None:
    first, *others = together(party(0, 3), party(1, 3), party(1, 3))
    assert "node 1 was started twice, on gpu-1 and on gpu-1" in str(first)
    assert others == [first, first]


def test_a_node_that_refuses_is_heard(party: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, party(0))
        meeting.refuse(party(1), "no/such.idx is not on this machine")
        (said,) = first.result()
    assert said == "node 1 (gpu-1) refuses the run: no/such.idx is not on this machine"


def test_folders_of_their_own_are_refused(
    party: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_LOOK", 0.3)
    first, second = together(party(0), party(1, folder=tmp_path / "other disk"))
    assert first == second
    assert "is not the same folder on node 1 (gpu-1) and node 0 (gpu-0)" in str(first)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_folder_that_cannot_be_made(party: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = together(party(0), party(1, folder=tmp_path / "file" / "run"))
    assert first == second and "node 1 (gpu-1) cannot write to the run directory" in str(first)


def test_a_stranger_on_the_port_does_no_harm(party: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, party(0, limit=0.8))
        time.sleep(0.2)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff\n", b"{}\n", b"[1]\n", b""):
            with socket.create_connection(("127.0.0.1", party(0).world.master_port)) as wire:
                wire.sendall(words)
        (said,) = first.result()
    assert "something else than this launcher called from 127.0.0.1" in str(said)


def test_a_port_that_is_taken(party: Any) -> None:
    with socket.create_server(("", party(0).world.master_port)):
        (said,) = together(party(0))
    assert "cannot be listened on" in str(said) and "--master-port" in str(said)


def test_one_process_a_rank(party: Any) -> None:
    here = [party(k // 2, ranks_per_node=2, rank=(k, k % 2)) for k in range(4)]
    found = links(together(*here))
    heard: list[News] = []
    found[0].watch(heard.append)
    found[3].finish(1, "no memory", 0)
    found[0].finish(1, None, 5)
    assert [news.line() for news in heard] == [
        "rank 3 (node 1, gpu-1) ended with status 1: no memory"
    ]


def watched(found: list[Link]) -> list[list[News]]:
    news: list[list[News]] = [[] for _ in found]
    for link, heard in zip(found, news, strict=True):
        link.watch(heard.append)
    return news


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_connection_that_breaks_off_is_a_lost_node_everywhere(party: Any, gone: int) -> None:
    found = links(together(*(party(k, 3) for k in range(3))))
    stay = [k for k in range(3) if k != gone]
    news = watched([found[k] for k in stay])
    for peer in found[gone]._peers.values():
        peer.wire.shutdown(socket.SHUT_RDWR)
    until(lambda: all(news))
    assert [heard[0].line() for heard in news] == [
        f"node {gone} (gpu-{gone}) is lost: its connection broke off"
    ] * 2
    assert {heard[0].status for heard in news} == {75}
    assert [found[k].finish(137, None, 0) for k in stay] == [heard[0] for heard in news]


def test_silence_is_a_loss(party: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = links(together(party(0), party(1)))
    monkeypatch.setattr(meeting, "SILENCE", 0.5)
    (heard,) = watched(found[:1])
    until(lambda: bool(heard))  # the other one is never watched, so it gives no sign
    assert "no sign of life" in heard[0].what


def test_signs_of_life(party: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = links(together(party(0), party(1)))
    monkeypatch.setattr(meeting, "BEAT", 0.1)
    monkeypatch.setattr(meeting, "SILENCE", 0.6)
    news = watched(found)
    time.sleep(1.2)
    assert news == [[], []]
    assert [link.finish(0, None, 0) for link in found] == [None, None]


@pytest.mark.parametrize(
    ("status", "error", "words", "mine"),
    [
        (137, None, "is lost: its processes were ended by signal 9", 75),
        (2, "the data ends early", "ended with status 2: the data ends early", 2),
        (75, "this rank has lost", "ended with status 75: this rank has lost", 75),
    ],
)
def test_how_another_node_ended(
    party: Any, status: int, error: str | None, words: str, mine: int
) -> None:
    found = links(together(*(party(k, 3) for k in range(3))))
    news = watched(found)
    found[1].finish(status, error, 0)
    until(lambda: bool(news[0] and news[2]))
    assert {heard[0].line() for heard in (news[0], news[2])} == {f"node 1 (gpu-1) {words}"}
    assert news[2][0].status == mine


def test_a_node_that_fails_because_of_another_is_no_news(party: Any) -> None:
    """Nodes 0 and 2 fail at once, by the killing of node 1's ranks, which is told a bit later."""
    found = links(together(*(party(k, 3) for k in range(3))))
    news = watched(found)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(found[k].finish, s, "gone", 5) for k, s in ((0, 75), (2, 1))]
        time.sleep(0.2)
        assert found[1].finish(137, None, 5) is None
        lines = {news.line() for w in waiting if (news := w.result())}
    assert lines == {"node 1 (gpu-1) is lost: its processes were ended by signal 9"}


def test_a_run_that_ends_well_is_no_news(party: Any) -> None:
    before = set(threading.enumerate())
    found = links(together(*(party(k, 3) for k in range(3))))
    news = watched(found)
    for link in found:
        assert link.finish(0, None, 0) is None
    assert news == [[], [], []]
    until(lambda: set(threading.enumerate()) <= before)


def test_settings_are_compared_by_meaning() -> None:
    one = meeting.given(Flags(("--lr", "1e-5"), ("--max_steps", "7")))
    two = meeting.given(Flags((), ("--train-iters=7", "--learning-rate", "0.00001")))
    assert meeting._difference(one, two) is None
