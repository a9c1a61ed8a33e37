"""What a second start of a run refuses, converts and says, from the checkpoint alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch.patches.tracker_file import TRACKER
from megatron_patch.training import args, metrics, resume, run
from megatron_patch.training.flags import USER_FLAGS_MARK
from megatron_patch.util import UserError
from tests.unit.checkpoints import write_checkpoint

CONFIG = Path(__file__).parent.parent / "fixtures" / "configs" / "qwen3-0.6b.json"


@pytest.fixture
def hf(tmp_path: Path) -> str:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG.read_text())
    return str(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run directory at step 100 with 800 sequences of 1024 tokens read."""
    write_checkpoint(tmp_path / "out" / "checkpoints")
    return tmp_path / "out"


def plan(hf: str, out: Path | str, *flags: str) -> args.Plan:
    base = f"--hf-model {hf} --output-dir {out} --mock-data --lr 1e-3 --seq-length 1024".split()
    if not any(f.startswith("--train") for f in flags):
        base += ["--train-iters", "200"]
    return args.resolve([*base, "--gbs", "8", USER_FLAGS_MARK, *flags], device="cpu", world_size=1)


# --- batch and length -------------------------------------------------------------------------


def test_the_same_batch_needs_no_words(hf: str, out: Path) -> None:
    result = plan(hf, out)
    start = result.start
    assert start is not None
    assert (start.folder.name, start.iteration, start.samples) == ("iter_0000100", 100, 800)
    assert result.values["train_iters"] == 200 and result.values["lr_decay_iters"] is None
    assert not any("batch has changed" in note for note in result.notes)


@pytest.mark.parametrize(
    ("flags", "samples", "left", "total"),
    [
        ("--gbs 16 --train-iters 100", 1600, 50, 150),
        ("--gbs 16 --train-samples 1600", 1600, 50, 150),
        ("--gbs 16 --train-tokens 1638400", 1600, 50, 150),
        ("--gbs 4 --train-tokens 1638400", 1600, 200, 300),
        ("--gbs 7 --train-samples 1600", 1603, 114, 214),
        ("--gbs 16 --train-iters 20", 320, 0, 100),
    ],
)
def test_another_batch_goes_on_by_sequences(
    hf: str, out: Path, flags: str, samples: int, left: int, total: int
) -> None:
    result = plan(hf, out, *flags.split())
    values, length = result.values, result.run
    assert length is not None and (length.samples, length.iters) == (samples, total)
    assert values["train_iters"] == total and values["train_samples"] is None
    assert "--train-iters" not in result.megatron_argv()
    batch = values["global_batch_size"]
    assert values["lr_decay_iters"] * batch == samples, "the schedule ends with the last sequence"
    assert values["lr_warmup_iters"] == 0
    assert values["lr_warmup_fraction"] * samples == pytest.approx(80), "the warm-up as it was"
    (note,) = [n for n in result.notes if "batch has changed" in n]
    assert f"changed to {batch} sequences (--global-batch-size 8 would keep it)" in note
    assert "800 were read in 100 steps" in note and f"{left} more steps" in note
    assert (run.finished(result) == 100) == (left == 0)


def test_a_changed_batch_stays_converted(hf: str, tmp_path: Path) -> None:
    """The next start has the new batch too, and its steps still do not make its sequences."""
    out = tmp_path / "later"
    write_checkpoint(out / "checkpoints", 120, batch=16, consumed_train_samples=1120)
    result = plan(hf, out, "--gbs", "16", "--train-samples", "1600")
    assert result.values["train_iters"] == 120 + (1600 - 1120) // 16
    assert any("changed to 16 sequences: 1120 were read" in note for note in result.notes)


def test_another_sequence_length_is_refused(hf: str, out: Path) -> None:
    with pytest.raises(UserError, match=r"--seq-length 2048, but .* at 1024: .*--init-from"):
        plan(hf, out, "--seq-length", "2048")


def test_another_batch_in_a_ramp_is_refused(hf: str, out: Path) -> None:
    ramp = ("--rampup-batch-size", "4", "4", "640", "--train-samples", "1600")
    plan(hf, out, *ramp)
    with pytest.raises(UserError, match=r"--global-batch-size 16, .* at 8, and it changes"):
        plan(hf, out, "--gbs", "16", *ramp)


def test_a_restarted_schedule_ends_with_the_run(hf: str, out: Path) -> None:
    result = plan(hf, out, "--restart-schedule-at", "100", "--warmup-steps", "5")
    assert result.values["lr_decay_iters"] == 100 and result.values["train_iters"] == 200
    assert any("restarted at step 100: 5 steps of warm-up" in note for note in result.notes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--restart-schedule-at 101", "has trained 100 steps"),
        ("--restart-schedule-at 0", "has trained 100 steps"),
        ("--restart-schedule-at 100 --train-iters 100", "ends at step 100"),
        ("--restart-schedule-at 100 --gbs 16", "800 sequences in 100 steps are not 16 each"),
        ("--restart-schedule-at 100 --warmup-steps 150", "--warmup-steps 150 against 100 steps"),
        ("--restart-schedule-at 100 --use-checkpoint-opt-param-scheduler", "contradict"),
    ],
)
def test_a_schedule_that_cannot_be_restarted(hf: str, out: Path, flags: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(hf, out, *flags.split())


def test_a_restarted_schedule_stays_so(hf: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint yet"):
        plan(hf, tmp_path / "new", "--restart-schedule-at", "1")
    later = tmp_path / "later"
    write_checkpoint(later / "checkpoints", 120, restart_schedule_at=100)
    with pytest.raises(UserError, match="keep --restart-schedule-at 100"):
        plan(hf, later)
    assert plan(hf, later, "--restart-schedule-at", "100").values["lr_decay_iters"] == 100


# --- loading in part --------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_loading_in_part_is_no_resume(hf: str, out: Path, tmp_path: Path, flag: str) -> None:
    with pytest.raises(UserError, match=rf"{flag}: .*--init-from with a new --output-dir"):
        plan(hf, out, flag)


def test_finetune_needs_something_to_start_from(hf: str, out: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--finetune has nothing to start from"):
        plan(hf, tmp_path / "new", "--finetune")
    result = plan(hf, tmp_path / "new", "--load", str(out / "checkpoints"), "--finetune")
    assert any("--init-from says the same" in note for note in result.notes)


def test_rng_and_missing_optimizer(hf: str, out: Path, tmp_path: Path) -> None:
    assert any("--no-load-rng" in note for note in plan(hf, out, "--no-load-rng").notes)
    poor = tmp_path / "poor"
    write_checkpoint(poor / "checkpoints", no_save_optim=True)
    with pytest.raises(UserError, match="saved with --no-save-optim"):
        plan(hf, poor)


# --- files that are gone or damaged -----------------------------------------------------------


def test_a_deleted_tracker_file(hf: str, out: Path) -> None:
    tracker = out / "checkpoints" / TRACKER
    tracker.unlink()
    with pytest.raises(UserError) as caught:
        plan(hf, out)
    assert f"{tracker} is missing" in str(caught.value)
    assert f"echo 100 > {tracker}" in str(caught.value)
    # An unfinished save is no reason: a first save that was cut off leaves nothing else.
    (out / "checkpoints" / "iter_0000100" / "metadata.json").unlink()
    assert plan(hf, out).start is None


@pytest.mark.parametrize(("text", "words"), [("", "names no iteration"), ("x", "names no iter"),
                                             ("7", "iter_0000007 is not there")])  # fmt: skip
def test_a_tracker_file_that_names_nothing(hf: str, out: Path, text: str, words: str) -> None:
    (out / "checkpoints" / TRACKER).write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        plan(hf, out)
    assert "iter_0000100" in str(caught.value)


DAMAGE = {
    ".metadata missing": ".metadata is missing",
    ".metadata cut": ".metadata: cannot be read",
    "metadata.json missing": ".metadata without metadata.json",
    "metadata.json cut": "names no sharded_backend",
    "__0_0.distcp missing": "__0_0.distcp is missing",
    "__0_0.distcp cut": "are needed",
    "__0_0.distcp zeroed": "cannot be read",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("use", ["resume", "--init-from", "--load"])
def test_a_damaged_checkpoint_is_named(
    hf: str, out: Path, tmp_path: Path, damage: str, use: str
) -> None:
    name, _, what = damage.partition(" ")
    file = out / "checkpoints" / "iter_0000100" / name
    if what == "missing":
        file.unlink()
    elif what == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.write_bytes(bytes(file.stat().st_size))
    write_checkpoint(out / "checkpoints", 50)
    (out / "checkpoints" / TRACKER).write_text("100")
    with pytest.raises(UserError) as caught:
        if use == "resume":
            plan(hf, out)
        else:
            plan(hf, tmp_path / "new", use, str(out / "checkpoints"))
    message = str(caught.value)
    assert DAMAGE[damage] in message and str(file.parent) in message
    assert message.endswith("takes iter_0000050."), message


def test_ckpt_step(hf: str, out: Path) -> None:
    write_checkpoint(out / "checkpoints", 50)
    result = plan(hf, out, "--ckpt-step", "50")
    assert result.start is not None and result.start.iteration == 50
    with pytest.raises(UserError, match=r"--ckpt-step 51: .*iter_0000051 is not there"):
        plan(hf, out, "--ckpt-step", "51")


def test_one_run_at_a_time(out: Path) -> None:
    with resume.lock(out), pytest.raises(UserError, match=f"another run is writing {out}"):
        resume.lock(out)
    resume.lock(out).close()


def test_what_ctrl_c_costs(hf: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = metrics.Recorder(None, rank=0, world_size=1, pipeline=1)
    monkeypatch.setattr(metrics, "RECORDER", recorder)
    recorder.iteration = 112
    words = "the checkpoint of step 100, 12 steps are done again"
    assert run._way_on(plan(hf, out)).endswith(words)
    assert "no checkpoint was saved yet" in run._way_on(plan(hf, out.with_name("new")))
    assert run._way_on(None) == "nothing was saved"


def test_torch_is_not_imported(hf: str, out: Path) -> None:
    argv = f"--hf-model {hf} --output-dir {out} --mock-data --seq-length 1024 --train-iters 9"
    code = (
        "import sys; from megatron_patch.training import args;"
        f"plan = args.resolve({argv.split()!r}, device='cpu', world_size=1);"
        "print(plan.start.iteration, [m for m in ('torch', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100", "[]"]
