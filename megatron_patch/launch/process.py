"""This node's command line, and running it under a text log."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.launch.flags import Flags
from megatron_patch.launch.meeting import Link
from megatron_patch.launch.world import Machine, World
from megatron_patch.util import die_with

#: How much of the output is kept to find the error in; torchrun's report is a few kilobytes.
_TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class Command:
    """A command line and what it changes in the environment."""

    argv: tuple[str, ...]
    set: Mapping[str, str]
    unset: tuple[str, ...] = ()

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` with the changes applied."""
        changed = {k: v for k, v in environ.items() if k not in self.unset}
        return {**changed, **self.set}

    def shell(self) -> str:
        """The same as one shell line to copy and paste."""
        parts = [f"{k}={v}" for k, v in sorted(self.set.items())]
        drops = [p for name in self.unset for p in ("-u", name)]
        return shlex.join([*(["env", *drops] if drops or parts else []), *parts, *self.argv])


def interpreter(environ: Mapping[str, str]) -> str:
    """The Python that trains: this one, or the one that a real call would first make."""
    return environ.get("MP_LATER_PYTHON") or sys.executable


def _torchrun(environ: Mapping[str, str]) -> list[str]:
    """``torchrun`` of the training interpreter, not whichever comes first on PATH."""
    python = interpreter(environ)
    beside = Path(python).with_name("torchrun")
    if beside.is_file() or "MP_LATER_PYTHON" in environ:
        return [str(beside)]
    return [python, "-m", "torch.distributed.run"]


def build_command(
    world: World, entry: str, flags: Flags, environ: Mapping[str, str], machine: Machine
) -> Command:
    """The line that starts this node's ranks: torchrun, or one plain process per rank."""
    settings = {
        # The working directory must not shadow modules: people keep a `data/` or `types.py` there.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if "PYTHONPATH" in environ:
        # Each launcher in a chain adds the checkout; once is enough.
        folders = dict.fromkeys(environ["PYTHONPATH"].split(os.pathsep))
        settings["PYTHONPATH"] = os.pathsep.join(folders)
    if world.device == "cpu" and "OMP_NUM_THREADS" not in environ:
        # torchrun would set 1 and leave the other cores idle.
        settings["OMP_NUM_THREADS"] = str(max(1, machine.cores // world.ranks_per_node))
    if (
        world.device == "cuda"
        and machine.capability < 10  # from Blackwell on, Megatron-Core no longer asks for it
        and "CUDA_DEVICE_MAX_CONNECTIONS" not in environ
        and not (flags.get("use_megatron_fsdp") or flags.get("use_torch_fsdp2"))
    ):
        # Communication of tensor and context parallelism overlaps only in launch order.
        settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    module = f"megatron_patch.{entry}"
    if world.rank is not None:
        settings |= {
            "RANK": str(world.rank[0]),
            "LOCAL_RANK": str(world.rank[1]),
            "WORLD_SIZE": str(world.size),
            "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
            "MASTER_ADDR": world.master_addr,
            "MASTER_PORT": str(world.master_port),
        }
        return Command((interpreter(environ), "-m", module, *flags.argv()), settings)
    if world.nodes == 1 and not world.master_port:
        place = ["--standalone", "--nnodes", "1"]
    else:
        place = ["--nnodes", str(world.nodes), "--node-rank", str(world.node_rank)]
        place += ["--master-addr", world.master_addr, "--master-port", str(world.master_port)]
    argv = [*_torchrun(environ), *place, "--nproc-per-node", str(world.ranks_per_node)]
    # torchrun takes PET_* as defaults of flags that are not given, such as another rendezvous.
    stale = tuple(sorted(k for k in environ if k.startswith("PET_")))
    return Command((*argv, "-m", module, *flags.argv()), settings, stale)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    #: The last ``error: ...`` line of its output, which torchrun's report may have buried.
    error: str | None
    #: Whether somebody pressed Ctrl-C (or sent SIGINT).
    interrupted: bool = False


#: What torchrun says about itself, and what its last word begins with: how a rank ended. After it
#: come a traceback of torchrun's own and a frame around the same figures.
_TORCHRUN = re.compile(rb"[WE]\d{4} .*torch/distributed/(elastic/|run\.py)")
_RANK_ENDED = re.compile(rb"E\d{4} .*torch/distributed/elastic/.*failed \(exitcode: (-?\d+)\)")


class _Console:
    """The child's output for the terminal; the log keeps what is left out here.

    Left out is torchrun's talk about processes, and after Ctrl-C everything but our own lines.
    """

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        self._interrupted = interrupted
        self._rest = b""
        #: Whether the beginning of the present line has been shown.
        self._begun = False
        #: Status of the rank that ended the others, as torchrun gives it.
        self.rank_status: int | None = None

    def feed(self, chunk: bytes) -> bytes:
        """The part of ``chunk``, and of lines begun before it, that is to be shown."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        shown = b""
        for line in lines:
            # What follows a beginning that is on the screen already goes there too.
            shown += line + b"\n" if self._begun or self._show(line) else b""
            self._begun = False
        # A progress bar is a line without an end: it is shown at once, unless it may be torchrun's.
        rest = self._rest
        if rest and (self._begun or (rest[:1] not in (b"W", b"E") and self._show(rest))):
            shown, self._rest, self._begun = shown + rest, b"", True
        return shown

    def end(self) -> bytes:
        """What is left once the output has ended."""
        return self._rest if self._rest and self._show(self._rest) else b""

    def _show(self, line: bytes) -> bool:
        ended = _RANK_ENDED.match(line)
        if ended and self.rank_status is None:
            self.rank_status = int(ended[1])
        if self.rank_status is not None or _TORCHRUN.match(line):
            return False
        return not self._interrupted() or line.startswith((b"> ", b"error: "))


def _notify(pid: int) -> bool:
    """SIGTERM for the ranks below torchrun's process; False where there is none yet."""
    import psutil

    told = False
    try:
        for process in psutil.Process(pid).children():
            if any(word.startswith("megatron_patch") for word in process.cmdline()):
                process.terminate()
                told = True
    except psutil.Error:
        pass  # it ended at this moment
    return told


#: Seconds for this node's ranks to end by themselves, and say at which step, once another node has.
GRACE = 10.0


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    """End a command and all below it: ranks wait for a lost one for as long as NCCL lets them."""
    import psutil

    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    with contextlib.suppress(psutil.Error):
        tree = psutil.Process(child.pid)
        for process in [*tree.children(recursive=True), tree]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def supervise(
    command: Command, environ: Mapping[str, str], log: Path | None, link: Link | None = None
) -> Outcome:
    """Run ``command``, copy its output to stdout and append it to ``log``.

    The child ends with this process, however that ends (``kill -9``), and torchrun's ranks with
    it. It gets its own process group and every terminating signal that reaches this process, so
    a scheduler's notice, Ctrl-C and ``kill`` all act the same. The first SIGTERM or SIGUSR1 goes to
    the ranks as SIGTERM: they save and end by themselves, where torchrun would give them 30 seconds
    (SIGTERM) or die and leave them (SIGUSR1). Killed by signal N gives 128 + N; a rank's own status
    comes through torchrun, which has none but 1. Should another member of ``link`` fail or be
    lost, the child is ended too.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if child is None or child.poll() is not None:
            return
        if number in (signal.SIGTERM, signal.SIGUSR1) and len(received) == 1 and _notify(child.pid):
            return
        child.send_signal(number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    previous = {number: signal.signal(number, forward) for number in handled}
    sink = log.open("ab", buffering=0) if log is not None else None
    tail = bytearray()
    console = _Console(lambda: signal.SIGINT in received)
    try:
        child = subprocess.Popen(
            command.argv,
            env=command.environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )
        if link is not None:
            started = child
            link.watch(
                lambda _: threading.Thread(target=_end, args=(started, GRACE), daemon=True).start()
            )
        for number in received:  # a signal between the two lines above
            child.send_signal(number)
        pipe = child.stdout
        assert pipe is not None

        def copy() -> None:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                if sink is not None:
                    sink.write(chunk)
                tail.extend(chunk)
                del tail[:-_TAIL_BYTES]
                show(console.feed(chunk))
            show(console.end())

        def show(text: bytes) -> None:
            try:
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
            except (BrokenPipeError, ValueError):
                pass  # nobody reads the terminal any more; the log still does

        reader = threading.Thread(target=copy, daemon=True)
        reader.start()
        status = child.wait()
        # A process that outlives its parent may keep the pipe open for ever.
        reader.join(timeout=5)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if sink is not None:
            sink.close()
    errors = re.findall(r"^(?:\[[^\]]*\]:?\s*)?error: (.+)$", tail.decode(errors="replace"), re.M)
    interrupted = signal.SIGINT in received
    if status == 1 and interrupted:
        status = -signal.SIGINT  # torchrun ends by an exception of its own
    elif status == 1 and console.rank_status is not None:
        status = console.rank_status  # torchrun knows 1 only
    status = 128 - status if status < 0 else status
    return Outcome(status, errors[-1] if errors else None, interrupted)
