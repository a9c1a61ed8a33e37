"""What a run refuses before its first step: in words, on every rank, leaving all as it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_patch.convert.dist_io import read_checkpoint
from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import COMMON, write_corpus, write_model

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Runs:
    """Finished one-step runs: `normed` with QK-norm, `plain` without, `stuck` in a poor format."""

    folder: Path
    ranks: RankServer

    def command(self, model: str, output: Path, *more: str) -> list[str]:
        return [
            *("--hf-model", str(self.folder / f"hf-{model}")),
            *("--data-path", str(self.folder / "corpus"), "--output-dir", str(output)),
            *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "2"),
            *("--train-iters", "1", "--lr", "1e-3", "--warmup-steps", "0", *more),
        ]

    def train(self, job: Path, world: int, argv: list[str]) -> tuple[list[int], list[str]]:
        """Exit status and log of every rank."""
        result = self.ranks.run("tests.dist.jobs:train", world, job, argv=argv)
        return [v["status"] for v in result.values], [log.read_text() for log in result.logs]

    def refused(self, job: Path, argv: list[str], *words: str) -> None:
        """Two ranks end with status 2, one `error:` each, and no checkpoint is touched."""
        before = files(self.folder)
        status, logs = self.train(job, 2, argv)
        assert status == [2, 2]
        for log in logs:
            (line,) = [x for x in log.splitlines() if x.startswith("error: ")]
            for word in words:
                assert word in line, line
            assert "Traceback" not in log
        assert files(self.folder) == before
        output = Path(argv[argv.index("--output-dir") + 1])
        assert not list(output.glob("checkpoints/iter_*")) or output.parent == self.folder
        if (output / metrics.FILE).exists() and output.parent != self.folder:
            assert (output / metrics.FILE).read_bytes() == b""


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a checkpoint and of every metrics file below `folder`."""
    found = [*folder.glob("*/checkpoints/**/*"), *folder.glob(f"*/{metrics.FILE}")]
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in found if p.is_file()}


@pytest.fixture(scope="module")
def runs(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    runs = Runs(folder, ranks)
    write_corpus(folder / "corpus")
    small = COMMON | {"num_hidden_layers": 2, "tie_word_embeddings": False}
    write_model(folder / "hf-normed", small | {"model_type": "qwen3"})
    write_model(folder / "hf-plain", small | {"model_type": "llama"})
    for name, model, more in (
        ("normed", "normed", ()),
        ("plain", "plain", ()),
        ("stuck", "plain", ("--no-dist-ckpt-optim-fully-reshardable",)),
    ):
        argv = runs.command(model, folder / name, *more)
        assert runs.train(folder / f"job-{name}", 1, argv)[0] == [0]
    return runs


def test_a_checkpoint_that_lacks_weights(runs: Runs, tmp_path: Path) -> None:
    start = ("--init-from", str(runs.folder / "plain"))
    runs.refused(
        tmp_path / "job",
        runs.command("normed", tmp_path / "run", *start),
        "the checkpoint lacks 2 that the model has",
        "decoder.layers.self_attention.k_layernorm.weight",
        "--hf-model",
    )


def test_a_checkpoint_with_weights_that_the_model_lacks(runs: Runs, tmp_path: Path) -> None:
    start = ("--init-from", str(runs.folder / "normed"))
    runs.refused(
        tmp_path / "job",
        runs.command("plain", tmp_path / "run", *start),
        "it holds 2 that the model lacks",
        "decoder.layers.self_attention.q_layernorm.weight",
    )


def test_going_on_with_another_model(runs: Runs, tmp_path: Path) -> None:
    argv = runs.command("plain", runs.folder / "normed", "--train-iters", "2")
    runs.refused(tmp_path / "job", argv, "the model is another one than at the last start")


def test_a_mistyped_load(runs: Runs, tmp_path: Path) -> None:
    typo = str(runs.folder / "plain" / "checkpoint")
    argv = runs.command("plain", tmp_path / "run", "--load", typo)
    runs.refused(tmp_path / "job", argv, f"--load {typo}", "no checkpoint there")
    assert not (tmp_path / "run").exists()


def test_settings_that_upstream_refuses(runs: Runs, tmp_path: Path) -> None:
    """Its messages, without a traceback; a bare assertion shows the condition."""
    recompute = ("--recompute-granularity", "selective", "--recompute-modules", "moe_act")
    argv = runs.command("plain", tmp_path / "run", *recompute)
    runs.refused(tmp_path / "job", argv, "Megatron-Core refuses", "moe_act in recompute_modules")
    argv = runs.command("plain", tmp_path / "run", "--weight-decay-incr-style", "linear")
    runs.refused(tmp_path / "job", argv, "Megatron-Core refuses", "start_weight_decay is not None")
    # Long after the parser, with the ranks connected and the model built.
    argv = runs.command("plain", tmp_path / "run", "--lr-decay-style", "WSD")
    runs.refused(tmp_path / "job", argv, "Megatron-Core refuses", "wsd_decay_steps is not None")
    kept = (tmp_path / "run" / "logs" / "traceback-rank1.txt").read_text()
    assert kept.startswith("Traceback") and "AssertionError" in kept


def test_weights_from_nowhere(runs: Runs, tmp_path: Path) -> None:
    for place, words in (
        (tmp_path / "nowhere", "no such directory"),
        (runs.folder, "neither a Megatron checkpoint"),
    ):
        argv = runs.command("plain", tmp_path / "run", "--init-from", str(place))
        runs.refused(tmp_path / "job", argv, f"--init-from {place}", words)
        assert not (tmp_path / "run").exists()


def test_weights_of_other_shapes(runs: Runs, tmp_path: Path) -> None:
    config = json.loads((runs.folder / "hf-plain" / "config.json").read_text())
    write_model(runs.folder / "hf-wide", config | {"intermediate_size": 192})
    start = ("--init-from", str(runs.folder / "plain"))
    runs.refused(
        tmp_path / "job",
        runs.command("wide", tmp_path / "run", *start),
        "decoder.layers.mlp.linear_fc1.weight is [2, 256, 64], this model's is [2, 384, 64]",
    )


def test_a_damaged_checkpoint(runs: Runs, tmp_path: Path) -> None:
    """Two ranks name the file: one that is cut off, and one with a record overwritten."""
    source = runs.folder / "plain" / "checkpoints"
    for kind, words in (("cut", "are needed"), ("zeroed", "is no tensor")):
        copy = tmp_path / kind
        shutil.copytree(source, copy)
        (shard,) = copy.glob("iter_0000001/*.distcp")
        content = bytearray(shard.read_bytes())
        if kind == "cut":
            del content[-1000:]
        else:
            record = read_checkpoint(shard.parent).tensors["output_layer.weight"].chunks[0].record
            content[record.offset : record.offset + 500] = bytes(500)
        shard.write_bytes(content)
        argv = runs.command("plain", tmp_path / f"run-{kind}", "--init-from", str(copy))
        runs.refused(tmp_path / f"job-{kind}", argv, str(shard), words)


def test_a_schedule_that_the_checkpoint_does_not_have(runs: Runs, tmp_path: Path) -> None:
    more = ("--train-iters", "2", "--no-override-opt-param-scheduler")
    argv = runs.command("plain", runs.folder / "plain", *more)
    runs.refused(
        tmp_path / "job",
        argv,
        "total number of iterations is 2, this command line's is 4",
        "--no-override-opt-param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
    )


def test_a_tracker_file_that_was_cut_off(runs: Runs, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "iter_0000001" / "left").mkdir(parents=True)
    (checkpoints / TRACKER).write_text("")
    before = sorted(checkpoints.rglob("*"))
    result = runs.train(tmp_path / "job", 2, runs.command("plain", tmp_path / "run"))
    assert result[0] == [2, 2]
    for log in result[1]:
        (line,) = [x for x in log.splitlines() if x.startswith("error: ")]
        assert f"{checkpoints / TRACKER} names no iteration" in line and "iter_0000001" in line
    assert sorted(checkpoints.rglob("*")) == before
    assert (checkpoints / TRACKER).read_text() == ""


def test_optimizer_states_that_cannot_change_layout(runs: Runs, tmp_path: Path) -> None:
    stuck = runs.folder / "stuck"
    argv = runs.command("plain", stuck, "--train-iters", "3", "--tp", "2")
    runs.refused(
        tmp_path / "job",
        argv,
        "--tp 2 --pp 1",
        "saved at --tp 1 --pp 1",
        "dp_reshardable",
        "--dist-ckpt-optim-fully-reshardable",
        "--init-from",
    )
    # What it advises works: a step at the old layout, then any layout.
    step = runs.command("plain", stuck, "--train-iters", "2")
    assert runs.train(tmp_path / "job2", 1, step)[0] == [0]
    assert runs.train(tmp_path / "job3", 2, argv)[0] == [0, 0]
    assert [row["iteration"] for row in metrics.read(stuck)] == [1, 2, 3]
