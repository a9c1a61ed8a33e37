"""Node 0's address is tried with sockets before torchrun waits for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron_patch.launch import reach
from megatron_patch.launch.world import World
from megatron_patch.util import UserError

#: RFC 2606 keeps this name from ever resolving.
NOWHERE = "head.invalid"
SECOND = World("torchrun", 2, 1, 1, "127.0.0.1", 29500, "cpu")
FIRST = replace(SECOND, node_rank=0)


@pytest.fixture
def port() -> Iterator[int]:
    """One that something listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refused(world: World, patience: float = 0.3) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        reach.require_meeting_point(world, patience=patience, say=lambda line: None)
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("node", [0, 1])
def test_a_name_that_does_not_resolve_is_refused_at_once(node: int) -> None:
    words, seconds = refused(replace(SECOND, master_addr=NOWHERE, node_rank=node), patience=60)
    assert f"node {node} cannot resolve" in words and repr(NOWHERE) in words
    assert "--master-addr" in words and "MASTER_ADDR" in words
    assert seconds < 20


def test_a_pods_name_may_come_later(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    asked: list[str] = []
    real = socket.getaddrinfo

    def late(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        return real("127.0.0.1" if len(asked) > 1 else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    pod = replace(SECOND, env="dlc", master_addr=NOWHERE, master_port=port)
    said: list[str] = []
    reach.require_meeting_point(pod, patience=30, say=said.append)
    assert len(asked) == 2 and len(said) == 1 and NOWHERE in said[0]


def test_a_pods_name_that_never_comes_is_refused() -> None:
    words, seconds = refused(replace(SECOND, env="dlc", master_addr=NOWHERE), patience=0.5)
    assert "cannot resolve" in words and seconds >= 0.5


def test_a_host_that_listens_or_will_is_reached(port: int) -> None:
    reach.require_meeting_point(replace(SECOND, master_port=port))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: a connection is turned away
        reach.require_meeting_point(replace(SECOND, master_port=taken.getsockname()[1]))


class Silent(socket.socket):
    """A network that swallows what is sent to it, as a firewall does."""

    def connect(self, address: Any) -> None:
        raise TimeoutError("timed out")


def test_a_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", Silent)
    words, seconds = refused(replace(SECOND, master_addr="192.0.2.1"), patience=0.5)
    assert "cannot reach node 0 at 192.0.2.1:29500" in words
    assert "--no-check" in words and 0.5 <= seconds < 5


def test_node_0_names_a_port_that_is_taken(port: int) -> None:
    words, _ = refused(replace(FIRST, master_port=port))
    assert f"cannot listen on port {port}" in words and "--master-port" in words


def test_node_0_names_an_address_that_is_not_its_own() -> None:
    said: list[str] = []
    with socket.socket() as free:
        free.bind(("", 0))
        number = free.getsockname()[1]
    reach.require_meeting_point(replace(FIRST, master_port=number), say=said.append)
    assert not said
    elsewhere = replace(FIRST, master_addr="192.0.2.1", master_port=number)
    reach.require_meeting_point(elsewhere, say=said.append)
    assert len(said) == 1 and "192.0.2.1 is not an address of this machine" in said[0]


def test_one_node_and_other_ranks_of_a_node_ask_nothing() -> None:
    reach.require_meeting_point(replace(SECOND, nodes=1, master_addr=NOWHERE))
    reach.require_meeting_point(replace(SECOND, rank=(3, 1), master_addr=NOWHERE))
