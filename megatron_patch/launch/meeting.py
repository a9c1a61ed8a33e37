"""Nodes find each other before a run starts, and notice when one is lost while it runs.

Every node's launcher keeps one connection to node 0's, which listens on the master address and
port until all are there and then leaves the port to torchrun; the connections stay. Lines of JSON
go over them, empty ones as signs of life. Before the start node 0 names who is missing, who was
started with other numbers or flags, and whether all see one run directory: every rank writes its
own part of a checkpoint, so folders of their own would hold a part of it each.

Where a scheduler starts one process a rank, each of these is a member, otherwise each node.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGBUS, SIGKILL, SIGSEGV, SIGTERM
from typing import Any

from megatron_patch import __version__
from megatron_patch.launch.flags import Flags
from megatron_patch.launch.world import World
from megatron_patch.training.flags import flag_name, parse
from megatron_patch.util import RankLost, UserError

#: Seconds between two signs of life, and how long a silent member counts as alive.
BEAT, SILENCE = 5.0, 25.0
#: Seconds between two lines that say who is waited for.
_REPORT = 15.0
#: How long a file that another node has made may take to show up (network file systems).
_LOOK = 5.0
#: How long node 0 still answers late members after it gave up, and a member tries to be heard.
_LINGER = 3.0
_LONGEST_LINE = 1 << 20
#: Statuses that no other node can be the reason of: refused in words, Ctrl-C, killed from outside.
_OWN_DOING = frozenset({2, 130, *(128 + int(n) for n in (SIGKILL, SIGTERM, SIGSEGV, SIGBUS))})
#: Flags that name places, which may be another one on every node.
_PLACES = ("_path", "_dir", "_model", "hf_model", "init_from", "load")


def host_name(environ: Mapping[str, str]) -> str:
    """What people call this machine."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class News:
    """Another member has ended.

    Attributes:
        who: The member, in words.
        what: What became of it.
        status: Its own status, or ``RankLost``'s.
    """

    who: str
    what: str
    status: int

    def line(self) -> str:
        """The whole in one line."""
        return f"{self.who} {self.what}"


@dataclass
class _Peer:
    """The other end of a connection."""

    wire: socket.socket
    place: int = -1
    host: str = ""
    rest: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    ended: bool = False

    def send(self, message: Mapping[str, Any] | None = None) -> None:
        """A message, or a sign of life; what cannot be sent shows when nothing comes back."""
        line = (json.dumps(message) if message is not None else "") + "\n"
        with contextlib.suppress(OSError):
            self.wire.sendall(line.encode())

    def receive(self) -> list[dict[str, Any]]:
        """Whole messages that have arrived.

        Raises:
            OSError: The connection is gone.
            ValueError: This is no launcher.
        """
        chunk = self.wire.recv(1 << 16)
        if not chunk:
            raise ConnectionResetError("its connection was closed")
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if len(self.rest) > _LONGEST_LINE:
            raise ValueError("no launcher's message")
        found = [json.loads(line) for line in lines if line]
        if not all(isinstance(message, dict) for message in found):
            raise ValueError("no launcher's message")
        return found


@dataclass(frozen=True)
class Party:
    """This member, and how many there are.

    Attributes:
        world: Who takes part.
        host: This machine's name.
        limit: Seconds until all have to be there.
        flags: What was given: dest -> value as text.
        folder: The run directory.
        say: Prints a line for the user; called on node 0 only.
    """

    world: World
    host: str
    limit: float
    flags: Mapping[str, str]
    folder: Path
    say: Callable[[str], None] = print

    @property
    def count(self) -> int:
        """Members in all."""
        return self.world.size if self.world.rank else self.world.nodes

    @property
    def place(self) -> int:
        """This member's number."""
        return self.world.rank[0] if self.world.rank else self.world.node_rank

    def name(self, place: int, host: str = "") -> str:
        """``node 1 (gpu-b)``, or ``rank 9 (node 1, gpu-b)``."""
        node = place
        if self.world.rank:
            node = place // self.world.ranks_per_node
        host = host or (self.world.hosts[node] if node < len(self.world.hosts) else "")
        if self.world.rank:
            return f"rank {place} (node {node}{', ' + host if host else ''})"
        return f"node {place}{f' ({host})' if host else ''}"

    @property
    def address(self) -> str:
        """Where they meet."""
        return f"{self.world.master_addr}:{self.world.master_port}"


def given(flags: Flags) -> dict[str, str]:
    """A command line's settings, to compare those of two nodes."""
    return {dest: str(found.value) for dest, found in parse(flags.argv()).items()}


def _difference(flags: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first setting in which two nodes differ and must not: option and both values."""
    for dest in sorted({*flags, *other}):
        if dest.endswith(_PLACES) or flags.get(dest) == other.get(dest):
            continue
        values = [f"{flag_name(dest)} {side[dest]}" if dest in side else f"no {flag_name(dest)}"
                  for side in (flags, other)]  # fmt: skip
        return dest, values[0], values[1]
    return None


# --- the run directory ------------------------------------------------------------------------


def _marks(folder: Path) -> Path:
    return folder / "logs"


def _write_mark(folder: Path, token: str, place: int) -> str | None:
    """Leave a file for the others to see; what went wrong, or None."""
    try:
        _marks(folder).mkdir(parents=True, exist_ok=True)
        (_marks(folder) / f".seen-{token}-{place}").touch()
    except OSError as problem:
        return f"{problem.filename}: {problem.strerror}"
    return None


def _seen(folder: Path, token: str, wanted: set[int]) -> set[int]:
    """Whose files show up here."""
    end = time.monotonic() + _LOOK
    while True:
        names = [n for n in os.listdir(_marks(folder)) if n.startswith(f".seen-{token}-")]
        found = {int(name.rpartition("-")[2]) for name in names}
        if found >= wanted or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _remove_mark(folder: Path, token: str, place: int, *, stopped: bool = False) -> None:
    with contextlib.suppress(OSError):
        (_marks(folder) / f".seen-{token}-{place}").unlink(missing_ok=True)
        if stopped:  # folders that were made for it; others are not empty
            _marks(folder).rmdir()
            folder.rmdir()


# --- node 0 -----------------------------------------------------------------------------------


class _Stop(Exception):
    """Why there will be no run."""


def _listen(party: Party) -> socket.socket:
    port = party.world.master_port
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=1024,
        )
    except OSError as problem:
        raise UserError(
            f"port {port} of {party.host} cannot be listened on ({problem.strerror}): another run "
            f"may hold it. Give another --master-port (or MASTER_PORT), the same on every node"
        ) from problem


class _Host:
    """Node 0's side of the meeting."""

    def __init__(self, party: Party) -> None:
        self.party = party
        self.peers: dict[int, _Peer] = {}
        self._pending: dict[socket.socket, _Peer] = {}
        self._strangers: set[str] = set()
        self._listener = _listen(party)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def gather(self) -> None:
        """Wait for everybody.

        Raises:
            _Stop: Somebody is missing, or does not fit.
        """
        begun = time.monotonic()
        report, end = begun + _REPORT, begun + self.party.limit
        while len(self.peers) < self.party.count - 1:
            now = time.monotonic()
            if now >= end:
                raise _Stop(self._missing())
            if now >= report:
                self.party.say(
                    f"waiting for {self._absent()} at {self.party.address} "
                    f"({now - begun:.0f} of {self.party.limit:.0f} s)"
                )
                report += _REPORT
            for key, _ in self._selector.select(min(end, report) - now):
                self._serve(key.fileobj)

    def _serve(self, ready: Any) -> None:
        if ready is self._listener:
            wire, address = self._listener.accept()
            wire.settimeout(5)
            self._pending[wire] = _Peer(wire, host=str(address[0]).removeprefix("::ffff:"))
            self._selector.register(wire, selectors.EVENT_READ)
            return
        peer = self._pending.get(ready)
        if peer is None:
            peer = next(p for p in self.peers.values() if p.wire is ready)
        try:
            messages = peer.receive()
        except (OSError, ValueError) as problem:
            self._selector.unregister(peer.wire)
            peer.wire.close()
            self._pending.pop(peer.wire, None)
            if peer.place >= 0:
                # Started again before the others came: its next connection takes its place.
                del self.peers[peer.place]
            elif isinstance(problem, ValueError):
                self._strangers.add(peer.host)
            return
        for message in messages:
            if peer.place < 0 and not set(message) >= _HELLO:
                self._strangers.add(peer.host)
            elif peer.place < 0:
                self._admit(peer, message)

    def _admit(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Take in a member that fits; ``_Stop`` says what does not."""
        party, world = self.party, self.party.world
        place, host = int(message["place"]), str(message["host"])
        other, me = party.name(place, host), party.name(party.place, party.host)
        del self._pending[peer.wire]
        peer.place, peer.host = place, host
        taken = self.peers.get(place)
        if taken is not None:
            self.peers[-1 - place] = taken  # to be told, too
        self.peers[place] = peer
        if message.get("refused"):
            raise _Stop(f"{other} refuses the run: {message['refused']}")
        for key, mine, what in (
            ("nodes", world.nodes, "nodes (NNODES or --nnodes)"),
            ("ranks", world.ranks_per_node, "ranks a node (--nproc-per-node)"),
            ("device", world.device, "as its device (--device)"),
            ("version", __version__, "as version of megatron_patch"),
        ):
            if message[key] != mine:
                raise _Stop(
                    f"{other} was started with {message[key]} {what}, {me} with {mine}; these "
                    "must be the same on every node"
                )
        if taken is not None or place == party.place:
            also = taken.host if taken is not None else party.host
            raise _Stop(
                f"{party.name(place)} was started twice, on {also} and on {host}: give every node "
                "a NODE_RANK (or --node-rank) of its own"
            )
        if found := _difference(party.flags, message["flags"]):
            raise _Stop(
                f"{other} was started with {found[2]}, {me} with {found[1]}: start the same "
                "command on every node"
            )

    def _absent(self) -> str:
        here = {*self.peers, self.party.place}
        names = [self.party.name(n) for n in range(self.party.count) if n not in here]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more

    def _missing(self) -> str:
        party, world = self.party, self.party.world
        came = [party.name(n, p.host) for n, p in sorted(self.peers.items())]
        hints = [
            f"look at its terminal, and whether it was started with NNODES={world.nodes}, "
            f"MASTER_ADDR={world.master_addr} and MASTER_PORT={world.master_port}, and reaches "
            "that port"
        ]
        self._strangers |= {peer.host for peer in self._pending.values()}
        if self._strangers:
            callers = ", ".join(sorted(self._strangers))
            hints.append(f"something else than this launcher called from {callers}")
        hints.append(f"--comm-check {int(party.limit) * 5} waits longer")
        return (
            f"{self._absent()} did not come to {party.address} within {party.limit:.0f} s (here: "
            f"{', '.join([party.name(party.place, party.host), *came])}): {'; '.join(hints)}"
        )

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """Send a message to all and collect the answers.

        Raises:
            _Stop: One does not answer.
        """
        for peer in self.peers.values():
            peer.send(message)
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + seconds
        while len(answers) < len(self.peers):
            left = end - time.monotonic()
            silent = [n for n in self.peers if n not in answers]
            if left <= 0:
                peer = self.peers[silent[0]]
                raise _Stop(
                    f"{self.party.name(peer.place, peer.host)} does not answer "
                    f"({message['do']}, {seconds:.0f} s)"
                )
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._serve(self._listener)
                    continue
                found = [p for p in self.peers.values() if p.wire is key.fileobj]
                if not found:
                    self._serve(key.fileobj)
                    continue
                peer = found[0]
                try:
                    received = peer.receive()
                except (OSError, ValueError) as problem:
                    raise _Stop(
                        f"{self.party.name(peer.place, peer.host)} ended before the start"
                    ) from problem
                for answer in received:
                    answers[peer.place] = answer
        return answers

    def check_folder(self) -> None:
        """All members see one run directory.

        Raises:
            _Stop: They do not.
        """
        party, token, stopped = self.party, secrets.token_hex(4), True
        problem = _write_mark(party.folder, token, party.place)
        if problem:
            raise _Stop(problem)
        try:
            for place, answer in self.ask({"do": "write", "token": token}, 30).items():
                if answer.get("problem"):
                    raise _Stop(
                        f"{party.name(place, self.peers[place].host)} cannot write to the run "
                        f"directory: {answer['problem']}"
                    )
            everybody = {*self.peers, party.place}
            look = {"do": "look", "token": token, "wanted": sorted(everybody)}
            answers = self.ask(look, _LOOK + 30)
            views = {place: set(answer["seen"]) for place, answer in answers.items()}
            views[party.place] = _seen(party.folder, token, everybody)
            for place, seen in sorted(views.items()):
                if seen >= everybody:
                    continue
                hosts = {n: p.host for n, p in self.peers.items()} | {party.place: party.host}
                blind, unseen = place, min(everybody - seen)
                raise _Stop(
                    f"--output-dir {party.folder} is not the same folder on "
                    f"{party.name(unseen, hosts[unseen])} and {party.name(blind, hosts[blind])}: "
                    "every node would keep only its own part of each checkpoint, and no run could "
                    "go on from it. Give a folder on storage that all nodes share (a node's own "
                    "disk will do for runs on one node; data and --data-cache-path may be on it)"
                )
            stopped = False
        finally:
            _remove_mark(party.folder, token, party.place, stopped=stopped)

    def stop(self, reason: str) -> None:
        """Tell everybody, also those who come a moment later."""
        for peer in self.peers.values():
            peer.send({"stop": reason})
        told, end = set(self.peers), time.monotonic() + _LINGER
        while len(told) < self.party.count - 1 and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._serve(self._listener)
                    continue
                wire = key.fileobj
                assert isinstance(wire, socket.socket)
                self._selector.unregister(wire)
                late = self._pending.pop(wire, None)
                if late is not None:
                    late.send({"stop": reason})
                    told.add(-len(told) - 1)
        self.close()

    def close(self) -> None:
        """Leave the port to others; the members' connections stay."""
        self._selector.close()
        self._listener.close()
        for wire in self._pending:
            wire.close()


# --- the others -------------------------------------------------------------------------------


def _connect(party: Party, seconds: float) -> socket.socket:
    """A connection to node 0's launcher.

    Raises:
        UserError: There is none within the time; says what was tried and what happened.
    """
    world = party.world
    end = time.monotonic() + seconds
    why = ""
    while (left := end - time.monotonic()) > 0:
        try:
            return socket.create_connection(
                (world.master_addr, world.master_port), timeout=max(0.1, min(5, left))
            )
        except socket.gaierror as problem:
            why = f"{world.master_addr} is no known name on {party.host} ({problem.strerror})"
        except ConnectionRefusedError:
            why = f"nothing listens at {party.address}"
        except TimeoutError:
            why = f"{party.address} does not answer"
        except OSError as problem:
            why = f"{party.address} cannot be reached from {party.host} ({problem.strerror})"
        time.sleep(min(0.25, max(0.0, left)))
    raise UserError(
        f"{party.name(0)} was not found within {seconds:.0f} s: {why}. Look whether it was started "
        f"and what it says, whether MASTER_ADDR={world.master_addr} is the machine with node rank "
        f"0 and MASTER_PORT={world.master_port} is open there ("
        f"this is {party.name(party.place, party.host)} of {world.nodes}); --comm-check "
        f"{int(party.limit) * 5} waits longer"
    )


#: What a member says first.
_HELLO = frozenset({"place", "host", "nodes", "ranks", "device", "version", "flags", "refused"})


def _hello(party: Party, refused: str | None) -> dict[str, Any]:
    return {
        "place": party.place,
        "host": party.host,
        "nodes": party.world.nodes,
        "ranks": party.world.ranks_per_node,
        "device": party.world.device,
        "version": __version__,
        "flags": dict(party.flags),
        "refused": refused,
    }


def _join(party: Party) -> tuple[_Peer, dict[int, str]]:
    """Take part, on any member but the first: its connection, and everybody's host.

    Raises:
        UserError: There will be no run.
    """
    peer = _Peer(_connect(party, party.limit), place=0)
    # Node 0 may have come last, and then waits its own time.
    peer.wire.settimeout(party.limit + _LOOK + 60)
    peer.send(_hello(party, None))
    token = ""
    while True:
        try:
            messages = peer.receive()
        except (OSError, ValueError) as problem:
            _remove_mark(party.folder, token, party.place, stopped=bool(token))
            raise UserError(
                f"{party.name(0)} at {party.address} ended before the start, or is no launcher; "
                "its terminal says why"
            ) from problem
        for message in messages:
            if "stop" in message:
                _remove_mark(party.folder, token, party.place, stopped=bool(token))
                raise UserError(str(message["stop"]))
            if message["do"] == "write":
                token = message["token"]
                problem_there = _write_mark(party.folder, token, party.place)
                peer.send({"problem": problem_there})
            elif message["do"] == "look":
                seen = _seen(party.folder, message["token"], set(message["wanted"]))
                peer.send({"seen": sorted(seen)})
            else:
                _remove_mark(party.folder, token, party.place)
                hosts = {int(place): host for place, host in message["hosts"].items()}
                peer.host = hosts[0]
                return peer, hosts


def refuse(party: Party, reason: str) -> None:
    """Tell node 0 why this node cannot take part, so that the others do not wait for it."""
    if party.place == 0 or not party.limit:
        return
    try:
        with _connect(party, min(_LINGER, party.limit)) as wire:
            wire.settimeout(_LINGER)
            peer = _Peer(wire)
            peer.send(_hello(party, reason))
            peer.receive()
    except (UserError, OSError, ValueError):
        pass  # node 0 has found the same by itself


def meet(party: Party) -> Link:
    """Wait until everybody is there and fits; the connections stay open.

    Raises:
        UserError: Who is missing or does not fit, alike on every member that could be told.
    """
    if party.place:
        peer, hosts = _join(party)
        return Link(party, {0: peer}, hosts)
    begun = time.monotonic()
    host = _Host(party)
    try:
        host.gather()
        host.check_folder()
    except _Stop as reason:
        host.stop(str(reason))
        raise UserError(str(reason)) from None
    except BaseException:
        host.close()
        raise
    hosts = {0: party.host} | {place: peer.host for place, peer in host.peers.items()}
    for peer in host.peers.values():
        peer.send({"do": "go", "hosts": hosts})
    host.close()
    names = [party.name(place, name) for place, name in sorted(hosts.items())]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    party.say(f"all here after {time.monotonic() - begun:.1f} s, with one run directory: {shown}")
    return Link(party, host.peers, hosts)


# --- while the run lasts ----------------------------------------------------------------------


class Link:
    """Open connections to the other members: node 0 has all, the others have one to node 0."""

    def __init__(self, party: Party, peers: dict[int, _Peer], hosts: Mapping[int, str]) -> None:
        self._party, self._peers, self._hosts = party, peers, hosts
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._came = threading.Event()
        #: The first that became of another member.
        self.news: News | None = None

    def watch(self, on_news: Callable[[News], None]) -> None:
        """Begin to look after the others.

        Args:
            on_news: Called once, in another thread, when a member has failed or is lost.
        """
        self._thread = threading.Thread(target=self._run, args=(on_news,), daemon=True)
        self._thread.start()

    def _run(self, on_news: Callable[[News], None]) -> None:
        beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for peer in self._peers.values():
                peer.heard = beat
                peer.wire.settimeout(2)
                selector.register(peer.wire, selectors.EVENT_READ, peer)
            while not self._done.is_set() and selector.get_map():
                for key, _ in selector.select(0.5):
                    if not self._hear(key.data, on_news):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now >= beat:
                    beat = now + BEAT
                    for peer in self._alive():
                        peer.send()
                for peer in self._alive():
                    if now - peer.heard > SILENCE:
                        selector.unregister(peer.wire)
                        self._lost(peer, f"no sign of life for {SILENCE:.0f} s", on_news)

    def _alive(self) -> Iterator[_Peer]:
        return (peer for peer in self._peers.values() if not peer.ended)

    def _hear(self, peer: _Peer, on_news: Callable[[News], None]) -> bool:
        """Take what a member says; False when it has said its last."""
        try:
            messages = peer.receive()
        except (OSError, ValueError):
            if not peer.ended:
                self._lost(peer, "its connection broke off", on_news)
            return False
        for message in messages:
            if "news" in message:
                self._tell(News(**message["news"]), on_news, but=peer.place)
            elif "ended" in message:
                peer.ended = True
                status, error = int(message["ended"]), message.get("error")
                if status:
                    what = f"ended with status {status}{f': {error}' if error else ''}"
                    if status > 128:
                        what = f"is lost: its processes were ended by signal {status - 128}"
                        status = RankLost.status
                    self._tell(News(self._name(peer), what, status), on_news, but=peer.place)
        return True

    def _name(self, peer: _Peer) -> str:
        return self._party.name(peer.place, self._hosts.get(peer.place, peer.host))

    def _lost(self, peer: _Peer, why: str, on_news: Callable[[News], None]) -> None:
        peer.ended = True
        self._tell(
            News(self._name(peer), f"is lost: {why}", RankLost.status), on_news, but=peer.place
        )

    def _tell(self, news: News, on_news: Callable[[News], None], but: int) -> None:
        if self.news is not None:
            return
        if self._party.place == 0:
            message = {"who": news.who, "what": news.what, "status": news.status}
            for peer in self._alive():
                if peer.place != but:
                    peer.send({"news": message})
        self.news = news
        self._came.set()
        on_news(news)

    def finish(self, status: int, error: str | None, patience: float) -> News | None:
        """Tell the others how this member ended, and end.

        Args:
            status: This member's status.
            error: Its error line.
            patience: Seconds to wait for what became of others, where this one's failure may be
                the consequence of theirs.

        Returns:
            What became of another member, or None where nothing is known.
        """
        if status and status not in _OWN_DOING:
            self._came.wait(patience)
        news = self.news  # what comes after this member's own end is not its reason
        for peer in self._peers.values():
            peer.send({"ended": status, "error": error})
        self._done.set()
        if self._thread is not None:
            self._thread.join(5)
        for peer in self._peers.values():
            peer.wire.close()
        return news
