"""The step record: written, torn, restarted, read and drawn."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest

from megatron_patch.training import metrics
from megatron_patch.util import UserError

PNG = b"\x89PNG\r\n\x1a\n"


def recorder(path, **kwargs):
    return metrics.Recorder(path, **{"rank": 0, "world_size": 1, "pipeline": 1, **kwargs})


def record(path, *losses, start=1, **extra):
    writer = recorder(path)
    for i, loss in enumerate(losses, start):
        writer.step(i, {"lm loss": loss}, **extra)
    writer.close()


def losses(path):
    return [(r["iteration"], r["lm loss"]) for r in metrics.read(path)]


def test_a_step_is_one_line_on_disk_at_once(tmp_path):
    import torch

    path = tmp_path / "run" / "metrics.jsonl"
    writer = recorder(path, world_size=4)
    writer.step(
        7,
        {"lm loss": torch.tensor([30.0, 12.0]), "load_balancing_loss": torch.tensor(0.25)},
        tokens=4096,
        grad_norm=None,
        skipped=0,
    )
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]  # before close()
    assert row["iteration"] == 7
    assert row["lm loss"] == 2.5  # the sum over the number of tokens
    assert row["load_balancing_loss"] == 0.25
    assert row["skipped"] == 0
    assert "grad_norm" not in row
    assert row["seconds"] > 0
    assert row["tokens_per_second"] == pytest.approx(4096 / row["seconds"], rel=0.05)
    assert row["tokens_per_second_per_rank"] == pytest.approx(
        row["tokens_per_second"] / 4, rel=0.01
    )
    writer.close()
    writer.close()


def test_the_last_step_is_evaluated_twice_and_recorded_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = recorder(path)
    for step, name in ((2, "validation"), (4, "validation"), (4, "validation"), (4, "test")):
        writer.evaluation(step, name, {"lm loss": 1.0})
    writer.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["iteration"], r["evaluation"]) for r in rows] == [
        (2, "validation"),
        (4, "validation"),
        (4, "test"),
    ]


def test_no_token_is_no_division_by_zero(tmp_path):
    import torch

    path = tmp_path / "metrics.jsonl"
    record(path, torch.tensor([0.0, 0.0]))
    assert losses(path) == [(1, 0.0)]


def test_only_rank_zero_writes(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    writer = recorder(path, rank=1, world_size=2, echo=True)
    writer.step(1, {"lm loss": 1.0})
    writer.evaluation(1, "validation", {"lm loss": 1.0})
    writer.close()
    assert not path.exists()
    assert capsys.readouterr().out == ""


def test_echo_for_runs_over_several_nodes(tmp_path, capsys):
    writer = recorder(None, echo=True)
    writer.step(3, {"lm loss": 2.5})
    writer.evaluation(3, "validation", {"lm loss": 2.25})
    out = capsys.readouterr().out
    assert "iteration 3 | lm loss: 2.500000E+00 |" in out
    assert "iteration 3 | validation | lm loss: 2.250000E+00" in out


def test_evaluations_are_kept_apart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = recorder(path)
    writer.step(1, {"lm loss": 2.0})
    writer.evaluation(1, "validation", {"lm loss": 3.0})
    writer.close()
    assert losses(path) == [(1, 2.0)]
    assert json.loads(path.read_text().splitlines()[1])["evaluation"] == "validation"


# --- restarts ---------------------------------------------------------------------------------


def test_after_a_restart_the_last_record_of_a_step_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record(path, 5.0, 4.0, 3.0)
    record(path, 3.5, 2.5, start=3)  # step 3 again, from the checkpoint of step 2
    assert losses(path) == [(1, 5.0), (2, 4.0), (3, 3.5), (4, 2.5)]
    assert len(path.read_text().splitlines()) == 5, "nothing is overwritten"


def test_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record(path, 5.0, 4.0)
    whole = path.read_bytes()
    for cut in (1, 2, 10, 30):
        path.write_bytes(whole[:-cut])
        # Without its line break alone the record is whole.
        assert losses(path) == [(1, 5.0), (2, 4.0)][: 2 if cut == 1 else 1]


@pytest.mark.parametrize("kept", [0, 10])
def test_restart_after_a_torn_line(tmp_path, kept):
    """The next record is not glued to the fragment."""
    path = tmp_path / "metrics.jsonl"
    record(path, *([5.0] * kept))
    with open(path, "ab") as file:
        file.write(b'{"iteration":11,"lm lo')
    record(path, 4.0, 3.0, start=11)
    assert losses(path) == [(i + 1, 5.0) for i in range(kept)] + [(11, 4.0), (12, 3.0)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record(path, 5.0, 4.0, 3.0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:9], lines[2], ""]))
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not JSON"):
        metrics.read(path)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="no such file; a run directory holds one after its first"):
        metrics.read(tmp_path)


# --- values that are no numbers ---------------------------------------------------------------


def test_nan_is_recorded_as_such_and_left_out_of_the_curve(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = recorder(path)
    for step, loss in enumerate((3.0, math.nan, math.inf, 2.0), 1):
        bad = pytest.raises(UserError, match=f"step {step}: lm loss is")
        with contextlib.nullcontext() if math.isfinite(loss) else bad:
            writer.step(step, {"lm loss": loss})
    writer.close()
    rows = metrics.read(path)
    assert [r["lm loss"] for r in rows] == [3.0, "nan", "inf", 2.0]
    assert "lm loss 3.000 (step 1) -> 2.000 (step 4)" in metrics.summary(rows)
    metrics.draw([("run", rows)], tmp_path / "loss.png", "lm loss")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_summary():
    rows = [
        {"iteration": i, "lm loss": loss, "tokens_per_second": speed}
        for i, loss, speed in ((1, 6.0, 10.0), (2, 5.0, 1000.0), (3, 4.0, 2000.0))
    ]
    assert metrics.summary(rows) == (
        "lm loss 6.000 (step 1) -> 4.000 (step 3), 1,000 tokens/s (median)"
    )
    assert metrics.summary([]) == "no step recorded"


# --- plot -------------------------------------------------------------------------------------


def test_plot(tmp_path, capsys, monkeypatch):
    for name, values in (("a", (3.0, 2.0)), ("b", (3.0, 2.5))):
        (tmp_path / name).mkdir()
        record(tmp_path / name / "metrics.jsonl", *values, tokens=64)
    output = tmp_path / "both.png"
    arguments = [str(tmp_path / "a"), str(tmp_path / "b" / "metrics.jsonl")]
    assert metrics.main([*arguments, "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    assert output.read_bytes().startswith(PNG)
    before = output.read_bytes()
    assert metrics.main([*arguments, "--output", str(output), "--key", "tokens"]) == 0
    assert output.read_bytes() != before
    monkeypatch.chdir(tmp_path / "a")
    assert metrics.main(["."]) == 0
    assert (tmp_path / "a" / "loss.png").exists()


def test_plot_of_a_validation_set(tmp_path, capsys):
    writer = recorder(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.step(step, {"lm loss": 2.0})
        writer.evaluation(step, "validation-web", {"lm loss": 3.0 - step})
    writer.close()
    output = tmp_path / "web.png"
    options = ["--key", "lm loss validation-web", "--output", str(output)]
    assert metrics.main([str(tmp_path), *options]) == 0
    assert output.read_bytes().startswith(PNG)
    assert metrics.evaluations(tmp_path) == {1: 2.0, 2: 1.0}


def test_a_jump_is_told_with_its_micro_batch(tmp_path, capsys):
    jumped = []
    writer = recorder(tmp_path / "metrics.jsonl", jumped=jumped.append)

    def step(number, loss):
        writer.suspects += [
            metrics.MicroBatch(x, lambda n=n: f"sequence {number}{n}")
            for n, x in (("a", loss - 1), ("b", loss + 1))
        ]
        wanted = writer.jump is not None  # all ranks agree on rank 0's word
        writer.step(number, {"lm loss": loss}, lambda: writer.look_back(wanted) or {})

    for number in range(1, 41):
        step(number, 9.0 if number == 30 else 3.0 + 0.01 * (number % 3))
    step(41, 3.2)  # within a tenth: no jump
    step(42, 3.0)
    writer.close()
    rows = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (jump,) = [r for r in rows if r.get("event") == "jump"]
    assert (jump["iteration"], jump["loss"], jump["samples"]) == (30, 9.0, "sequence 30b")
    assert jump["micro_batch_loss"] == 10.0 and jump["median"] == pytest.approx(3.01)
    assert jumped == [30] and metrics.jumps(tmp_path) == [30]
    assert len(metrics.read(tmp_path)) == 42
    assert "highest micro-batch: rank 0, sequence 30b (loss 10.0000)" in capsys.readouterr().out


def test_a_jump_of_the_gradient_norm_alone(tmp_path, capsys):
    jumped = []
    writer = recorder(tmp_path / "metrics.jsonl", jumped=jumped.append)
    for number in range(1, 61):
        writer.suspects.append(metrics.MicroBatch(3.0 + number / 100, lambda n=number: f"no. {n}"))
        # It varies and falls as in real runs; from step 50 on it is at another level for good.
        norm = 2.0 / number**0.5 + 0.3 * (number % 4) + 10.0 * (number >= 50)
        norm = {30: 8.0, 40: float("inf")}.get(number, norm)
        wanted = writer.jump is not None
        later = lambda w=wanted: writer.look_back(w) or {}  # noqa: E731
        writer.step(number, {"lm loss": 3.0}, later, grad_norm=norm, skipped=int(number == 40))
    writer.close()
    rows = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [r for r in rows if r.get("event") == "jump"]
    assert [e["iteration"] for e in events] == jumped == [30, 50, 51, 52, 53, 54]
    assert events[0]["gradient norm"] == 8.0 and "loss" not in events[0]
    assert events[0]["samples"] == "no. 30"
    assert "step 30: the gradient norm jumped to 8.0000 from" in capsys.readouterr().out


def test_plot_refusals(tmp_path, capsys):
    assert metrics.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    record(tmp_path / "metrics.jsonl", 3.0)
    assert metrics.main([str(tmp_path), "--key", "loss"]) == 2
    error = capsys.readouterr().err
    assert "--key 'loss': the runs hold" in error
    assert "lm loss" in error
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("line", ["[1]", "3", '{"a": 1}', '{"iteration": "x"}'])
def test_a_file_of_other_things(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: no record of a step"):
        metrics.read(path)


@pytest.mark.parametrize(
    ("loss", "norm", "skipped", "words"),
    [
        (
            float("nan"),
            1.0,
            0,
            "7: lm loss is nan, the gradient norm is 1.0, rank 0, row of line 3",
        ),
        (2.0, float("inf"), 0, "the gradient norm is inf"),
        (2.0, float("inf"), 1, None),  # fp16 lowers its scale and goes on
        (2.0, None, 0, None),
    ],
)
def test_a_step_that_is_no_number_ends_the_run(
    tmp_path: Path, loss: float, norm: float | None, skipped: int, words: str | None
) -> None:
    recorder = metrics.Recorder(tmp_path / metrics.FILE, rank=0, world_size=1, pipeline=1)
    recorder.suspects += [
        metrics.MicroBatch(1.0, lambda: "row of line 2"),
        metrics.MicroBatch(loss, lambda: "row of line 3"),
    ]
    if words is None:
        recorder.step(7, {"lm loss": loss}, grad_norm=norm, skipped=skipped)
    else:
        with pytest.raises(UserError, match=words):
            recorder.step(7, {"lm loss": loss}, grad_norm=norm, skipped=skipped)
    recorder.close()
    assert not recorder.suspects
    assert len(metrics.read(tmp_path)) == 1, "the step is on record either way"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_records_wait_for_room(tmp_path, capsys):
    path = tmp_path / metrics.FILE
    recorder = metrics.Recorder(path, rank=0, world_size=1, pipeline=1)
    room, recorder._file = recorder._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    recorder.step(1, {"lm loss": 2.0})
    recorder.step(2, {"lm loss": 1.5})
    assert capsys.readouterr().out.count("No space left on device; its records are kept") == 1
    recorder._file.close()
    recorder._file = room
    recorder.step(3, {"lm loss": 1.0})
    assert "none is lost" in capsys.readouterr().out
    recorder.close()
    assert [row["lm loss"] for row in metrics.read(path)] == [2.0, 1.5, 1.0]
