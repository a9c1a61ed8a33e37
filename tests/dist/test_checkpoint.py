"""Checkpoints of a run: `ckpt show` and `verify`, which ones stay, a save when asked to end."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_patch import cli
from megatron_patch.training import memory, metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import MODELS, write_corpus, write_model

ROOT = Path(__file__).resolve().parents[2]


def _argv(folder: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-model", str(folder / "hf"), "--data-path", str(folder / "corpus")),
        *("--output-dir", str(output), "--seq-length", "64", "--micro-batch-size", "2"),
        *("--global-batch-size", "4", "--lr", "0.01", "--warmup-steps", "0", "--seed", "11"),
        *more,
    ]


@pytest.fixture(scope="module")
def run(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_model(folder / "hf", MODELS["moe"])
    write_corpus(folder / "corpus")
    argv = _argv(folder, folder / "run", "--train-iters", "9", "--save-interval", "2")
    argv += ["--keep-last", "2", "--keep-every", "4", "--tp", "2"]
    ranks.run("tests.dist.jobs:train", 2, folder / "job", argv=argv)
    return folder / "run"


def test_the_newest_and_the_milestones_stay(run: Path) -> None:
    names = sorted(p.name for p in (run / "checkpoints").glob("iter_*"))
    assert names == ["iter_0000004", "iter_0000008", "iter_0000009"]


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call("ckpt", ["show", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["samples"], found["optimizer"]) == (9, 36, "fully reshardable")
    assert (found["layout"]["ranks"], found["layout"]["TP"], found["layout"]["PP"]) == (2, 2, 1)
    # fp32: a master and two moments a weight, where they are kept apart.
    assert found["optimizer_bytes"] > found["weights_bytes"] > 0
    written = found["optimizer_bytes"] + found["weights_bytes"]
    values = json.loads((run / "resolved_args.json").read_text())["values"]
    # The tiny tensors' archives have kilobytes of their own.
    assert 0.85 * written < memory.checkpoint_bytes(values) <= written
    assert cli.call("ckpt", ["show", str(run)]) == 0
    assert re.search(r"iter_0000009 .* latest\n", capsys.readouterr().out)


def test_show_lists_what_is_missing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "iter_0000009"
    shutil.copytree(run / "checkpoints" / "iter_0000009", step)
    first, second = sorted(step.glob("__*.distcp"))
    os.truncate(second, 100)
    assert cli.call("ckpt", ["show", str(step)]) == 1
    out = capsys.readouterr().out
    assert f"INCOMPLETE {second} has 100 bytes," in out
    assert "step            9" in out and "optimizer" in out
    first.unlink()
    second.unlink()
    assert cli.call("ckpt", ["show", str(step), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["missing"][:2] == [f"{first} is missing", f"{second} is missing"]
    assert found["step"] == 9 and found["weights_bytes"] > 0, "from what is there"


def test_every_flipped_bit_is_found(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "iter_0000009"
    shutil.copytree(run / "checkpoints" / "iter_0000009", step)
    assert cli.call("ckpt", ["verify", str(step)]) == 0
    verdict = capsys.readouterr().out
    assert "PASS" in verdict and "without a checksum" not in verdict
    from megatron_patch.convert import dist_io
    from megatron_patch.convert.rows import Files

    found = dist_io.read_checkpoint(step)
    rng, files = random.Random(5), Files()
    for key in rng.sample(sorted(found.tensors), 5):
        record = rng.choice(found.tensors[key].chunks).record
        data = dist_io._find_data(files, record, key)
        at = data.offset + rng.randrange(8)
        content = bytearray(record.path.read_bytes())
        content[at] ^= 1 << rng.randrange(8)
        before = record.path.read_bytes()
        record.path.write_bytes(content)
        assert cli.call("ckpt", ["verify", str(step)]) == 1
        out = capsys.readouterr().out
        assert f"DAMAGED {record.path}: {key}: " in out and "1 damaged" in out
        record.path.write_bytes(before)
    os.truncate(record.path, record.path.stat().st_size - 1)
    assert cli.call("ckpt", ["verify", str(step)]) == 2
    assert f"{record.path} has" in capsys.readouterr().err


def test_a_start_that_verifies_refuses_a_flipped_bit(
    ranks: RankServer, run: Path, tmp_path: Path
) -> None:
    from megatron_patch.convert import dist_io

    output = tmp_path / "run"
    shutil.copytree(run, output)
    more = ("--train-iters", "10", "--keep-last", "4", "--verify-checkpoint")
    argv = _argv(run.parent, output, *more)
    record = dist_io.read_checkpoint(output / "checkpoints" / "iter_0000009").tensors[
        "output_layer.weight"
    ]
    shard = record.chunks[0].record
    content = bytearray(shard.path.read_bytes())
    content[shard.offset + shard.length // 2] ^= 1
    shard.path.write_bytes(content)
    refused = ranks.run("tests.dist.jobs:train", 1, tmp_path / "a", argv=argv)
    log = refused.logs[0].read_text()
    assert refused.values == [{"status": 2}] and "Traceback" not in log
    assert f"error: {shard.path}: output_layer.weight: bytes of" in log, log
    assert "takes iter_0000008" in log
    content[shard.offset + shard.length // 2] ^= 1
    shard.path.write_bytes(content)
    result = ranks.run("tests.dist.jobs:train", 1, tmp_path / "b", argv=argv)
    assert result.values == [{"status": 0}]
    assert "equal their checksums" in result.logs[0].read_text()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)],
    ids=["TERM", "USR1"],
)
def test_a_notice_saves_and_ends_and_the_command_goes_on(
    run: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """To the launcher alone, as a scheduler sends it."""
    more = ("--train-iters", "4000", "--save-interval", "100000", "--gpus-per-node", "2")
    command = [sys.executable, "-m", "megatron_patch.launch", "run", "pretrain", "run.sh", "0"]
    command += _argv(run.parent, tmp_path / "run", *more)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + 120
        while (
            not (tmp_path / "run" / metrics.FILE).exists()
            or len(metrics.read(tmp_path / "run")) < 3
        ):
            assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
            time.sleep(0.1)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert "> stopped at step" in out
    done = metrics.read(tmp_path / "run")[-1]["iteration"]
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == done, out
