"""``mpirun`` with one launcher per node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_patch.launch.flags import Flags, Options, split_flags
from megatron_patch.launch.node import Call
from megatron_patch.launch.process import Command, supervise
from megatron_patch.launch.world import DEFAULT_PORT, scontrol_hosts
from megatron_patch.util import UserError

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
        hosts = scontrol_hosts(names)
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
    if Flags((), tuple(rest)).get("device") is None and "--nproc-per-node" in options.given:
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
    return supervise(command, environ, None).status


def help_text(script: str) -> str:
    """``--help`` of a launcher that goes through ``mpirun``."""
    return f"""\
usage: {script} --num-nodes N --num-gpus-per-node G [--hostfile F] --hf-model DIR [flags]

Starts the launcher beside it once a node through mpirun (Open MPI or MPICH), G ranks each.
  --num-nodes N            nodes [all that the host file or the Slurm job names]
  --num-gpus-per-node G    ranks a node [the GPUs found there]
  --hostfile F             one host a line; needed from two nodes on, but for Slurm and Kubeflow
  --master-addr HOST       node 0 [the first host]
  --master-port P          its port [{DEFAULT_PORT}]
  --dry-run                show the mpirun line, node 0's command and the plan; start nothing

All other flags are those of the other launchers of this folder; see their --help.
"""
