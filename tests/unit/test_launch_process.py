"""The command line of a node, and what running it under a log keeps: status, output, signals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_patch.launch.flags import Flags
from megatron_patch.launch.process import Command, _Console, build_command, supervise
from megatron_patch.launch.world import Machine, World

MACHINE = Machine(cores=12, gpus=0)
ONE = World("single", 1, 0, 4, "localhost", 0, "cpu")
TWO = World("dlc", 2, 1, 8, "head", 777, "cuda")


def build(
    world: World, *flags: str, environ: dict[str, str] | None = None, machine: Machine = MACHINE
) -> Command:
    return build_command(world, "pretrain", Flags((), flags), environ or {}, machine)


def test_single_node_line() -> None:
    argv = build(ONE, "--lr", "1e-4").argv
    assert argv[-6:] == ("--nproc-per-node", "4", "-m", "megatron_patch.pretrain", "--lr", "1e-4")
    assert "--standalone" in argv


def test_two_node_line() -> None:
    line = build(TWO).shell()
    assert (
        "--nnodes 2 --node-rank 1 --master-addr head --master-port 777 --nproc-per-node 8" in line
    )
    assert "--standalone" not in line


def test_one_process_per_rank_uses_no_torchrun() -> None:
    command = build(replace(TWO, rank=(11, 3)))
    assert command.argv == (sys.executable, "-m", "megatron_patch.pretrain")
    assert {k: command.set[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")} == {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "MASTER_PORT": "777",
    }


def test_threads_on_cpu() -> None:
    assert build(ONE).set["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in build(ONE, environ={"OMP_NUM_THREADS": "1"}).set
    assert "OMP_NUM_THREADS" not in build(TWO).set
    assert build(replace(ONE, ranks_per_node=50)).set["OMP_NUM_THREADS"] == "1"


def test_connections_on_gpu() -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert build(TWO).set[name] == "1"
    assert build(TWO, machine=replace(MACHINE, capability=9)).set[name] == "1"
    assert name not in build(TWO, machine=replace(MACHINE, capability=10)).set
    assert name not in build(TWO, environ={name: "32"}).set
    assert name not in build(TWO, "--use-torch-fsdp2").set
    assert name not in build(ONE).set


def test_stale_torchrun_defaults_are_dropped() -> None:
    command = build(ONE, environ={"PET_RDZV_ENDPOINT": "old:1", "KEPT": "x"})
    assert command.environment({"PET_RDZV_ENDPOINT": "old:1", "KEPT": "x"})["KEPT"] == "x"
    assert "PET_RDZV_ENDPOINT" not in command.environment({"PET_RDZV_ENDPOINT": "old:1"})
    assert command.shell().startswith("env -u PET_RDZV_ENDPOINT ")


def test_shell_line_survives_a_shell(tmp_path: Path) -> None:
    nasty = ["a b", "$(touch x)", "'", '"', "*", ";ls", ""]
    show = "import os, sys; print([os.environ['V'], *sys.argv[1:]])"
    command = Command((sys.executable, "-c", show, *nasty), {"V": "v w"})
    done = subprocess.run(
        ["bash", "-c", command.shell()], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == str(["v w", *nasty])
    assert list(tmp_path.iterdir()) == []
    assert shlex.split(command.shell())[1] == "V=v w"


def test_output_goes_to_the_log_too_and_the_status_is_kept(tmp_path: Path, capfdbinary) -> None:
    log = tmp_path / "node0.log"
    log.write_text("before\n")
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    assert supervise(Command((sys.executable, "-c", code), {}), os.environ, log).status == 7
    assert sorted(log.read_text().split()) == ["before", "err", "out"]
    assert sorted(capfdbinary.readouterr().out.split()) == [b"err", b"out"]


def test_killed_child_gives_128_plus_signal() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert supervise(Command((sys.executable, "-c", code), {}), os.environ, None).status == 137


def test_a_grandchild_that_keeps_the_pipe_does_not_hang_the_launcher() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '60'])"
    start = time.monotonic()
    assert supervise(Command((sys.executable, "-c", code), {}), os.environ, None).status == 0
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_child_and_its_status_comes_back(tmp_path: Path, number: int) -> None:
    """As a scheduler does it: only the launcher's own process is signalled."""
    child = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('saved', flush=True), sys.exit(5)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    launcher = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from megatron_patch.launch.process import Command, supervise\n"
        f"command = Command((sys.executable, '-c', {child!r}), {{}})\n"
        "sys.exit(supervise(command, os.environ, Path('log')).status)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=30) == 5
    assert (tmp_path / "log").read_text() == "ready\nsaved\n"


def test_the_error_line_is_found_below_other_output() -> None:
    code = "print('[rank0]: error: too long'); print('Traceback\\n' * 2000); raise SystemExit(1)"
    outcome = supervise(Command((sys.executable, "-c", code), {}), os.environ, None)
    assert (outcome.status, outcome.error) == (1, "too long")


TORCHRUN = (
    "W1201 02:11:12.475000 5505 torch/distributed/run.py:1] Setting OMP_NUM_THREADS\n"
    "error: no such data\n"
    "W1201 02:11:12.475000 5505 torch/distributed/elastic/agent/server/api.py:739] Sending 15\n"
    "late words of a rank\n"
    "E1201 02:11:12.475000 5505 torch/distributed/elastic/multiprocessing/api.py:986] failed "
    "(exitcode: 2) local_rank: 0 (pid: 7) of binary: python\n"
    "Traceback (most recent call last):\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    "=====\n"
)


def test_torchruns_report_stays_in_the_log_and_the_ranks_status_counts(
    tmp_path: Path, capfdbinary
) -> None:
    log = tmp_path / "log"
    code = f"import sys; sys.stdout.write({TORCHRUN!r}); sys.exit(1)"
    outcome = supervise(Command((sys.executable, "-c", code), {}), os.environ, log)
    assert (outcome.status, outcome.error) == (2, "no such data")
    assert capfdbinary.readouterr().out == b"error: no such data\nlate words of a rank\n"
    assert log.read_text() == TORCHRUN


def test_lines_are_told_apart_wherever_the_pipe_cuts_them() -> None:
    for size in (1, 7, 100):
        console = _Console(lambda: False)
        pieces = [TORCHRUN.encode()[i : i + size] for i in range(0, len(TORCHRUN), size)]
        shown = b"".join([*map(console.feed, pieces), console.end()])
        assert shown == b"error: no such data\nlate words of a rank\n", size
        assert console.rank_status == 2
    for interrupted in (False, True):
        console = _Console(lambda interrupted=interrupted: interrupted)
        assert [console.feed(p) for p in (b"> sa", b"ved", b"\n")] == [b"> sa", b"ved", b"\n"]
    assert _Console(lambda: False).feed(b"10%\r20%") == b"10%\r20%", "a bar is shown at once"


def test_after_ctrl_c_only_our_own_lines_are_shown(tmp_path: Path) -> None:
    child = (
        "import signal, sys, time\n"
        "def stop(*_):\n"
        "    print('> saved', flush=True)\n"
        "    raise RuntimeError('torchrun')\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    launcher = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from megatron_patch.launch.process import Command, supervise\n"
        f"command = Command((sys.executable, '-c', {child!r}), {{}})\n"
        "outcome = supervise(command, os.environ, Path('log'))\n"
        "sys.exit(outcome.status if outcome.interrupted else 99)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert process.stdout.read() == "> saved\n"
    assert "RuntimeError" in (tmp_path / "log").read_text()
