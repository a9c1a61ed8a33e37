"""What a run measures of itself: figures of every step, saves by the clock, steps gone wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.data.idxmap import Writer
from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import COMMON, MODELS, write_corpus, write_model


def _argv(model: Path, corpus: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-model", str(model), "--data-path", str(corpus), "--output-dir", str(output)),
        *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
        *("--lr", "0.01", "--min-lr", "0.01", "--warmup-steps", "0", "--seed", "11"),
        *more,
    ]


def _events(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / metrics.FILE).read_text().splitlines())
    return [line for line in lines if line.get("event") == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    write_model(folder / "moe", MODELS["moe"])
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def moe(ranks: RankServer, folder: Path) -> tuple[Path, list[Path]]:
    """Two stages, a capacity that drops tokens, saves beside the training and by the clock."""
    more = ("--train-iters", "4", "--pp", "2", "--async-save", "--save-every-minutes", "0.0001")
    more += ("--moe-z-loss-coeff", "0.001", "--moe-expert-capacity-factor", "1.0")
    more += ("--profile", "--use-pytorch-profiler", "--profile-step-start", "1")
    more += ("--profile-step-end", "2")
    argv = _argv(folder / "moe", folder / "corpus", folder / "run", *more)
    result = ranks.run("tests.dist.jobs:train", 2, folder / "job", argv=argv)
    assert result.values == [{"status": 0}] * 2
    return folder / "run", result.logs


def test_figures_of_every_step(moe: tuple[Path, list[Path]]) -> None:
    output, logs = moe
    rows = metrics.read(output)
    assert [r["iteration"] for r in rows] == [1, 2, 3, 4]
    last = logs[-1].read_text()
    for row in rows:
        assert row["moe_layers"] == [1, 3, 4], "the second layer is dense"
        for mean, most, load in zip(
            row["moe_mean_tokens"], row["moe_max_tokens"], row["moe_load"], strict=True
        ):
            assert load == pytest.approx(most / mean, abs=1e-3)
            assert most <= 4 * 64, "the capacity: 2 x 64 tokens of 2 choices over 4 experts, x 4"
        # 8 x 64 tokens of 2 choices in 3 layers, those that had no room among them.
        kept = 4 * sum(row["moe_mean_tokens"])
        assert kept + row["moe_dropped_tokens"] == 8 * 64 * 2 * 3
        assert row["moe_dropped_tokens"] > 0
        assert 0 < row["data_wait"] < row["seconds"] and row["model_tflops_per_rank"] > 0
        for name in ("load_balancing_loss", "z_loss"):  # upstream's own line
            said = re.search(rf"iteration +{row['iteration']}/.*?{name}: (\S+)", last)
            # The second line after a start is the mean of two steps.
            if row["iteration"] != 2:
                assert said and row[name] == pytest.approx(float(said[1]), rel=1e-5)
    names = [p.name for p in (output / "tensorboard").iterdir()]
    assert len(names) == 1 and names[0].startswith("events.out.tfevents"), names


def test_a_profile_lands_in_the_run_directory(moe: tuple[Path, list[Path]]) -> None:
    import gzip

    (trace,) = (moe[0] / "torch_profile").iterdir()
    assert trace.name == "rank-0.json.gz", "--profile-ranks is rank 0"
    assert "aten::mm" in gzip.decompress(trace.read_bytes()).decode()


def test_the_board_has_what_the_file_has(moe: tuple[Path, list[Path]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(moe[0] / "tensorboard"))
    board.Reload()
    rows = metrics.read(moe[0])
    for name in ("lm loss", "grad_norm", "learning_rate", "data_wait", "moe_load_max", "z_loss"):
        found = {e.step: e.value for e in board.Scalars(name)}
        assert found == {r["iteration"]: pytest.approx(r[name], rel=1e-5) for r in rows}, name
    assert [e.value for e in board.Scalars("moe_load/layer 3")] == [
        pytest.approx(r["moe_load"][1], rel=1e-5) for r in rows
    ]


def test_the_clock_saves_beside_the_training(moe: tuple[Path, list[Path]]) -> None:
    output, logs = moe
    checkpoints = output / "checkpoints"
    saved = sorted(p.name for p in checkpoints.glob("iter_*"))
    assert saved == [f"iter_{n:07}" for n in (1, 2, 3, 4)]
    assert (checkpoints / "latest").readlink() == Path("iter_0000004")
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    events = _events(output, "save")
    begun = [e["iteration"] for e in events if e.get("asynchronous")]
    done = [e["iteration"] for e in events if "whole_after_seconds" in e]
    assert begun == done == [1, 2, 3, 4]
    assert all(e["save_stall"] <= e["in_all"] for e in events if "in_all" in e)
    # A step's own time is without them, and says how long they took.
    rows = metrics.read(output)
    assert [r["save_stall"] > 0 for r in rows] == [False, True, True, True]
    log = logs[0].read_text()
    assert "checkpoint of step 2 is written beside the training, which stood still for" in log
    assert re.search(r"checkpoint of step 4 is whole \S+ s after its begin; training stood", log)


# --- steps that went wrong ----------------------------------------------------------------------

BAD = 17  # the document


def _odd_corpus(prefix: Path, strange: list[int]) -> None:
    """Forty documents of one token, and one that is not like them."""
    with Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for number in range(40):
            ids = strange if number == BAD else [7] * 95 + [0]
            writer.write(np.array(ids), np.array([len(ids)]), np.array([1]))
        writer.commit()


def test_nan_names_step_rank_and_document(ranks: RankServer, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = COMMON | {"model_type": "qwen3", "num_hidden_layers": 2, "tie_word_embeddings": False}
    model = write_model(tmp_path / "hf", config)
    torch.manual_seed(1)
    weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    weights.get_input_embeddings().weight.data[400] = float("nan")
    weights.float().save_pretrained(model)
    _odd_corpus(tmp_path / "corpus", [400] * 95 + [0])
    more = ("--train-iters", "30", "--init-from", str(model), "--save-interval", "1")
    more += ("--keep-last", "1")
    argv = _argv(model, tmp_path / "corpus", tmp_path / "run", *more)
    result = ranks.run("tests.dist.jobs:train", 2, tmp_path / "job", argv=argv)
    assert result.values == [{"status": 2}] * 2
    errors = [
        [x for x in log.read_text().splitlines() if x.startswith("error:")] for log in result.logs
    ]
    assert len(errors[0]) == 1 and errors[0] == errors[1], "the same on every rank"
    step = int(re.match(r"error: step (\d+): lm loss is nan", errors[0][0])[1])
    assert f"{tmp_path / 'corpus'}, document" in errors[0][0]
    # Sequences of 64 go on into the next document.
    named = re.findall(r"rank (\d), (.*?) \(loss nan\)", errors[0][0])
    assert named and all({str(BAD)} & set(re.findall(r"\d+", text)) for _, text in named)
    rows = metrics.read(tmp_path / "run")
    assert rows[-1]["iteration"] == step and rows[-1]["lm loss"] == "nan"
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    if step > 1:
        assert tracker.read_text() == str(step - 1)


def test_a_jump_is_named_and_the_checkpoint_before_it_stays(
    ranks: RankServer, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "hf", COMMON | {"model_type": "qwen3", "num_hidden_layers": 2})
    ids = np.random.default_rng(3).integers(100, 500, 95).tolist()
    _odd_corpus(tmp_path / "corpus", [*ids, 0])
    more = ("--epochs", "5", "--save-interval", "6", "--keep-last", "1")
    argv = _argv(model, tmp_path / "corpus", tmp_path / "run", *more)
    result = ranks.run("tests.dist.jobs:train", 2, tmp_path / "job", argv=argv)
    assert result.values == [{"status": 0}] * 2
    found = _events(tmp_path / "run", "jump")
    rows = {r["iteration"]: r for r in metrics.read(tmp_path / "run")}
    print(len(rows), [(e["iteration"], e["loss"], e["median"]) for e in found])
    assert found and found == [e for e in found if e["loss"] == rows[e["iteration"]]["lm loss"]]
    for event in found:
        documents = re.findall(r"document ([\d, ]+) from", event["samples"])
        assert any(str(BAD) in text.split(", ") for text in documents), event
        assert event["micro_batch_loss"] >= event["loss"] and event["rank"] in (0, 1)
    assert "the loss jumped to" in result.logs[0].read_text()
    steps = [int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").glob("iter_*")]
    last, jump = max(rows), found[-1]["iteration"]
    assert sorted(steps) == sorted({(jump - 1) // 6 * 6, last})
