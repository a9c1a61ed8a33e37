"""Where am I, how many of us are there, and what is to be run: the launchers' logic.

``examples/_lib.sh`` hands a launcher's defaults and the user's flags over, and this module

1. detects the environment (single node, torchrun, DLC, Slurm, MPI) as a pure function of the
   process environment, the flags and a probe of the machine (``detect``),
2. checks the resolved plan before anything is started,
3. runs ``torchrun -m megatron_patch.pretrain`` under a text log, or only shows it (``--dry-run``).

Standard library only, so that help, refusals and dry runs answer at once, anywhere.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_patch import __version__
from megatron_patch.training import args
from megatron_patch.util import UserError

ENVIRONMENTS = ("single", "torchrun", "dlc", "slurm", "mpi")
DEFAULT_PORT = 29500

# ---------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------

#: Launcher flags that take a value: spelling -> field of ``Options``. All others go on.
_VALUE_FLAGS = {
    "--env": "env",
    "--nnodes": "nodes",
    "--num-nodes": "nodes",
    "--node-rank": "node_rank",
    "--nproc-per-node": "ranks_per_node",
    "--num-gpus-per-node": "ranks_per_node",
    "--gpus-per-node": "ranks_per_node",
    "--master-addr": "master_addr",
    "--master-port": "master_port",
    "--hostfile": "hostfile",
}
_SWITCHES = {"--dry-run": "dry_run", "--demo": "demo", "--no-check": "no_check"}
_NUMBERS = frozenset({"nodes", "node_rank", "ranks_per_node", "master_port"})
#: They do not say what to train, so a call with nothing else still means the demo.
_NEUTRAL = frozenset({"--env", "--dry-run", "--no-check"})


@dataclass(frozen=True)
class Options:
    """The launcher's own flags; None where not given."""

    env: str | None = None
    nodes: int | None = None
    node_rank: int | None = None
    ranks_per_node: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    hostfile: str | None = None
    dry_run: bool = False
    demo: bool = False
    no_check: bool = False
    given: frozenset[str] = frozenset()


def _is_flag(token: str) -> bool:
    return token.startswith("--") and len(token) > 2


def split_flags(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Separate the launcher's own flags from those that go on to training, order kept.

    Raises:
        UserError: a launcher flag without a value, with one that is not a number where one is
            needed, or given twice with different values.
    """
    found: dict[str, object] = {}
    spelled: dict[str, str] = {}
    rest: list[str] = []
    given: set[str] = set()
    tokens = list(argv)
    i = 0
    while i < len(tokens):
        token = tokens[i]
        i += 1
        name, equals, value = token.partition("=")
        name = name.replace("_", "-") if _is_flag(token) else name
        if name in _SWITCHES:
            if equals:
                raise UserError(f"{name} takes no value, got {token!r}")
            found[_SWITCHES[name]] = True
            given.add(name)
        elif name in _VALUE_FLAGS:
            if not equals:
                if i == len(tokens):
                    raise UserError(f"{name} needs a value")
                value = tokens[i]
                i += 1
            key = _VALUE_FLAGS[name]
            parsed: object = value
            if key in _NUMBERS:
                if not value.isdecimal():
                    raise UserError(f"{name} needs a whole number, got {value!r}")
                parsed = int(value)
            if key in found and found[key] != parsed:
                raise UserError(
                    f"{spelled[key]} {found[key]} and {name} {value} contradict each other; "
                    "give one of them"
                )
            found[key], spelled[key] = parsed, name
            given.add(name)
        else:
            rest.append(token)
    options = Options(**found, given=frozenset(given))  # type: ignore[arg-type]
    if options.env is not None and options.env not in ENVIRONMENTS:
        raise UserError(f"--env {options.env}: choose from {', '.join(ENVIRONMENTS)}")
    for name, number in (("--nnodes", options.nodes), ("--nproc-per-node", options.ranks_per_node)):
        if number == 0:
            raise UserError(f"{name} must be at least 1")
    return options, rest


@dataclass(frozen=True)
class Flags:
    """Training flags: a launcher's defaults and the user's, which win."""

    defaults: tuple[str, ...]
    user: tuple[str, ...]
    #: Given by the launcher itself and stronger than the user's, such as an extended run's length.
    final: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """One command line; the mark tells the parser where the stronger flags begin."""
        argv = list(self.defaults)
        for stronger in (self.user, self.final):
            if stronger:
                argv += [args.USER_FLAGS_MARK, *stronger] if argv else stronger
        return argv

    def get(self, dest: str) -> Any:
        """The value that ``dest`` ends up with on this command line, None where it is not given.

        Raises:
            UserError: a flag that nobody knows, or one that cannot be read.
        """
        found = args.parse(self.argv()).get(dest)
        return found.value if found is not None else None


# ---------------------------------------------------------------------------------------------
# The machine and the environment
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a probe found on this node."""

    cores: int
    gpus: int
    #: Major compute capability of the first GPU, 0 when unknown.
    capability: int = 0
    expand_hosts: Callable[[str], list[str]] = field(default=lambda text: expand_hostlist(text))


@dataclass(frozen=True)
class World:
    """Who takes part. The same on every node, but for ``node_rank`` and ``rank``."""

    env: str
    nodes: int
    node_rank: int
    ranks_per_node: int
    master_addr: str
    master_port: int
    device: str  # "cuda" | "cpu"
    #: Set when a scheduler started one process per rank: (global rank, local rank), no torchrun.
    rank: tuple[int, int] | None = None
    #: True where only this process was started so far, and srun must start the other nodes.
    needs_srun: bool = False
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.nodes * self.ranks_per_node

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all: node 0, and rank 0 where there is one per rank."""
        return self.node_rank == 0 and (self.rank is None or self.rank[0] == 0)

    def line(self) -> str:
        """One line that must be the same on every node."""
        kind = "GPU" if self.device == "cuda" else "CPU"
        return (
            f"world: {self.nodes} node{'s' * (self.nodes > 1)} x {self.ranks_per_node} {kind} "
            f"rank{'s' * (self.ranks_per_node > 1)} = {self.size}, "
            f"master {self.master_addr}:{self.master_port or 'any free port'}, env {self.env}"
        )


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's compact list: ``gpu[01-03,7],login`` -> gpu01 gpu02 gpu03 gpu7 login.

    Used where ``scontrol`` is missing, as in most containers.
    """
    hosts: list[str] = []
    # Commas inside brackets do not separate hosts.
    for part in re.findall(r"(?:[^,\[]+|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            if literal:
                expanded = [head + literal for head in expanded]
                continue
            numbers: list[str] = []
            for piece in ranges.split(","):
                low, dash, high = piece.partition("-")
                if dash:
                    numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
                else:
                    numbers.append(low)
            expanded = [head + n for head in expanded for n in numbers]
        hosts += expanded
    return hosts


def _scontrol_hosts(text: str) -> list[str]:
    if shutil.which("scontrol"):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()
    return expand_hostlist(text)


def probe(environ: Mapping[str, str]) -> Machine:
    """Look at this machine: usable cores, and NVIDIA devices whether or not CUDA comes up.

    ``CUDA_VISIBLE_DEVICES`` is the user's word on how many count; an empty one hides them all.
    """
    cores = _quota(len(os.sched_getaffinity(0)))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [v.strip() for v in visible.split(",")]
        # CUDA stops at the first entry that it does not know; -1 is the customary one.
        gpus = next((i for i, v in enumerate(names) if v in ("", "-1")), len(names))
    else:
        gpus = _nvidia_devices()
    return Machine(cores, gpus, _capability() if gpus else 0, _scontrol_hosts)


def _quota(cores: int) -> int:
    """``cores`` bounded by the container's CPU quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _nvidia_smi(*arguments: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _nvidia_devices() -> int:
    listed = sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))
    # A driver that does not answer still leaves its device files: such a machine is no CPU machine.
    return listed or len([p for p in glob.glob("/dev/nvidia*") if re.search(r"nvidia\d+$", p)])


def _capability() -> int:
    for line in _nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader"):
        major = line.strip().partition(".")[0]
        if major.isdecimal():
            return int(major)
    return 0


class _Environ:
    """Typed reads from the process environment, with errors that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """Value of the first of ``names`` that is set and not empty."""
        return next((v for n in names if (v := self._environ.get(n, "").strip())), None)

    def number(self, *names: str) -> int | None:
        """The same as a whole number."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if not value:
                continue
            if not value.isdecimal():
                raise UserError(f"the environment has {name}={value!r}, a whole number is expected")
            return int(value)
        return None

    def need(self, env: str, *names: str) -> int:
        """A number that environment ``env`` cannot do without."""
        value = self.number(*names)
        if value is None:
            raise UserError(
                f"--env {env} needs the environment variable {' or '.join(names)}, which is not "
                "set here; start the launcher under that scheduler or choose another --env"
            )
        return value


def guess_environment(environ: Mapping[str, str], options: Options) -> str:
    """Name of the environment, innermost starter first: mpirun inside a Slurm job is MPI."""
    read = _Environ(environ)
    if options.env is not None:
        return options.env
    if read.text("OMPI_COMM_WORLD_SIZE"):
        return "mpi"
    if read.text("SLURM_JOB_ID", "SLURM_JOBID"):
        return "slurm"
    if read.text("PMI_SIZE") and read.text("PMI_RANK"):
        return "mpi"
    if read.text("TORCHELASTIC_RUN_ID"):
        raise UserError(
            "this process is itself a torchrun worker (TORCHELASTIC_RUN_ID is set). Start the "
            "launcher without torchrun, it starts torchrun itself; or say --env single"
        )
    if read.text("PET_NNODES", "NNODES"):
        return "torchrun"
    if read.text("WORLD_SIZE") and read.text("RANK") and not read.text("LOCAL_RANK"):
        return "dlc"
    if (options.nodes or 1) > 1:
        return "torchrun"
    return "single"


def detect(
    environ: Mapping[str, str], options: Options, machine: Machine, device: str | None = None
) -> World:
    """Work out the world of this call. Reads nothing but its arguments.

    Args:
        environ: Process environment.
        options: The launcher's flags; they override what the environment says.
        machine: What ``probe`` found.
        device: "cuda" or "cpu" where the user gave ``--device``.

    Raises:
        UserError: what is found contradicts itself or leaves a node's place open.
    """
    env = guess_environment(environ, options)
    reader = {
        "single": _single,
        "torchrun": _torchrun,
        "dlc": _dlc,
        "slurm": _slurm,
        "mpi": _mpi,
    }[env]
    read = _Environ(environ)
    found = reader(read, options, machine)
    gpus = _declared_gpus(env, environ, machine)
    if device is None:
        device = "cuda" if gpus else "cpu"
    ranks = found.ranks_per_node or options.ranks_per_node or _declared_ranks(read)
    if not ranks:
        ranks = gpus if device == "cuda" and gpus else 1
    world = replace(
        found,
        ranks_per_node=ranks,
        device=device,
        nodes=options.nodes if options.nodes is not None else found.nodes,
        node_rank=options.node_rank if options.node_rank is not None else found.node_rank,
        master_addr=options.master_addr or found.master_addr,
        master_port=options.master_port or found.master_port,
    )
    return _validated(world, options, machine)


def _validated(world: World, options: Options, machine: Machine) -> World:
    if world.nodes > 1:
        if world.node_rank < 0:
            raise UserError(
                f"--nnodes {world.nodes} needs --node-rank 0 ... {world.nodes - 1}, another one on "
                "each node (or the environment variable NODE_RANK)"
            )
        if not world.master_addr or world.master_addr in ("localhost", "127.0.0.1"):
            raise UserError(
                f"{world.nodes} nodes need the address of node 0, the same on every node: give "
                "--master-addr HOST or set MASTER_ADDR"
                + (f" (it is {world.master_addr} here)" if world.master_addr else "")
            )
    world = replace(
        world,
        node_rank=max(world.node_rank, 0),
        master_addr=world.master_addr or "localhost",
        master_port=world.master_port or (DEFAULT_PORT if world.nodes > 1 or world.rank else 0),
    )
    if world.node_rank >= world.nodes:
        raise UserError(
            f"node rank {world.node_rank} does not exist among {world.nodes} nodes, which count "
            f"from 0 to {world.nodes - 1}; check --node-rank and --nnodes"
        )
    if world.rank is not None and options.ranks_per_node not in (None, world.ranks_per_node):
        raise UserError(
            f"--nproc-per-node {options.ranks_per_node} contradicts the {world.ranks_per_node} "
            f"processes a node that were started ({world.env}); start one process a node, or leave "
            "the flag out"
        )
    if world.device == "cuda" and machine.gpus and world.ranks_per_node > machine.gpus:
        message = (
            f"{world.ranks_per_node} ranks on this node but only {machine.gpus} GPUs are visible "
            "(--nproc-per-node, CUDA_VISIBLE_DEVICES)"
        )
        if not options.dry_run:
            raise UserError(message)
        world = replace(world, notes=(*world.notes, f"a real call would stop: {message}"))
    return world


def _declared_gpus(env: str, environ: Mapping[str, str], machine: Machine) -> int:
    """GPUs of this node: the machine's, or what the scheduler says when it cannot be probed."""
    if machine.gpus or "CUDA_VISIBLE_DEVICES" in environ:
        return machine.gpus
    read = _Environ(environ)
    if env == "dlc":
        return read.number("KUBERNETES_CONTAINER_RESOURCE_GPU") or 0
    if env == "slurm":
        return read.number("SLURM_GPUS_ON_NODE") or 0
    return 0


def _declared_ranks(read: _Environ) -> int | None:
    value = read.text("PET_NPROC_PER_NODE", "NPROC_PER_NODE")
    return int(value) if value and value.isdecimal() else None  # "auto" and "gpu": as found


def _single(read: _Environ, options: Options, machine: Machine) -> World:
    if (options.nodes or 1) > 1:
        raise UserError(f"--env single contradicts --nnodes {options.nodes}; use --env torchrun")
    # One node needs no agreed port: torchrun takes a free one, so two runs never collide.
    return World("single", 1, 0, 0, "localhost", 0, "")


def _torchrun(read: _Environ, options: Options, machine: Machine) -> World:
    nodes_text = read.text("PET_NNODES", "NNODES") or str(options.nodes or 1)
    low, _, high = nodes_text.partition(":")
    if not low.isdecimal() or (high and high != low):
        raise UserError(
            f"the environment asks for {nodes_text!r} nodes; Megatron's layout needs one fixed "
            "number, so elastic ranges cannot be used (PET_NNODES, NNODES)"
        )
    host, _, port = (read.text("PET_RDZV_ENDPOINT") or "").rpartition(":")
    rank = read.number("PET_NODE_RANK", "NODE_RANK", "GROUP_RANK")
    nodes = options.nodes or int(low)
    return World(
        "torchrun",
        nodes,
        rank if rank is not None else (0 if nodes == 1 else -1),
        0,
        read.text("PET_MASTER_ADDR", "MASTER_ADDR") or host,
        read.number("PET_MASTER_PORT", "MASTER_PORT") or (int(port) if port.isdecimal() else 0),
        "",
    )


def _dlc(read: _Environ, options: Options, machine: Machine) -> World:
    # DLC counts nodes, not ranks: WORLD_SIZE is the number of workers, RANK this worker's place.
    nodes = options.nodes or read.need("dlc", "WORLD_SIZE")
    rank = options.node_rank if options.node_rank is not None else read.need("dlc", "RANK")
    return World(
        "dlc",
        nodes,
        rank,
        0,
        read.text("MASTER_ADDR") or "",
        read.number("MASTER_PORT") or 0,
        "",
        notes=("WORLD_SIZE and RANK are read as DLC sets them: nodes and node rank",),
    )


def _slurm(read: _Environ, options: Options, machine: Machine) -> World:
    in_step = read.text("SLURM_STEP_ID", "SLURM_STEPID") is not None
    nodes = options.nodes or read.need(
        "slurm",
        *(("SLURM_STEP_NUM_NODES",) if in_step else ()),
        *("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    )
    node_rank = read.number("SLURM_NODEID")
    process = read.number("SLURM_PROCID") or 0
    # A batch script runs once, on the first node; its variables say 0 there, or nothing in salloc.
    alone = not in_step and process == 0 and not node_rank
    tasks = (read.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or nodes) if not alone else nodes
    names = read.text("SLURM_STEP_NODELIST") if in_step else None
    names = names or read.text("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    master = read.text("MASTER_ADDR") or (machine.expand_hosts(names)[0] if names else "")
    job = read.number("SLURM_JOB_ID", "SLURM_JOBID") or 0
    # Below the ephemeral ports, and the same on every node of the job.
    port = read.number("MASTER_PORT") or 20000 + job % 10000
    rank, ranks_per_node = None, 0
    if tasks > nodes:
        if tasks % nodes:
            raise UserError(
                f"{tasks} Slurm tasks on {nodes} nodes are no equal number per node; start one "
                "task a node (srun --ntasks-per-node=1) or one a GPU"
            )
        rank, ranks_per_node = (process, read.number("SLURM_LOCALID") or 0), tasks // nodes
        node_rank = process // ranks_per_node if node_rank is None else node_rank
    return World(
        "slurm",
        nodes,
        node_rank if node_rank is not None else process,
        ranks_per_node,
        master,
        port if nodes > 1 or rank else 0,
        "",
        rank=rank,
        needs_srun=alone and nodes > 1,
    )


def _mpi(read: _Environ, options: Options, machine: Machine) -> World:
    size = read.need("mpi", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    process = read.need("mpi", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    local_size = read.number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    if local_size is None:
        if options.nodes is None or size % options.nodes:
            raise UserError(
                f"{size} MPI processes, but this MPI does not say how many share a node; add "
                "--nnodes N with the number of nodes"
            )
        local_size = size // options.nodes
    if size % local_size:
        raise UserError(
            f"{size} MPI processes are no multiple of the {local_size} on this node; start the "
            "same number on every node (mpirun --map-by ppr:N:node)"
        )
    rank, ranks_per_node = None, 0
    local = read.number("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    if local_size > 1:
        rank = (process, local if local is not None else process % local_size)
        ranks_per_node = local_size
        # Without --map-by ppr or slot, ranks hop from node to node and local ranks repeat.
        if process % local_size != rank[1]:
            raise UserError(
                f"MPI rank {process} has local rank {rank[1]} among {local_size} on its node: "
                "ranks must be numbered node by node (mpirun --map-by slot, or --map-by ppr:N:node)"
            )
    return World(
        "mpi",
        size // local_size,
        process // local_size,
        ranks_per_node,
        read.text("MASTER_ADDR") or "",
        read.number("MASTER_PORT") or 0,
        "",
        rank=rank,
    )


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


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


def _python_command() -> list[str]:
    """``torchrun`` of this interpreter, not whichever comes first on PATH."""
    beside = Path(sys.executable).with_name("torchrun")
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "torch.distributed.run"]


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
        settings["PYTHONPATH"] = environ["PYTHONPATH"]
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
        return Command((sys.executable, "-m", module, *flags.argv()), settings)
    if world.nodes == 1 and not world.master_port:
        place = ["--standalone", "--nnodes", "1"]
    else:
        place = ["--nnodes", str(world.nodes), "--node-rank", str(world.node_rank)]
        place += ["--master-addr", world.master_addr, "--master-port", str(world.master_port)]
    argv = [*_python_command(), *place, "--nproc-per-node", str(world.ranks_per_node)]
    # torchrun takes PET_* as defaults of flags that are not given, such as another rendezvous.
    stale = tuple(sorted(k for k in environ if k.startswith("PET_")))
    return Command((*argv, "-m", module, *flags.argv()), settings, stale)


def supervise(command: Command, environ: Mapping[str, str], log: Path | None) -> int:
    """Run ``command``, copy its output to stdout and append it to ``log``; returns its status.

    The child gets its own process group and every terminating signal that reaches this process, so
    a scheduler's notice, Ctrl-C and ``kill`` all act the same. Killed by signal N gives 128 + N.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    previous = {number: signal.signal(number, forward) for number in handled}
    sink = log.open("ab", buffering=0) if log is not None else None
    try:
        child = subprocess.Popen(
            command.argv,
            env=command.environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        for number in received:  # a signal between the two lines above
            child.send_signal(number)
        pipe = child.stdout
        assert pipe is not None

        def copy() -> None:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                if sink is not None:
                    sink.write(chunk)
                try:
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
                except (BrokenPipeError, ValueError):
                    pass  # nobody reads the terminal any more; the log still does

        reader = threading.Thread(target=copy, daemon=True)
        reader.start()
        status = child.wait()
        # A process that outlives its parent may keep the pipe open for ever.
        reader.join(timeout=5)
        return 128 - status if status < 0 else status
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if sink is not None:
            sink.close()


# ---------------------------------------------------------------------------------------------
# One call of a launcher
# ---------------------------------------------------------------------------------------------


def with_output_dir(flags: Flags) -> tuple[Path, Flags]:
    """The run directory, and the flags with its name in them.

    Without ``--output-dir`` it is ``runs/<model>``: the same on every node and for every repetition
    of the command, which is what going on after an interruption needs. A time stamp is neither.
    """
    given = flags.get("output_dir")
    if given is not None:
        return Path(given), flags
    folder = Path("runs", Path(flags.get("hf_model") or "run").absolute().name)
    return folder, replace(flags, defaults=(*flags.defaults, "--output-dir", str(folder)))


def link_logs(run: Path) -> str | None:
    """Point ``./logs/<run>`` at the run directory; returns a sentence when it could not."""
    link = Path("logs", run.absolute().name)
    if link.parent.absolute() == run.parent.absolute():
        return None  # the runs live there themselves
    target = os.path.relpath(run.absolute(), link.parent.absolute())
    try:
        if link.is_symlink() and os.readlink(link) == target:
            return None
        if link.exists() and not link.is_symlink():
            return f"{link} exists and is no link: left as it is"
        link.parent.mkdir(exist_ok=True)
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.symlink_to(target, target_is_directory=True)
        fresh.replace(link)
    except OSError as error:
        return f"no link {link}: {error.strerror}"
    return None


def preflight(world: World, flags: Flags, *, quiet: bool) -> int:
    """Run ``megatron-patch check`` on the flags; with ``quiet`` only failures are shown."""
    import contextlib
    import io

    try:
        from megatron_patch.training import parallel
    except ImportError:
        return 0

    shown = io.StringIO()
    argv = [*flags.argv(), "--nnodes", str(world.nodes)]
    argv += ["--nproc-per-node", str(world.ranks_per_node)]
    with contextlib.redirect_stdout(shown):
        status = parallel.main(argv)
    if status or not quiet:
        print(shown.getvalue(), end="", flush=True)
    return status


@dataclass(frozen=True)
class Call:
    """What ``examples/_lib.sh`` hands over."""

    entry: str  # "pretrain" | "sft"
    script: str
    defaults: tuple[str, ...]
    user: tuple[str, ...]


def wants_demo(flags: Flags, options: Options) -> bool:
    """Whether this call is the embedded demo; refuses a call that trains nothing.

    Raises:
        UserError: flags were given but no model.
    """
    has_model = flags.get("hf_model") is not None
    if options.demo:
        if has_model:
            raise UserError("--demo brings its own model; leave out either --demo or --hf-model")
        return True
    if has_model:
        return False
    if flags.user or options.given - _NEUTRAL:
        raise UserError(
            "no model given: add --hf-model DIR, a Hugging Face directory with config.json and "
            "tokenizer (or --demo for the embedded demo with these flags)"
        )
    return True


def run(call: Call) -> int:
    """One call of a launcher, from flags to exit status."""
    environ = dict(os.environ)
    options, rest = split_flags(call.user)
    if options.hostfile is not None:
        raise UserError("--hostfile belongs to the mpi_run_... launchers")
    flags = Flags(call.defaults, tuple(rest))
    demo = wants_demo(flags, options)
    machine = probe(environ)
    if demo and options.ranks_per_node is None and not _started_per_rank(environ):
        # The tiny model gains nothing from more ranks, and one rank runs on every machine.
        options = replace(options, ranks_per_node=1)
    device = flags.get("device")
    if device is not None:
        device = "cpu" if device == "cpu" else "cuda"
    world = detect(environ, options, machine, device)
    if demo:
        return run_demo(call, options, flags.user, world, machine, environ)
    folder, flags = with_output_dir(flags)
    return start(call, options, world, machine, environ, flags, folder)


def _started_per_rank(environ: Mapping[str, str]) -> bool:
    return int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1) > 1


def start(
    call: Call,
    options: Options,
    world: World,
    machine: Machine,
    environ: Mapping[str, str],
    flags: Flags,
    folder: Path,
    checked: Flags | None = None,
) -> int:
    """Check, announce and run (or show) the training command of this node.

    ``checked`` stands in for ``flags`` in the check, where what they name is not there yet.
    """
    device = ("--device", world.device)
    if flags.get("device") is None:
        flags = replace(flags, defaults=(*flags.defaults, *device))
        checked = checked and replace(checked, defaults=(*checked.defaults, *device))
    checked = checked or flags
    command = build_command(world, call.entry, flags, environ, machine)
    if world.leads or options.dry_run:
        print(f"megatron_patch {__version__}: {Path(call.script).name} -> {call.entry}")
        print(world.line())
        print(f"this is node {world.node_rank}" + (f", rank {world.rank[0]}" if world.rank else ""))
        for note in world.notes:
            print(f"note: {note}")
        print(f"run directory: {folder}", flush=True)
    srun = _srun(call, world, environ) if world.needs_srun else None
    if srun is not None and (options.dry_run or shutil.which("srun")):
        if not options.dry_run:
            print(f"started once for {world.nodes} nodes, so srun starts it on each", flush=True)
            if not options.no_check and (status := preflight(world, checked, quiet=True)):
                return status
            return supervise(srun, environ, None)
        print(f"\nthis was started once, so it goes on through srun:\n{srun.shell()}")
    if options.dry_run:
        print(f"\n{command.shell()}\n", flush=True)
    if not options.no_check:
        status = preflight(world, checked, quiet=not (world.leads or options.dry_run))
        if status:
            return status
    if options.dry_run:
        print("dry run: nothing was started or written")
        return 0
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if world.leads and (problem := link_logs(folder)):
        print(f"note: {problem}")
    log = logs / f"node{world.node_rank}.log"
    with log.open("a", encoding="utf-8") as out:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
        out.write(f"\n=== {stamp} {world.line()}\n=== {command.shell()}\n")
    if world.leads:
        print(f"text log: {log}", flush=True)
    status = supervise(command, environ, log)
    if status:
        print(
            f"error: training on node {world.node_rank} ended with status {status}; see {log}",
            file=sys.stderr,
        )
    return status


def _srun(call: Call, world: World, environ: Mapping[str, str]) -> Command:
    argv = ["srun", f"--nodes={world.nodes}", f"--ntasks={world.nodes}", "--ntasks-per-node=1"]
    # A step no longer inherits the job's cores and would bind its one task to a single one.
    if cores := environ.get("SLURM_CPUS_ON_NODE"):
        argv.append(f"--cpus-per-task={cores}")
    argv += ["--kill-on-bad-exit=1", "bash", call.script, *call.user]
    return Command(tuple(argv), {})


# ---------------------------------------------------------------------------------------------
# The embedded demo
# ---------------------------------------------------------------------------------------------


def run_demo(
    call: Call,
    options: Options,
    user: tuple[str, ...],
    world: World,
    machine: Machine,
    environ: Mapping[str, str],
) -> int:
    """Prepare (once), train, and say what to do next."""
    from megatron_patch.data import demo

    if world.nodes > 1 or world.rank is not None:
        where = f"{world.nodes} nodes" if world.nodes > 1 else "one process per rank"
        raise UserError(
            f"the embedded demo runs on one node, and this is a {world.env} environment with "
            f"{where}: add --hf-model DIR and your flags for a real run, or --env single for the "
            "demo on this node alone"
        )
    given = Flags((), user)
    folder = Path(given.get("output_dir") or "runs/demo-qwen3")
    for dest in ("train_tokens", "train_samples", "epochs"):
        if given.get(dest) is not None:
            raise UserError(
                f"the demo's length is given in steps: --train-iters, not {args.flag_name(dest)}"
            )
    steps = given.get("train_iters") or demo.STEPS
    plan = demo.schedule(demo.saved_step(folder), steps)
    inputs = folder / "input"

    def flags_for(inputs: Path) -> Flags:
        defaults = [*demo.train_flags(inputs, world.size), "--output-dir", str(folder)]
        final = ["--train-iters", str(plan.end)]
        if plan.extends:
            # Without it the checkpoint's schedule is kept, and a longer one refused.
            final += ["--override-opt-param-scheduler"]
        return Flags(tuple(defaults), user, tuple(final))

    print("demo: a tiny Qwen3 on the text of Python's standard library", flush=True)
    print(plan.says, flush=True)
    flags = flags_for(inputs)
    if options.dry_run and demo.read_prepared(inputs) is None:
        print(f"demo: a real call first prepares text, tokenizer and model in {inputs}")
        with tempfile.TemporaryDirectory(prefix="megatron-patch-demo-") as scratch:
            demo.write_model(Path(scratch, "model"), None)
            stand_in = flags_for(Path(scratch))
            return start(call, options, world, machine, environ, flags, folder, stand_in)
    if options.dry_run:
        return start(call, options, world, machine, environ, flags, folder)
    demo.prepare(inputs)
    status = start(call, options, world, machine, environ, flags, folder)
    if status == 0:
        print(demo.report(folder, call.script), flush=True)
    return status


# ---------------------------------------------------------------------------------------------
# mpirun
# ---------------------------------------------------------------------------------------------

#: Variables that the other nodes need, where they are set here.
_MPI_NAMES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "MP_PYTHON", "HF_HOME")
_MPI_PREFIXES = ("NCCL_", "CUDA_", "NVTE_", "TORCH_", "GLOO_", "OMP_", "UCX_", "TRITON_")


def read_hostfile(path: Path) -> list[str]:
    """Hosts of an Open MPI (``host slots=8``) or MPICH (``host:8``) host file, in order."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--hostfile {path}: {error.strerror}") from error
    names = [line.partition("#")[0].split() for line in lines]
    return list(dict.fromkeys(words[0].partition(":")[0] for words in names if words))


def mpirun_command(
    inner: str,
    flags: Sequence[str],
    options: Options,
    environ: Mapping[str, str],
    *,
    open_mpi: bool,
    root: bool,
) -> Command:
    """``mpirun`` with one launcher per node; each of them starts its node's ranks by torchrun."""
    hostfile = options.hostfile or environ.get("OMPI_MCA_orte_default_hostfile")
    hosts: list[str] = []
    if hostfile:
        hosts = read_hostfile(Path(hostfile))
    elif names := environ.get("SLURM_JOB_NODELIST"):
        hosts = _scontrol_hosts(names)
    nodes = options.nodes or max(len(hosts), 1)
    if hosts and nodes > len(hosts):
        raise UserError(
            f"--num-nodes {nodes}, but {hostfile or 'SLURM_JOB_NODELIST'} names {len(hosts)} "
            f"host{'s' * (len(hosts) != 1)}: {' '.join(hosts)}"
        )
    master = options.master_addr or environ.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    if nodes > 1 and not hosts:
        raise UserError(
            f"--num-nodes {nodes} needs to know the hosts: give --hostfile F, one host a line"
        )
    port = str(options.master_port or environ.get("MASTER_PORT") or DEFAULT_PORT)
    exported = {"MASTER_ADDR": master or "localhost", "MASTER_PORT": port}
    names_out = sorted(
        {
            *exported,
            *(n for n in _MPI_NAMES if n in environ),
            *(n for n in environ if n.startswith(_MPI_PREFIXES)),
        }
    )
    argv = ["mpirun", "-np", str(nodes)]
    if open_mpi:
        argv += ["--map-by", "ppr:1:node", "--bind-to", "none", "--wdir", os.getcwd()]
        argv += ["--allow-run-as-root"] if root else []
        argv += ["--hostfile", str(Path(hostfile).absolute())] if hostfile else []
        argv += [part for name in names_out for part in ("-x", name)]
    else:
        argv += ["-ppn", "1", "-wdir", os.getcwd(), "-genvlist", ",".join(names_out)]
        argv += ["-f", str(Path(hostfile).absolute())] if hostfile else []
    argv += ["bash", inner, "--env", "mpi", "--nnodes", str(nodes)]
    if options.ranks_per_node:
        argv += ["--nproc-per-node", str(options.ranks_per_node)]
    argv += ["--no-check"] if options.no_check else []
    return Command((*argv, *flags), exported)


def run_mpi(call: Call) -> int:
    """``mpi_run_...``: check the plan here, then let ``mpirun`` start ``call.entry`` everywhere."""
    environ = dict(os.environ)
    options, rest = split_flags(call.user)
    if options.env is not None or options.node_rank is not None:
        raise UserError("--env and --node-rank are mpirun's to give here; leave them out")
    if options.demo:
        raise UserError("--demo runs on one node without mpirun; use the run_mcore_... launcher")
    if Flags((), tuple(rest)).get("device") is None and "--num-gpus-per-node" in options.given:
        rest = [*rest, "--device", "cuda"]
    found = shutil.which("mpirun")
    version = ""
    if found:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=False, timeout=30
        )
        version = done.stdout + done.stderr
    hydra = "hydra" in version.lower() or "intel" in version.lower()
    command = mpirun_command(
        call.entry, rest, options, environ, open_mpi=not hydra, root=os.geteuid() == 0
    )
    nodes = int(command.argv[2])
    # What node 0 would see and do: the same code, so this cannot drift from the real run.
    rehearsal = {
        **environ,
        **command.set,
        "OMPI_COMM_WORLD_SIZE": str(nodes),
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    inner = command.argv[command.argv.index("bash") :]
    done = subprocess.run(
        [*inner, "--dry-run"], env=rehearsal, capture_output=True, text=True, check=False
    )
    if options.dry_run or done.returncode:
        if options.dry_run:
            print(f"{command.shell()}\n\non node 0 it runs:", flush=True)
        print(done.stdout, end="", flush=True)
        print(done.stderr, end="", file=sys.stderr, flush=True)
        return done.returncode
    if not found:
        raise UserError("mpirun is not on PATH; load your MPI module or install Open MPI")
    print(command.shell(), flush=True)
    return supervise(command, environ, None)


# ---------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Entry for ``examples/_lib.sh``, and ``env [--json] [flags]`` to see what is detected."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments and arguments[0] == "env":
            as_json = "--json" in arguments
            options, rest = split_flags([a for a in arguments[1:] if a != "--json"])
            if rest:
                raise UserError(f"env: {rest[0]} is not a launcher flag")
            world = detect(os.environ, options, probe(os.environ))
            print(json.dumps(asdict(world)) if as_json else world.line())
            return 0
        if len(arguments) < 4 or arguments[0] not in ("run", "mpi"):
            raise UserError("usage: python -m megatron_patch.launch env [--json] [launcher flags]")
        count = int(arguments[3])
        call = Call(
            entry=arguments[1],
            script=arguments[2],
            defaults=tuple(arguments[4 : 4 + count]),
            user=tuple(arguments[4 + count :]),
        )
        return run(call) if arguments[0] == "run" else run_mpi(call)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
