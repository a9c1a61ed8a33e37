"""Environment detection is a pure function: a process environment in, a world out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_patch.launch.flags import Options
from megatron_patch.launch.world import Machine, World, detect, expand_hostlist
from megatron_patch.util import UserError

CPU = Machine(cores=4, gpus=0)
GPUS = Machine(cores=64, gpus=8, nvidia="/dev/nvidia0")


def world(
    environ: dict[str, str], machine: Machine = GPUS, device: str | None = None, **options: Any
) -> World:
    return detect(environ, Options(**options), machine, device)


def slurm(node: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        **more,
    }


def mpi(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "MASTER_ADDR": "head",
    }


TWO_NODES = {
    "torchrun": lambda k: {
        "NNODES": "2",
        "NODE_RANK": str(k),
        "MASTER_ADDR": "head",
        "MASTER_PORT": "777",
    },
    "torchrun PET": lambda k: {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(k),
        "PET_MASTER_ADDR": "head",
        "PET_MASTER_PORT": "777",
    },
    "torchrun rendezvous": lambda k: {
        "PET_NNODES": "2:2",
        "PET_NODE_RANK": str(k),
        "PET_RDZV_ENDPOINT": "head:777",
    },
    "dlc": lambda k: {
        "WORLD_SIZE": "2",
        "RANK": str(k),
        "MASTER_ADDR": "head",
        "MASTER_PORT": "777",
    },
    "slurm": lambda k: slurm(k, MASTER_ADDR="head", MASTER_PORT="777"),
    "mpi": lambda k: mpi(k, 2, 0, 1) | {"MASTER_PORT": "777"},
}


@pytest.mark.parametrize("kind", TWO_NODES)
def test_two_nodes_see_one_world(kind: str) -> None:
    first, second = (world(TWO_NODES[kind](k)) for k in (0, 1))
    assert (first.node_rank, second.node_rank) == (0, 1)
    assert first == replace(second, node_rank=0)
    assert first.line() == second.line()
    assert (first.nodes, first.ranks_per_node, first.size) == (2, 8, 16)
    assert (first.master_addr, first.master_port) == ("head", 777)
    assert first.env == kind.split()[0]
    assert first.leads and not second.leads
    assert first.rank is None and not first.needs_srun


def test_single_node_takes_all_gpus_and_no_fixed_port() -> None:
    found = world({})
    assert (found.env, found.nodes, found.ranks_per_node, found.device) == ("single", 1, 8, "cuda")
    assert found.master_port == 0


def test_cpu_machine_has_one_rank_unless_asked() -> None:
    assert (world({}, CPU).device, world({}, CPU).ranks_per_node) == ("cpu", 1)
    assert world({}, CPU, ranks_per_node=4).ranks_per_node == 4


def test_nvidia_device_without_usable_gpu_is_not_a_cpu_machine() -> None:
    # CUDA hidden or broken: training is told "cuda" and refuses, it never slips to CPU.
    assert world({}, Machine(4, 0, nvidia="/dev/nvidia0")).device == "cuda"


def test_device_flag_wins() -> None:
    found = world({}, GPUS, device="cpu")
    assert (found.device, found.ranks_per_node) == ("cpu", 1)


def test_scheduler_declares_gpus_where_the_probe_sees_none() -> None:
    found = world(TWO_NODES["dlc"](0) | {"KUBERNETES_CONTAINER_RESOURCE_GPU": "4"}, CPU)
    assert (found.device, found.ranks_per_node) == ("cuda", 4)
    found = world(slurm(0, SLURM_GPUS_ON_NODE="6"), CPU)
    assert (found.device, found.ranks_per_node) == ("cuda", 6)


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(UserError, match=r"9 ranks .* 8 GPUs"):
        world({}, GPUS, ranks_per_node=9)
    assert "9 ranks" in world({}, GPUS, ranks_per_node=9, dry_run=True).notes[0]


def test_slurm_master_and_port_come_from_the_job() -> None:
    found = world(slurm(1))
    assert found.master_addr == "gpu07"
    assert found.master_port == world(slurm(0)).master_port == 20000 + 3456


def test_slurm_asks_scontrol() -> None:
    machine = replace(GPUS, expand_hosts=lambda text: [f"from-scontrol:{text}"])
    assert world(slurm(0), machine).master_addr == "from-scontrol:gpu[07-08]"


def test_slurm_batch_script_is_one_process_and_needs_srun() -> None:
    batch = slurm(0)
    del batch["SLURM_STEP_ID"]
    found = world(batch | {"SLURM_NTASKS": "16"})
    assert found.needs_srun and found.rank is None and found.ranks_per_node == 8
    one = world(batch | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu07"})
    assert not one.needs_srun and one.nodes == 1


def test_slurm_one_task_per_gpu_needs_no_torchrun() -> None:
    more = {"SLURM_NTASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3"}
    found = world(slurm(1, **more))
    assert found.rank == (11, 3)
    assert (found.nodes, found.ranks_per_node, found.node_rank) == (2, 8, 1)
    with pytest.raises(UserError, match="15 Slurm tasks on 2 nodes"):
        world(slurm(1, SLURM_NTASKS="15"))


def test_slurm_step_counts_beat_those_of_the_job() -> None:
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "b"}
    found = world(slurm(0, SLURM_JOB_NUM_NODES="4", **step))
    assert found.nodes == 1 and found.rank is None


def test_mpi_one_process_per_rank() -> None:
    found = world(mpi(11, 16, 3, 8))
    assert found.rank == (11, 3)
    assert (found.nodes, found.node_rank, found.ranks_per_node) == (2, 1, 8)
    assert found.master_port == 29500
    with pytest.raises(UserError, match="contradicts the 8 processes"):
        world(mpi(11, 16, 3, 8), ranks_per_node=4)


def test_mpi_jobs_on_one_machine_get_their_own_port() -> None:
    first, second = ({"PMIX_NAMESPACE": name} for name in ("job-1", "job-2"))
    ports = [world(mpi(k, 2, k, 2) | first).master_port for k in (0, 1)]
    assert ports[0] == ports[1] and 20000 <= ports[0] < 30000
    assert world(mpi(0, 2, 0, 2) | second).master_port != ports[0]
    assert world(mpi(0, 2, 0, 2) | first | {"MASTER_PORT": "7"}).master_port == 7


def test_mpi_ranks_must_be_numbered_node_by_node() -> None:
    with pytest.raises(UserError, match="node by node"):
        world(mpi(1, 16, 0, 8))


def test_mpich_does_not_say_how_many_share_a_node() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "head"}
    with pytest.raises(UserError, match="--nnodes"):
        world(environ)
    assert world(environ, nodes=2).node_rank == 1
    assert world(environ | {"MPI_LOCALNRANKS": "1"}).nodes == 2


@pytest.mark.parametrize(
    ("environ", "env"),
    [
        (slurm(0) | mpi(0, 2, 0, 1), "mpi"),  # mpirun inside an allocation
        (slurm(0) | {"PMI_RANK": "0", "PMI_SIZE": "2"}, "slurm"),  # srun --mpi=pmi2
        (TWO_NODES["dlc"](0) | TWO_NODES["torchrun PET"](0), "torchrun"),  # kubeflow sets both
        ({"NNODES": "1"}, "torchrun"),
    ],
)
def test_innermost_starter_wins(environ: dict[str, str], env: str) -> None:
    assert world(environ).env == env


def test_env_flag_overrides() -> None:
    assert world(TWO_NODES["dlc"](1), env="single").nodes == 1
    assert world(slurm(1), env="single").nodes == 1
    with pytest.raises(UserError, match=r"--env slurm needs .* SLURM_JOB_NUM_NODES"):
        world({}, env="slurm")
    with pytest.raises(UserError, match=r"--env dlc needs .* WORLD_SIZE"):
        world({}, env="dlc")


def test_flags_alone_make_a_torchrun_world() -> None:
    found = world({}, nodes=3, node_rank=2, master_addr="head", master_port=5)
    assert (found.env, found.nodes, found.node_rank, found.master_port) == ("torchrun", 3, 2, 5)
    assert world({}, nodes=2, node_rank=0, master_addr="head").master_port == 29500


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        ({}, {"nodes": 2, "master_addr": "h"}, "--node-rank"),
        ({}, {"nodes": 2, "node_rank": 0}, "--master-addr"),
        ({}, {"nodes": 2, "node_rank": 2, "master_addr": "h"}, "node rank 2 does not exist"),
        ({}, {"nodes": 2, "env": "single"}, "contradicts"),
        ({"NNODES": "1:4"}, {}, "elastic"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, {}, "WORLD_SIZE='two'"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, {}, "torchrun worker"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, {}, "MASTER_ADDR"),
    ],
)
def test_refusals(environ: dict[str, str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        world(environ, **options)


def test_localhost_as_master_of_two_nodes_is_said() -> None:
    environ = TWO_NODES["dlc"](0) | {"MASTER_ADDR": "127.0.0.1"}
    assert any("127.0.0.1" in note for note in world(environ).notes)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[098-101].cluster", ["n098.cluster", "n099.cluster", "n100.cluster", "n101.cluster"]),
    ],
)
def test_expand_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["gpu[01-", "gpu[a-b]", "gpu[0-999999999]", "[", "", ",,"])
def test_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UserError, match="list of hosts"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (mpi(0, 2, 0, 0), "2 MPI processes are no multiple of the 0"),
        (slurm(0, SLURM_JOB_NUM_NODES="0"), "on 0 nodes"),
        (TWO_NODES["dlc"](0) | {"MASTER_PORT": "999999"}, "999999 master port"),
        (TWO_NODES["dlc"](0) | {"WORLD_SIZE": "9999999999"}, "9999999999 nodes"),
    ],
)
def test_numbers_that_no_cluster_has(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        world(environ)
