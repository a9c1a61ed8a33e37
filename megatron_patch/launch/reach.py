"""Whether the nodes can meet: node 0's name, its port, the way there.

torchrun and torch.distributed wait a quarter of an hour for an address that is wrong, and end in a
traceback. This is found out before they start, with sockets alone.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable

from megatron_patch.launch.world import World
from megatron_patch.util import UserError

#: Seconds that another node is tried for, and that Kubernetes may take to publish a name.
PATIENCE = 60.0
_ONE_TRY = 5.0

_Address = tuple[socket.AddressFamily, tuple[object, ...]]


def require_meeting_point(
    world: World, *, patience: float = PATIENCE, say: Callable[[str], None] = print
) -> None:
    """Check node 0's address as far as this node can; nothing on one node alone.

    A host that is up but does not listen is no error: node 0 may start later, and torchrun waits.

    Args:
        world: Who takes part.
        patience: Seconds to try for.
        say: Takes the lines that tell what is waited for.

    Raises:
        UserError: the name does not resolve, the host cannot be reached, or, on node 0, the port is
            taken.
    """
    if world.nodes == 1 or (world.rank is not None and world.rank[1] != 0):
        return
    deadline = time.monotonic() + patience
    addresses = _resolve(world, deadline, say)
    if world.node_rank == 0:
        _require_free(world)
        if not any(map(_is_here, addresses)):
            say(
                f"note: {world.master_addr} is not an address of this machine, which is node 0; "
                "unless it is forwarded here, no node will find it (--master-addr, MASTER_ADDR)"
            )
        return
    _require_reachable(world, addresses, deadline, patience)


def _resolve(world: World, deadline: float, say: Callable[[str], None]) -> list[_Address]:
    host, told = world.master_addr, False
    while True:
        try:
            found = socket.getaddrinfo(host, world.master_port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            # A pod's name comes with the pod, and a name server may be busy; elsewhere a name that
            # is not known now will not be known in a minute.
            passing = world.env == "dlc" or getattr(error, "errno", None) == socket.EAI_AGAIN
            if not passing or time.monotonic() >= deadline:
                raise UserError(
                    f"node {world.node_rank} cannot resolve the address of node 0, {host!r} "
                    f"({reason}): give a name or an IP address that every node knows "
                    "(--master-addr, MASTER_ADDR)"
                ) from None
            if not told:
                say(f"the name of node 0, {host}, is not known here yet; waiting for it")
                told = True
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        else:
            return list({(family, where): None for family, _, _, _, where in found})


def _is_here(address: _Address) -> bool:
    family, where = address
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((where[0], 0, *where[2:]))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _require_free(world: World) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", world.master_port))
        except OSError as error:
            raise UserError(
                f"node 0 cannot listen on port {world.master_port} ({error.strerror}): another "
                "run on this machine may have it; give every node another --master-port "
                "(MASTER_PORT)"
            ) from None


def _require_reachable(
    world: World, addresses: list[_Address], deadline: float, patience: float
) -> None:
    while True:
        problems = []
        for family, where in addresses:
            left = max(0.1, deadline - time.monotonic())
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(min(_ONE_TRY, left))
                try:
                    probe.connect(where)
                except ConnectionRefusedError:
                    return  # the host is there
                except OSError as error:
                    problems.append(error.strerror or "no answer")
                    continue
                with contextlib.suppress(OSError):
                    probe.shutdown(socket.SHUT_RDWR)
                return
        if time.monotonic() >= deadline:
            raise UserError(
                f"node {world.node_rank} cannot reach node 0 at {world.master_addr}:"
                f"{world.master_port} ({problems[-1]}, tried for {patience:.0f} s): check the "
                "address, the network and the firewall between them (--master-addr, MASTER_ADDR, "
                "--master-port); --no-check goes on without this"
            )
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
