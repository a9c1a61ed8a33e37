"""Runs functions on several CPU ranks, forked from one parent that has imported everything.

Importing torch and megatron takes seconds; a rank forked from a warm parent starts in
milliseconds. `RankServer` starts that parent (this file as a program) once per test session. The
parent never runs a tensor operation, so its forks inherit no thread pool.

A job is a function `f(rank, world_size, directory, **kwargs)` named as `module:function`; its
return value must be JSON-able. torchrun itself is tested once, in `test_torchrun.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RankFailure(AssertionError):
    """A rank failed or ran past its time; holds the ends of the ranks' logs."""


@dataclass
class Result:
    """What a job gave: the ranks' return values and their log files."""

    values: list[Any]
    logs: list[Path]


class RankServer:
    """The warm parent, from the tests' side."""

    def __init__(self, platform: str = "cpu") -> None:
        """Start the parent.

        Args:
            platform: `cpu`, or `cuda`: then the parent imports Transformer Engine too, never
                touches a device, and applies no patch; each job's entry point does.
        """
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.harness", platform],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        function: str,
        world_size: int,
        directory: Path,
        *,
        timeout: float = 300,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Result:
        """Run `function` on `world_size` ranks.

        Args:
            function: `module:function`.
            world_size: number of ranks.
            directory: a new folder for logs and results; also handed to the function.
            timeout: seconds until all ranks are killed.
            env: more environment for the ranks.
            **kwargs: JSON-able arguments of the function.

        Raises:
            RankFailure: a rank raised, exited, or ran past the time.
        """
        directory.mkdir(parents=True, exist_ok=True)
        job = {
            "function": function,
            "world_size": world_size,
            "directory": str(directory),
            "timeout": timeout,
            "env": env or {},
            "kwargs": kwargs,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout + 120)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RankFailure(f"the warm parent is gone (status {self._process.poll()})")
        answer = json.loads(line)
        logs = [directory / f"rank{r}.log" for r in range(world_size)]
        if answer["bad"]:
            tails = [
                f"--- rank {r}: {why}\n" + "\n".join(logs[r].read_text().splitlines()[-25:])
                for r, why in answer["bad"]
            ]
            raise RankFailure(f"{function} on {world_size} ranks\n" + "\n".join(tails))
        values = [json.loads((directory / f"rank{r}.json").read_text()) for r in range(world_size)]
        return Result(values, logs)

    def left(self) -> list[str]:
        """Command lines of what the ranks left behind: the parent's session without the parent."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
                line = stat.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended meanwhile
            mine = int(fields[3]) == self._process.pid and fields[0] != "Z"
            if mine and int(stat.parent.name) != self._process.pid:
                found.append(f"{stat.parent.name} (child of {fields[1]}): {line}")
        return found

    def close(self) -> None:
        """End the parent and whatever it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


# --- the parent's side -------------------------------------------------------------------------


def _child(job: dict[str, Any], rank: int, port: int) -> None:
    directory = Path(job["directory"])
    log = os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["world_size"]),
        LOCAL_WORLD_SIZE=str(job["world_size"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **job["env"],
    )
    status = 1
    try:
        import importlib

        module, _, name = job["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        value = function(rank, job["world_size"], directory, **job["kwargs"])
        (directory / f"rank{rank}.json").write_text(json.dumps(value))
        status = 0
    except SystemExit as error:
        print(f"SystemExit: {error.code}")
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve_one(job: dict[str, Any]) -> dict[str, Any]:
    port = _free_port()
    ranks: dict[int, int] = {}
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            _child(job, rank, port)
        ranks[pid] = rank
    deadline = time.monotonic() + job["timeout"]
    bad: list[tuple[int, str]] = []
    waiting = dict(ranks)
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in waiting:
            rank = waiting.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code:
                bad.append((rank, f"exit status {code}"))
                # The others would wait for it until their collectives time out.
                deadline = min(deadline, time.monotonic() + 5)
            continue
        if time.monotonic() > deadline:
            for pid, rank in waiting.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                if not bad or bad[0][1] == "ran past its time":
                    bad.append((rank, "ran past its time"))
            break
        time.sleep(0.02)
    return {"bad": bad}


def _warm_cpu() -> None:
    from megatron_patch.platform import cpu

    cpu.enable()
    import megatron.training.training  # noqa: F401
    import torch

    from megatron_patch.patches import registry
    from megatron_patch.platform import torch_backend

    torch_backend.enable()
    registry.apply()
    torch.set_num_threads(1)


def _warm_cuda() -> None:
    import contextlib

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with contextlib.suppress(ImportError):
        import transformer_engine.pytorch  # noqa: F401
    import megatron.training.training  # noqa: F401
    import torch

    assert not torch.cuda.is_initialized(), "an import touched the GPU: ranks could not be forked"


#: What a run imports on its way, and each rank would import again.
_ON_THE_WAY = (
    "megatron_patch.pretrain",
    "megatron_patch.sft",
    "megatron_patch.training.run",
    "megatron_patch.training.step",
    "megatron_patch.training.sft",
    "megatron_patch.training.parallel",
    "megatron_patch.convert.load",
    "megatron_patch.convert.plan",
    "megatron_patch.data.pretrain_dataset",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.tokenizers.text.models",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "matplotlib.pyplot",
    "mpl_toolkits.mplot3d",
)


def _warm_any() -> None:
    import gc
    import importlib
    from functools import cache

    os.environ.setdefault("MPLBACKEND", "agg")
    for name in _ON_THE_WAY:
        importlib.import_module(name)

    # Each parser reads the help of its flags out of upstream's sources, the same every time.
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    of_class = cache(
        lambda source: read(ArgumentGroupFactory.__new__(ArgumentGroupFactory), source)
    )
    ArgumentGroupFactory._get_field_docstrings = lambda self, source: dict(of_class(source))
    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    # A rank's collector would touch, and so copy, every page of what was imported here.
    gc.collect()
    gc.freeze()


def serve(platform: str) -> None:
    """Import what ranks need, then answer jobs from standard input until it ends."""
    import logging

    logging.disable(logging.INFO)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is not an answer
    _warm_cuda() if platform == "cuda" else _warm_cpu()
    _warm_any()

    for line in sys.stdin:
        answers.write(json.dumps(_serve_one(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
