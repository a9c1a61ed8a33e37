"""From a fine-tuning command line and its data to a plan: batch, steps, evaluation, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_sft_dataset import LENGTHS, write_set

from megatron_patch.training import args, sft
from megatron_patch.training.args import Plan
from megatron_patch.util import UserError

CONFIG = {
    "model_type": "qwen3", "vocab_size": 1500, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    write_set(tmp_path / "set")
    return tmp_path


def plan(place: Path, *more: str, world: int = 1) -> tuple[Plan, Any, Any]:
    argv = [
        *("--sft", "--hf-model", str(place / "hf"), "--data-path", str(place / "set")),
        *("--output-dir", str(place / "out"), "--lr", "1e-4", *more),
    ]
    draft = args.resolve(argv, world_size=world, device="cpu", need_length=False)
    train, valid = sft.rows(draft)
    made = args.resolve(argv, world_size=world, device="cpu", data=train)
    sft.complete(made, train, valid)
    return made, train, valid


def test_the_batch_counts_replicas(place):
    more = ("--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "3")
    made, train, _ = plan(place, *more, "--tp", "2", "--epochs", "1", world=8)
    assert made.values["global_batch_size"] == 2 * 3 * 4
    assert made.values["micro_batch_size"] == 1
    assert (train.shape.ranks, train.shape.micro_batches) == (4, 6)
    said = "\n".join(made.notes)
    assert "24 sequences: 2 a replica x 3 accumulation steps x 4 data-parallel replicas" in said
    assert "8 ranks / TP 2 x PP 1 x CP 1" in said


def test_epochs_become_steps_and_everything_is_said(place):
    made, train, valid = plan(place, "--num-train-epochs", "3", "--split", "80,20")
    each = train.epoch(0).steps
    assert made.values["train_iters"] == 3 * each == made.run.iters
    assert made.run.epochs == 3
    assert made.values["seq_length"] == 64  # the model's positions
    assert made.values["eval_iters"] == valid.epoch(0).steps
    assert made.values["eval_interval"] == made.values["save_interval"] == each
    assert made.values["sft"] is False, "upstream's flag of this name changes other things"
    said = "\n".join(made.notes)
    for text in (
        f"samples    {len(LENGTHS)}, 0 of them longer than --seq-length 64",
        f"{each} steps an epoch",
        "balance",
        "evaluation 3 samples",
        f"{3 * each} steps of 1 rows, 3.00 epochs",
    ):
        assert text in said, text


def test_steps_may_be_given(place):
    made, train, _ = plan(place, "--max-steps", "7")
    assert made.run.iters == 7
    assert made.run.epochs == pytest.approx(train.epochs(7))
    assert made.values["eval_iters"] == 0


def test_data_that_is_evaluated_only(place):
    write_set(place / "other", LENGTHS[:4])
    made, train, valid = plan(place, "--epochs", "1", "--valid-data-path", str(place / "other"))
    assert (len(train.pool), len(valid.pool)) == (len(LENGTHS), 4)
    assert made.values["train_data_path"] == [str(place / "set")]
    assert made.values["data_path"] is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--train-tokens", "1M"), "--num-train-epochs or --train-iters"),
        (("--epochs", "1", "--split", "90,5,5"), "no test part"),
        (("--epochs", "1", "--cp", "2", "--seq-length", "30"), "multiple of 4"),
        (("--epochs", "1", "--lora-alpha", "8"), "no effect without --lora-rank"),
        (("--epochs", "1", "--lora-rank", "4", "--freeze", "x"), "no effect with --lora-rank"),
        (("--epochs", "1", "--lora-rank", "4", "--lora-target-modules", "w_o"), "q_proj"),
        (("--epochs", "1", "--pad-to-max-length"), "no effect without --no-packing"),
        (("--epochs", "1", "--gbs", "3", "--per-device-batch-size", "2"), "keep one of them"),
        (("--epochs", "1", "--data-path", "nowhere.jsonl"), "nowhere.jsonl is neither chats"),
    ],
)
def test_refusals(place, more, words):
    with pytest.raises(UserError, match=words):
        plan(place, *more, world=2)


def test_what_a_resume_may_not_change(place):
    """Another number of replicas may be; what decides the samples to come may not."""
    made, train, _ = plan(place, "--epochs", "2", "--gbs", "4", world=2)
    (place / "out" / "resolved_args.json").write_text(json.dumps(made.as_dict(), default=str))

    def again(*more: str, world: int = 2) -> Any:
        argv = ["--sft", "--hf-model", str(place / "hf"), "--data-path", str(place / "set"),
                "--output-dir", str(place / "out"), "--lr", "1e-4", "--epochs", "2",
                *more]  # fmt: skip
        draft = args.resolve(argv, world_size=world, device="cpu", need_length=False)
        draft.values["exit_on_missing_checkpoint"] = True  # as where there is a checkpoint
        return sft.rows(draft)[0]

    assert again("--gbs", "4", world=1).shape == train.shape, "packs are dealt as at the start"
    for more, words in (
        (("--gbs", "8"), "takes 4 sequences, now 8"),
        (("--gbs", "4", "--seed", "3"), "--seed is another"),
        (("--gbs", "4", "--seq-length", "32"), "--seq-length is another"),
        (("--gbs", "4", "--no-packing"), "--no-packing is another"),
        (("--gbs", "4", "--lora-rank", "4"), "--lora-rank"),
        (("--gbs", "4", "--cp", "2"), "asks for 4"),
    ):
        with pytest.raises(UserError, match=words):
            again(*more)


def test_adapters_are_not_refused_for_the_memory_of_all_weights(place):
    from megatron_patch.training.parallel import check

    config = Path(__file__).parents[1] / "fixtures" / "configs" / "llama-3.3-70b.json"
    (place / "hf" / "config.json").write_text(config.read_text())
    argv = ["--sft", "--hf-model", str(place / "hf"), "--data-path", str(place / "set"),
            "--seq-length", "4096", "--gbs", "8", "--lr", "1e-4", "--max-steps", "10"]  # fmt: skip

    def report(*more: str) -> Any:
        return check(args.resolve([*argv, *more], world_size=8, device="h100"))

    assert any("GiB" in text for text in report().refusals)
    assert not report("--lora-rank", "8").refusals
    assert any("adapters need less" in text for text in report("--lora-rank", "8").warnings)
