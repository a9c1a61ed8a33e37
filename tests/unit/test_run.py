"""Around a training run: exit status, dry run, and what a second start of a run changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_patch import _compat
from megatron_patch.data.idxmap import Writer
from megatron_patch.training import args, metrics, resume, run
from megatron_patch.util import UserError
from tests.unit.checkpoints import write_checkpoint

CONFIG = Path(__file__).parent.parent / "fixtures" / "configs" / "qwen3-8b.json"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """No rank of a launcher, and none left behind by `_single_process`."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def hf(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG.read_text())
    return str(folder)


def never(*_args, **_kwargs):
    raise AssertionError("a refused or dry run trains nothing")


RECIPE = run.Recipe("pretrain", never, never)


def flags(hf, *more):
    return ["--hf-model", hf, "--mock-data", "--seq-length", "1024", "--lr", "1e-4",
            "--train-iters", "100", "--global-batch-size", "16", *more]  # fmt: skip


# --- refusals and dry runs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--no-such-flag", "1"), "--no-such-flag"),
        (("--seq-length", "1024", "--seq-len", "2048"), "2048"),
        (("--lr", "fast"), "--lr"),
        (("--hf-model", "/nowhere"), "/nowhere"),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_a_refusal_is_one_message_and_status_2(hf, capfd, more, message, dry):
    status = run.train(RECIPE, flags(hf, *more, *(["--dry-run"] if dry else [])))
    captured = capfd.readouterr()
    assert status == 2
    assert message in captured.err
    assert "error: " in captured.err
    assert "Traceback" not in captured.err


def test_the_program_ends_with_that_status(hf):
    """And before torch or megatron is imported, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_patch.pretrain", *flags(hf, "--no-such-flag", "1")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--dry-run", "--json"])
def test_dry_run_imports_nothing_heavy(hf, flag, tmp_path):
    command = flags(hf, "--output-dir", str(tmp_path / "out"), flag)
    code = (
        "import sys\n"
        "from megatron_patch import pretrain\n"
        f"status = pretrain.main({command!r})\n"
        "heavy = {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy), 'status:', status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "8", "RANK": "0"},
    )
    assert done.stdout.splitlines()[-1] == "heavy: [] status: 0", done.stderr
    assert not (tmp_path / "out").exists(), "a dry run writes nothing"


def test_dry_run_speaks_once(hf, capfd, monkeypatch):
    """On rank 0 alone; the other ranks end without a word."""
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert run.train(RECIPE, flags(hf, "--dry-run")) == 0
        out = capfd.readouterr().out
        assert bool(out) == (rank == "0")


def test_without_a_launcher_one_process_is_the_world():
    run._single_process()
    assert run.rank_and_world() == (0, 1)
    port = os.environ["MASTER_PORT"]
    assert int(port) > 0
    run._single_process()  # a launcher's or an earlier answer stays
    assert os.environ["MASTER_PORT"] == port


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (3, 3), ("words", 1)])
def test_exit_status_is_pythons_own(code, status):
    assert run._exit_status(SystemExit(code)) == status


# --- a run that is started again --------------------------------------------------------------


def plan(hf, *more):
    return args.resolve(flags(hf, *more), world_size=8, device="h200")


def changes(tmp_path, before, after):
    saved = tmp_path / "resolved_args.json"
    saved.write_bytes(metrics.to_json(before.as_dict()))
    return run._changes(saved, after)


def test_the_same_command_changes_nothing(hf, tmp_path):
    assert changes(tmp_path, plan(hf), plan(hf)) == []


def test_a_changed_setting_is_named_with_both_values(hf, tmp_path):
    lines = changes(
        tmp_path, plan(hf), plan(hf, "--lr", "5e-5", "--seed", "7", "--global-batch-size", "32")
    )
    assert sorted(lines) == sorted(
        [
            "changed since the last start: --lr 0.0001 -> 5e-05",
            "changed since the last start: --min-lr 1e-05 -> 5e-06",  # a tenth of it
            "changed since the last start: --global-batch-size 16 -> 32",
            "the run is extended from 1600 to 3200 sequences; its learning rate follows the "
            "schedule of the new length from the next step on",
            "changed since the last start: --seed 1234 -> 7",
        ]
    )


def test_another_data_set_and_precision_are_named(hf, tmp_path):
    lines = changes(tmp_path, plan(hf), plan(hf, "--precision", "fp16", "--split", "98,2,0"))
    text = "\n".join(lines)
    assert "--bf16 True -> False" in text and "--split 100,0,0 -> 98,2,0" in text


def test_another_network_is_refused_on_resume(hf, tmp_path):
    output = tmp_path / "out"
    write_checkpoint(output / "checkpoints", 5, batch=16)
    before = plan(hf, "--output-dir", str(output))
    saved = tmp_path / "resolved_args.json"
    saved.write_bytes(metrics.to_json(before.as_dict()))
    after = plan(hf, "--output-dir", str(output), "--norm-epsilon", "1e-2")
    with pytest.raises(UserError, match=r"norm_epsilon .* -> 0\.01"):
        run._changes(saved, after)


def test_ranks_without_numbers_are_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    with pytest.raises(UserError, match="SLURM_NTASKS=8"):
        run._single_process()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "RANK=0 and WORLD_SIZE=(not set)"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x and RANK=x; a number of at least 0 below"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two; a number of at least 1"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5; a number of at least 0 below WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "b"}, "LOCAL_RANK=b"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR=(not set), MASTER_PORT=(not set)"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "http"}, "PORT=http"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "99999"},
            "PORT=99999",
        ),
    ],
)
def test_an_environment_that_makes_no_sense(hf, capfd, monkeypatch, environ, words):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run.train(RECIPE, flags(hf)) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    assert words in line and "torchrun" in line


def test_an_output_directory_that_cannot_be_one(hf, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "logs").write_text("")
    for place, blame in ((file, file), (file / "deep", file), (tmp_path / "half", "half/logs")):
        with pytest.raises(UserError, match=f"--output-dir {place}: .*{blame} is a file"):
            plan(hf, "--output-dir", str(place))
    # Where tests run as root nothing is forbidden, so the answer of the system is put in its mouth.
    monkeypatch.setattr(resume.os, "access", lambda path, mode: path != tmp_path)
    resume.check_output(tmp_path / "new")
    resume.check_output(tmp_path / "half" / "new", start=True)
    with pytest.raises(UserError, match=f"{tmp_path} cannot be written to"):
        resume.check_output(tmp_path / "a" / "b", start=True)


def test_without_an_output_directory_nan_does_not_ask_for_one(hf, tmp_path):
    assert plan(hf).values["rerun_mode"] == "disabled"
    assert plan(hf, "--output-dir", str(tmp_path / "o")).values["rerun_mode"] != "disabled"
    upstream = (
        "Rank 0, node vm, device 1, iteration 3: Unexpected result nan (message='found NaN in "
        "local grad norm')"
    )
    words = _compat.explain(upstream)
    assert words and "step 3 gave nan on rank 0 (node vm: found NaN in local grad norm)" in words


def test_replaced_data_gets_an_index_of_its_own(tmp_path):
    from megatron_patch.data.pretrain_dataset import _cache

    folders = set()
    for length in (5, 6):
        with Writer(str(tmp_path / "d"), np.dtype(np.uint16), overwrite=True) as writer:
            writer.write(np.arange(length), np.array([length]), np.array([1]))
            writer.commit()
        folders.add(_cache(str(tmp_path), ([str(tmp_path / "d")], None), None))
    assert len(folders) == 2
    assert _cache(None, ([str(tmp_path / "d")], None)) is None


@pytest.mark.parametrize(("steps", "word"), [("200", "extended"), ("50", "shortened")])
def test_another_length_is_one_sentence(hf, tmp_path, steps, word):
    """The warm-up that follows from the length is not reported as a change of its own."""
    (line,) = changes(tmp_path, plan(hf), plan(hf, "--train-iters", steps))
    assert line.startswith(f"the run is {word} from 100 to {steps} steps; its learning rate")


def test_a_given_warm_up_is_reported(hf, tmp_path):
    lines = changes(tmp_path, plan(hf, "--warmup-steps", "5"), plan(hf, "--warmup-steps", "9"))
    assert len(lines) == 1
    assert lines[0].endswith(" 5 -> 9")


@pytest.mark.parametrize("content", [None, "", "{", json.dumps({"other": 1})])
def test_without_a_readable_record_there_is_nothing_to_say(hf, tmp_path, content):
    saved = tmp_path / "resolved_args.json"
    if content is not None:
        saved.write_text(content)
    assert run._changes(saved, plan(hf)) == []


def test_dumps_of_collectives_land_in_the_run_directory(tmp_path: Path) -> None:
    found = run.flight_recorder(tmp_path / "out", None)
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/out/logs/nccl_trace_rank_"
    assert "TORCH_FR_BUFFER_SIZE" not in found
    more = run.flight_recorder(tmp_path / "out", 9000)
    assert more["TORCH_FR_BUFFER_SIZE"] == more["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "9000"
