"""Who takes part: environment detection.

Nothing but ``probe`` looks at the machine; ``detect`` is a pure function of its arguments.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_patch.launch.flags import Options
from megatron_patch.platform.detect import nvidia_device
from megatron_patch.util import UserError

DEFAULT_PORT = 29500
#: More nodes or ranks a node than there are anywhere.
_MOST = 1 << 20


@dataclass(frozen=True)
class Machine:
    """What a probe found on this node."""

    cores: int
    #: Usable GPUs: those that CUDA_VISIBLE_DEVICES leaves.
    gpus: int
    #: What shows that there is an NVIDIA device, usable or not; None without one.
    nvidia: str | None = None
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
    #: Names of the nodes in the order of their ranks, where the scheduler says them.
    hosts: tuple[str, ...] = ()
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

    Raises:
        UserError: It is no such list.
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
                    if not (low.isdecimal() and high.isdecimal()) or int(high) - int(low) > _MOST:
                        raise UserError(
                            f"{piece!r} in the list of hosts {text!r} is no range of numbers"
                        )
                    numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
                else:
                    numbers.append(low)
            expanded = [head + n for head in expanded for n in numbers]
        hosts += expanded
    if not any(hosts) or text.count("[") != text.count("]"):
        raise UserError(f"the list of hosts {text!r} cannot be read (SLURM_JOB_NODELIST)")
    return hosts


def scontrol_hosts(text: str) -> list[str]:
    """``expand_hostlist``, by Slurm itself where it is installed."""
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
    nvidia = nvidia_device()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    listed = sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))
    # A driver that does not answer still leaves its device files: such a machine is no CPU machine.
    gpus = listed or sum(bool(re.search(r"nvidia\d+$", p)) for p in glob.glob("/dev/nvidia*"))
    if listed and nvidia is None:
        nvidia = "nvidia-smi -L"
    if visible is not None:
        names = [v.strip() for v in visible.split(",")]
        # CUDA stops at the first entry that it does not know; -1 is the customary one.
        gpus = next((i for i, v in enumerate(names) if v in ("", "-1")), len(names))
    return Machine(cores, gpus, nvidia, _capability() if gpus else 0, scontrol_hosts)


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
    if read.text("TORCHELASTIC_RUN_ID") or (read.text("RANK") and read.text("LOCAL_RANK")):
        raise UserError(
            "this process is itself a torchrun worker (RANK and LOCAL_RANK are set). Start the "
            "launcher without torchrun, it starts torchrun itself; or say --env single"
        )
    if read.text("PET_NNODES", "NNODES"):
        return "torchrun"
    if read.text("WORLD_SIZE") and read.text("RANK"):
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
        # Whether CUDA comes up there is for training to find out, which then refuses; never CPU.
        device = "cuda" if gpus or machine.nvidia else "cpu"
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
    for what, number, most in (
        ("nodes (--nnodes)", world.nodes, _MOST),
        ("ranks a node (--nproc-per-node)", world.ranks_per_node, _MOST),
        ("master port (--master-port, MASTER_PORT)", world.master_port or 1, 65535),
    ):
        if not 1 <= number <= most:
            raise UserError(
                f"{number} {what}: a number from 1 to {most} is needed (env {world.env})"
            )
    if world.nodes > 1:
        if world.node_rank < 0:
            raise UserError(
                f"--nnodes {world.nodes} needs --node-rank 0 ... {world.nodes - 1}, another one on "
                "each node (or the environment variable NODE_RANK)"
            )
        if not world.master_addr:
            raise UserError(
                f"{world.nodes} nodes need the address of node 0, the same on every node: give "
                "--master-addr HOST or set MASTER_ADDR"
            )
        if world.master_addr in ("localhost", "127.0.0.1"):
            note = f"master {world.master_addr} only works while all nodes are this machine"
            world = replace(world, notes=(*world.notes, note))
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
    name = "SLURM_GPUS_ON_NODE" if env == "slurm" else "KUBERNETES_CONTAINER_RESOURCE_GPU"
    return read.number(name) or 0


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
    hosts = tuple(machine.expand_hosts(names)) if names else ()
    master = read.text("MASTER_ADDR") or (hosts[0] if hosts else "")
    job = read.number("SLURM_JOB_ID", "SLURM_JOBID") or 0
    # Below the ephemeral ports, and the same on every node of the job.
    port = read.number("MASTER_PORT") or 20000 + job % 10000
    rank, ranks_per_node = None, 0
    if tasks > nodes:
        if not nodes or tasks % nodes:
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
        hosts=hosts,
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
    if not local_size or size % local_size:
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
    # Every process of a job knows its name; two jobs on one machine get two ports.
    job = read.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    port = 20000 + zlib.crc32(job.encode()) % 10000 if job else 0
    return World(
        "mpi",
        size // local_size,
        process // local_size,
        ranks_per_node,
        read.text("MASTER_ADDR") or "",
        read.number("MASTER_PORT") or port,
        "",
        rank=rank,
    )
