"""The flag table and the resolver: parsing, precedence, run length, directories."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch import _compat
from megatron_patch.training import args
from megatron_patch.training.flags import (
    _OWN_FIELDS,
    FINE_TUNING,
    OWN_FLAGS,
    RANGES,
    USER_FLAGS_MARK,
    megatron_defaults,
    number_problem,
    parse,
    read_count,
    read_pattern,
)
from megatron_patch.util import UserError, atomic_write, human_bytes, human_count
from tests.unit.checkpoints import write_checkpoint

CONFIGS = Path(__file__).parent.parent / "fixtures" / "configs"


@pytest.fixture
def hf(tmp_path: Path) -> str:
    """A Hugging Face directory of Qwen3-0.6B."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "qwen3-0.6b.json").read_text())
    return str(folder)


def plan(hf: str, *extra: str, **kwargs: object) -> args.Plan:
    base = ["--hf-model", hf, "--seq-length", "1024", "--lr", "1e-3"]
    if not any(f in extra for f in ("--train-tokens", "--train-samples", "--epochs")):
        base += ["--train-iters", "1000", USER_FLAGS_MARK]
    kwargs.setdefault("device", "h100")
    kwargs.setdefault("world_size", 8)
    return args.resolve([*base, *extra], **kwargs)  # type: ignore[arg-type]


def write_index(prefix: Path, lengths: list[int]) -> str:
    """A real idxmap of uint16 ids, in the format of ``megatron/core/datasets``."""
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    body = struct.pack(f"<{len(lengths)}i", *lengths)
    body += struct.pack(f"<{len(lengths)}q", *pointers)
    body += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    prefix.with_suffix(".idx").write_bytes(head + body)
    prefix.with_suffix(".bin").write_bytes(bytes(2 * sum(lengths)))
    return str(prefix)


# --- parsing ----------------------------------------------------------------------------------


def test_underscore_equals_dash_and_equals_sign() -> None:
    for argv in (["--seq_length", "128"], ["--seq-length=128"], ["--max_length=128"]):
        assert parse(argv)["seq_length"].value == 128


def test_same_spelling_twice_takes_the_last() -> None:
    assert parse(["--tp", "1", "--tp", "2"])["tensor_model_parallel_size"].value == 2


@pytest.mark.parametrize(
    ("argv", "both"),
    [
        (["--mbs", "1", "--micro-batch-size", "2"], ("--mbs 1", "--micro-batch-size 2")),
        (["--hf-model", "a", "--model", "b"], ("--hf-model a", "--model b")),
        (["--tp", "2", "--tensor_model_parallel_size=4"], ("--tp 2", "--tensor_model_paral")),
        (["--data", "a", "--data-path", "b", "c"], ("--data a", "--data-path b c")),
        (
            ["--overlap-param-gather", "--no-overlap-param-gather"],
            ("--overlap-param-gather", "--no-overlap-param-gather"),
        ),
    ],
)
def test_two_spellings_that_disagree(argv: list[str], both: tuple[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(argv)
    assert all(text in str(caught.value) for text in both)


def test_two_spellings_that_agree() -> None:
    assert parse(["--mbs", "2", "--micro-batch-size", "2"])["micro_batch_size"].value == 2


def test_user_wins_over_launcher_whatever_the_spelling(hf: str) -> None:
    result = plan(hf, "--mbs", "1", USER_FLAGS_MARK, "--micro-batch-size", "4")
    assert result.values["micro_batch_size"] == 4
    lengths = args.resolve(
        (
            f"--hf-model {hf} --seq-length 8 --gbs 8 --train-iters 5 {USER_FLAGS_MARK} "
            "--train-samples 80"
        ).split(),
        world_size=1,
        device="h100",
    )
    assert lengths.values["train_iters"] == 10


def test_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(UserError, match="--micro-batch-size"):
        parse(["--micro-batch-szie", "1"])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--seq-length"], "needs a value"),
        (["--seq-length", "many"], "whole number"),
        (["--precision", "int8"], "bf16"),
        (["--ckpt-format", "zip"], "torch_dist"),
        (["--train-tokens", "1.5"], "count"),
        (["--seq-length", "1", "2"], "'2' after 1"),
        (["--dry-run=yes"], "takes no value"),
        (["--rampup-batch-size", "1", "2"], "3 values"),
        (["--moe-layer-freq", "__import__('os')"], "pattern"),
        (["--device", "tpu"], "b200"),
    ],
)
def test_wrong_values(argv: list[str], text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(argv)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        *("--lr nan", "--lr -1", "--lr inf", "--lr 0", "--min-lr -1e-5", "--min-lr nan"),
        *("--train-iters 1e400", "--train-iters 0", "--train-iters -1", "--train-tokens 9e19"),
        *(
            "--epochs nan",
            "--epochs 0",
            "--epochs -1",
            "--seed 0",
            "--seed -1",
            "--seed 99999999999",
        ),
        *("--log-interval 0", "--save-interval 0", "--eval-interval 0", "--eval-iters -1"),
        *("--adam-beta1 1", "--adam-beta2 -0.1", "--adam-eps 0", "--weight-decay nan"),
        *("--clip-grad nan", "--clip-grad -1", "--hidden-dropout 1.5", "--attention-dropout 1"),
        *("--micro-batch-size 0", "--global-batch-size 0", "--seq-length 0", "--tp 0", "--cp -2"),
        *("--warmup-steps -1", "--world-size 0", "--nodes 99999999", "--num-layers 1000000000"),
        *("--gpu-memory 0", "--norm-epsilon inf", "--sgd-momentum nan", "--init-method-std nan"),
        *("--rotary-percent 0", "--exit-interval 0", f"--train-iters {'9' * 5000}"),
        *("--moe-layer-freq [0]*9999999999", f"--moe-layer-freq {'(' * 9000}"),
    ],
)
def test_numbers_out_of_range(line: str) -> None:
    """Each names the flag, the value and what is needed, and says so at once."""
    flag, value = line.split()
    with pytest.raises(UserError) as caught:
        parse([flag, value])
    message = str(caught.value)
    assert message.startswith(f"{flag} {value[:40]}") and message.endswith("is needed")
    assert len(message) < 200


def test_numbers_at_the_ends_of_their_ranges() -> None:
    for line in (
        "--min-lr 0 --adam-beta1 0 --clip-grad 0 --weight-decay 0 --hidden-dropout 0 --seed 1",
        "--eval-iters 0 --warmup-steps 0 --num-workers 0 --optimizer-offload-fraction 1",
    ):
        parse(line.split())


def test_every_range_is_of_a_flag() -> None:
    own = {flag.dest for flag in OWN_FLAGS}
    assert [d for d in RANGES if d not in megatron_defaults() and d not in own] == []
    for dest, value in megatron_defaults().items():
        assert number_problem(dest, value) is None, dest


def test_negative_numbers_are_values() -> None:
    assert parse(["--null-tokenizer-pad-id", "-1"])["null_tokenizer_pad_id"].value == -1
    with pytest.raises(UserError, match="needs a value"):
        parse(["--seq-length", "-x"])


def test_any_switch_can_be_switched_off() -> None:
    found = parse(["--no-use-distributed-optimizer", "--gradient-accumulation-fusion"])
    assert found["use_distributed_optimizer"].value is False
    assert found["gradient_accumulation_fusion"].value is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1B", 10**9),
        ("1.5m", 1_500_000),
        ("10_000", 10_000),
        ("2e9", 2 * 10**9),
        ("3T", 3 * 10**12),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert read_count(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "1BB", "1e-3"])
def test_no_counts(text: str) -> None:
    with pytest.raises(ValueError):
        read_count(text)


def test_patterns() -> None:
    assert read_pattern("2") == 2
    assert read_pattern("([0]*2+[1])*2") == [0, 0, 1, 0, 0, 1]


def test_old_positional_call_is_answered_not_run() -> None:
    with pytest.raises(UserError, match="--micro-batch-size 1"):
        args.resolve(["dsw", "8B", "1", "8", "1e-5"])


# --- precedence and defaults ------------------------------------------------------------------


def test_precedence(hf: str) -> None:
    default = plan(hf)
    assert default.values["num_layers"] == 28
    assert default.source["num_layers"] == args.MODEL_CONFIG
    assert default.source["log_interval"] == args.LAUNCH_DEFAULT
    assert default.source["clip_grad"] == args.MEGATRON_DEFAULT
    user = plan(hf, "--num-layers", "12", "--log-interval", "5")
    assert user.values["num_layers"] == 12 and user.values["log_interval"] == 5
    assert user.given("num_layers")
    assert any("--num-layers 12 overrules" in n and "28" in n for n in user.notes)


def test_launch_defaults(hf: str) -> None:
    values = plan(hf, "--tp", "2").values
    assert values["log_interval"] == 1
    assert values["create_attention_mask_in_dataloader"] is False
    assert values["use_distributed_optimizer"] and values["overlap_grad_reduce"]
    assert values["overlap_param_gather"] and values["calculate_per_token_loss"]
    assert values["attention_dropout"] == values["hidden_dropout"] == 0.0
    assert values["sequence_parallel"] and not values["tp_comm_overlap"]
    assert values["bf16"] and values["eval_iters"] == 0 and values["split"] == "100,0,0"
    assert values["eval_interval"]  # upstream divides by it
    assert values["tokenizer_type"] == "NullTokenizer" and values["vocab_size"] == 151936
    assert values["padded_vocab_size"] == 151936
    assert values["min_lr"] == 1e-4
    assert not plan(hf).values["sequence_parallel"]


def test_defaults_follow_the_users_flags(hf: str) -> None:
    assert not plan(hf, "--no-overlap-grad-reduce").values["overlap_param_gather"]
    assert plan(hf, "--eval-iters", "5").values["split"] == "99,1,0"
    assert plan(hf, "--fp16").values["bf16"] is False
    assert plan(hf, "--precision", "fp32").values["bf16"] is False


def test_deepep_where_importable(tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "qwen3-30b-a3b.json").read_text())
    without = args.Environment(te=True, deep_ep=False)
    installed = args.Environment(te=True, deep_ep=True)
    plain = plan(str(folder), "--ep", "8", environment=without).values
    deep = plan(str(folder), "--ep", "8", environment=installed).values
    alone = plan(str(folder), environment=installed).values
    assert plain["moe_token_dispatcher_type"] == "alltoall" and plain["moe_grouped_gemm"]
    assert (deep["moe_token_dispatcher_type"], deep["moe_flex_dispatcher_backend"]) == (
        "flex",
        "deepep",
    )
    assert alone["moe_token_dispatcher_type"] == "alltoall"
    no_te = args.Environment(te=False, deep_ep=False)
    torch_only = plan(str(folder), environment=no_te).values
    assert not torch_only["moe_grouped_gemm"] and not torch_only["apply_rope_fusion"]
    assert plain["moe_aux_loss_coeff"] == 0.001  # from the config, not upstream's 0


def test_cpu(hf: str) -> None:
    result = plan(hf, device="cpu", world_size=2)
    assert result.values["distributed_backend"] == "gloo"
    assert not result.values["bf16"] and not result.values["apply_rope_fusion"]
    assert result.source["apply_rope_fusion"] == args.CPU_PLATFORM
    assert plan(hf, "--bf16", device="cpu", world_size=2).values["bf16"]


def test_tables_name_real_dests() -> None:
    known = megatron_defaults()
    rows = [*args.LAUNCH_DEFAULTS, *args.CPU_DEFAULTS]
    assert [r.dest for r in rows if r.dest not in known] == []
    assert all(r.reason for r in rows)


def test_fp8(hf: str) -> None:
    values = plan(hf, "--fp8", "blockwise").values
    assert (values["fp8"], values["fp8_recipe"]) == ("e4m3", "blockwise")
    with pytest.raises(UserError, match=r"--fp8 blockwise.*--fp8-recipe delayed"):
        plan(hf, "--fp8", "blockwise", "--fp8-recipe", "delayed")


def test_precision_contradictions(hf: str) -> None:
    with pytest.raises(UserError, match="contradict"):
        plan(hf, "--precision", "bf16", "--fp16")
    with pytest.raises(UserError, match="contradict"):
        plan(hf, "--bf16", "--fp16")


def test_a_split_without_validation_does_not_evaluate(hf: str) -> None:
    assert plan(hf, "--split", "100,0,0").values["eval_iters"] == 0
    assert plan(hf, "--split", "98,2,0").values["eval_iters"] == 20


def test_offloading(hf: str) -> None:
    small = ["--cpu-offloading", "--cpu-offloading-optimizer", "--gpu-memory", "4"]
    values = plan(hf, *small).values
    assert values["cpu_offloading_num_layers"] == 27
    assert values["optimizer_cpu_offload"] and values["use_precision_aware_optimizer"]
    assert plan(hf, "--cpu-offloading-optimizer", "--optimizer-offload-fraction", "0.5").values[
        "optimizer_offload_fraction"
    ] == pytest.approx(0.5)


def broken() -> bool:
    raise RuntimeError("driver too old")


@pytest.mark.parametrize(("query", "stays"), [(lambda: True, True), (lambda: False, False)])
def test_tp_overlap_follows_the_hardware(hf: str, query: object, stays: bool) -> None:
    result = plan(hf, "--tp", "2", "--tp-comm-overlap", multicast=query)
    assert result.values["tp_comm_overlap"] is stays
    notes = [n for n in result.notes if "--tp-comm-overlap" in n]
    assert len(notes) == (0 if stays else 1)
    assert ("--tp-comm-overlap" in result.megatron_argv()) is stays


def test_tp_overlap_query_that_raises(hf: str) -> None:
    result = plan(hf, "--tp", "2", "--tp-comm-overlap", multicast=broken)
    assert result.values["tp_comm_overlap"] is False
    assert sum("driver too old" in n for n in result.notes) == 1
    with pytest.raises(UserError, match="--tp 1"):
        plan(hf, "--tp-comm-overlap")


def test_eod(hf: str) -> None:
    assert plan(hf).values["null_tokenizer_eod_id"] is not None
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --padded-vocab-size 64"
    with pytest.raises(UserError, match="--null-tokenizer-eod-id"):
        args.resolve(
            [*sizes.split(), "--seq-length", "8", "--train-iters", "5", "--eod-mask-loss"],
            world_size=1,
            device="cpu",
        )


# --- run length -------------------------------------------------------------------------------


def test_four_units_agree(hf: str, tmp_path: Path) -> None:
    data = write_index(tmp_path / "d", [1024] * 640)
    common = ("--gbs", "64", "--data-path", data)
    for unit, amount in (
        ("--train-tokens", str(64 * 1024 * 20)),
        ("--train-samples", "1280"),
        ("--epochs", "2"),
    ):
        run = plan(hf, unit, amount, *common).run
        assert run is not None
        assert (run.iters, run.samples, run.tokens) == (20, 1280, 1280 * 1024), unit
        assert run.epochs == pytest.approx(2.0)
    run = plan(hf, "--train-iters", "20", *common).run
    assert run is not None and run.samples == 1280 and run.epochs == pytest.approx(2.0)


def test_rounding_is_said(hf: str) -> None:
    result = plan(hf, "--train-tokens", "1M", "--gbs", "64")
    assert result.values["train_iters"] == 16  # 15.27 steps
    assert any("15.2" in n and "16" in n for n in result.notes)


def test_epoch_of_a_blend(hf: str, tmp_path: Path) -> None:
    a = write_index(tmp_path / "a", [1024] * 100)
    b = write_index(tmp_path / "b", [1024] * 300)
    result = plan(hf, "--epochs", "1", "--gbs", "8", "--data-path", "0.5", a, "0.5", b)
    assert result.run is not None and result.run.data_tokens == 400 * 1024
    note = next(n for n in result.notes if "epoch of the blend" in n)
    assert "a 2.00 times" in note and "b 0.67 times" in note


def test_epoch_counts_the_training_split(hf: str, tmp_path: Path) -> None:
    data = write_index(tmp_path / "d", [1024] * 100)
    result = plan(hf, "--epochs", "1", "--gbs", "10", "--data-path", data, "--split", "80,20,0")
    assert result.run is not None and result.run.samples == 80


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ((), "--train-tokens, --train-iters, --train-samples, --epochs"),
        (("--train-tokens", "1M", "--train-iters", "5"), "one length"),
        (("--train-iters", "0"), "at least 1"),
        (("--epochs", "1"), "--data-path"),
        (("--epochs", "1", "--data-path", "/nowhere/d"), "/nowhere/d.idx"),
        (("--train-iters", "100", "--warmup-steps", "100"), "--warmup-steps 100"),
        (
            ("--train-iters", "9", "--warmup-steps", "1", "--lr-warmup-fraction", "0.1"),
            "--lr-warmup-fraction",
        ),
    ],
)
def test_run_length_errors(hf: str, extra: tuple[str, ...], text: str) -> None:
    with pytest.raises(UserError) as caught:
        args.resolve(
            ["--hf-model", hf, "--seq-length", "1024", *extra], world_size=8, device="h100"
        )
    assert text in str(caught.value)


def test_batch_ramp_keeps_samples(hf: str) -> None:
    values = plan(
        hf, "--train-samples", "6400", "--gbs", "64", "--rampup-batch-size", "8", "8", "640",
        "--warmup-steps", "3",
    ).values  # fmt: skip
    assert values["train_samples"] == 6400 and values["train_iters"] is None
    assert values["lr_warmup_iters"] == 0 and values["lr_warmup_samples"] == 3 * 64


def test_default_warmup_is_shorter_than_the_run(hf: str) -> None:
    assert plan(hf, "--train-iters", "10").values["lr_warmup_iters"] == 0
    assert plan(hf, "--train-iters", "1000").values["lr_warmup_iters"] == 10
    assert plan(hf, "--train-iters", "1000000").values["lr_warmup_iters"] == 2000


# --- directories ------------------------------------------------------------------------------


def test_checkpoints_go_by_the_clock_or_by_steps(hf: str, tmp_path: Path) -> None:
    out = ("--output-dir", str(tmp_path / "out"), "--train-iters", "100")
    by_clock = plan(hf, *out)
    assert (by_clock.save_minutes, by_clock.values["save_interval"]) == (30.0, 100)
    by_steps = plan(hf, *out, "--save-interval", "7")
    assert (by_steps.save_minutes, by_steps.values["save_interval"]) == (None, 7)
    both = plan(hf, *out, "--save-interval", "7", "--save-interval-in-mins", "12.5")
    assert (both.save_minutes, both.values["save_interval"]) == (12.5, 7)
    assert plan(hf, "--train-iters", "100").save_minutes is None, "nothing is saved"
    with pytest.raises(UserError, match="--save-every-minutes has no effect without"):
        plan(hf, "--save-every-minutes", "5")
    with pytest.raises(UserError, match="--save-every-minutes 0: more than 0 is needed"):
        plan(hf, *out, "--save-every-minutes", "0")


def test_a_save_beside_the_training_takes_the_writer_that_is_there(hf: str, tmp_path: Path) -> None:
    made = plan(hf, "--output-dir", str(tmp_path / "out"), "--async-save").values
    assert made["use_persistent_ckpt_worker"] and made["async_strategy"] == "mcore"
    assert not plan(hf).values["use_persistent_ckpt_worker"]


def test_output_dir(hf: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fresh = plan(hf, "--output-dir", str(out)).values
    assert fresh["save"] == fresh["load"] == str(out / "checkpoints")
    assert fresh["tensorboard_dir"] == str(out / "tensorboard")
    assert fresh["data_cache_path"] == str(out / "cache"), "not beside the data"
    elsewhere = plan(hf, "--output-dir", str(out), "--data-cache-path", "/scratch").values
    assert elsewhere["data_cache_path"] == "/scratch"
    assert not fresh["exit_on_missing_checkpoint"]
    write_checkpoint(out / "checkpoints")
    again = plan(hf, "--save", str(out))
    assert again.values["load"] == str(out / "checkpoints")
    assert again.values["exit_on_missing_checkpoint"]
    assert any("goes on from it" in n for n in again.notes)
    assert any("nothing will be saved" in n for n in plan(hf).notes)
    assert any("beside the data" in n for n in plan(hf, "--data-path", "corpus").notes)


def test_load_of_nothing_is_an_error(hf: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint there"):
        plan(hf, "--load", str(tmp_path / "typo"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / args.TRACKER).write_text("")
    with pytest.raises(UserError, match="missing or empty"):
        plan(hf, "--load", str(empty))


def test_init_from(hf: str, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "weights")
    out = str(tmp_path / "out")
    values = plan(hf, "--init-from", str(weights), "--output-dir", out).values
    assert values["pretrained_checkpoint"] == str(weights)
    assert values["load"] == f"{out}/checkpoints" and not values["finetune"]
    # Weights only: upstream starts from iteration 0 with nothing else once `load` holds nothing.
    assert not (values["no_load_optim"] or values["no_load_rng"])
    run = write_checkpoint(tmp_path / "run" / "checkpoints").parent
    assert args.initial_weights(str(run)) == (str(run / "checkpoints"), False, None)
    assert args.initial_weights(hf) == (hf, True, None)
    (tmp_path / "weights" / "release").mkdir()
    for bad, text in (
        (hf, "no safetensors files"),
        (str(tmp_path / "no"), "no such directory"),
        (str(weights / "release"), "names iter_0000100, so Megatron loads that; write release"),
        (str(tmp_path), "neither"),
    ):
        with pytest.raises(UserError, match=text):
            plan(hf, "--init-from", bad, "--output-dir", out)
    with pytest.raises(UserError, match="--output-dir"):
        plan(hf, "--init-from", str(weights))


def test_what_a_start_from_weights_says(hf: str, tmp_path: Path) -> None:
    weights, out = write_checkpoint(tmp_path / "weights"), str(tmp_path / "out")

    def said(*argv: str) -> str:
        return " ".join(plan(hf, "--output-dir", out, *argv).notes)

    assert "initialisation from scratch" in said()
    assert "initialisation from scratch" not in said("--init-from", str(weights))
    loaded = said("--load", str(weights))
    assert f"--load {weights} restarts from there at every start" in loaded
    assert "initialisation from scratch" not in loaded
    own = write_checkpoint(Path(out) / "checkpoints")
    assert "initialisation from scratch" not in said()
    assert "restarts from there" not in said("--load", str(own))


def test_init_from_one_step(hf: str, tmp_path: Path) -> None:
    run = tmp_path / "run" / "checkpoints"
    write_checkpoint(run, 50)
    write_checkpoint(run, 100)
    (run / "best").symlink_to("iter_0000050")
    own = tmp_path / "own"
    start = ("--output-dir", str(own), "--init-from")
    for name, step in (("best", 50), ("iter_0000050", 50), ("iter_0000100", 100)):
        values = plan(hf, *start, str(run / name)).values
        assert values["pretrained_checkpoint"] == str(run) and values["ckpt_step"] == step, name
    assert plan(hf, *start, str(run)).values["ckpt_step"] is None
    assert plan(hf, *start, str(run), "--ckpt-step", "50").values["ckpt_step"] == 50
    with pytest.raises(UserError, match="is step 50, --ckpt-step says 100"):
        plan(hf, *start, str(run / "best"), "--ckpt-step", "100")
    # Once the run has a checkpoint of its own, that one counts, and its newest step.
    write_checkpoint(own / "checkpoints", 7)
    assert plan(hf, *start, str(run / "best")).values["ckpt_step"] is None
    (run / args.TRACKER).write_text("release")
    (run / "release").mkdir()
    with pytest.raises(UserError, match=r"names release, .*write 50 into it"):
        plan(hf, *start, str(run / "best"))


# --- world and device -------------------------------------------------------------------------


def test_world_size(hf: str) -> None:
    assert plan(hf, "--nodes", "2", world_size=None).world_size == 16
    assert plan(hf, world_size=None).world_size == 8
    assert plan(hf, world_size=None, device="cpu").world_size == 1
    with pytest.raises(UserError, match="16 ranks asked for, but this run has 8"):
        plan(hf, "--world-size", "16")
    with pytest.raises(UserError, match=r"32 .* 2 nodes x 8"):
        plan(hf, "--world-size", "32", "--nodes", "2", world_size=None)


def test_device_contradiction(hf: str) -> None:
    with pytest.raises(UserError, match="--device cpu"):
        plan(hf, "--device", "cpu", device="cuda")


# --- Megatron's parser ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live_parser() -> object:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    return parser


def _plain(value: object) -> object:
    import enum

    if isinstance(value, enum.Enum):
        return value.name
    return [_plain(v) for v in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_snapshot_equals_the_live_parser() -> None:
    snapshot = json.loads(_compat.FLAG_SNAPSHOT.read_text())
    assert snapshot["megatron_core"] == _compat.installed_version("megatron-core")
    assert _compat.flag_table() == _compat.live_flag_table()


SAMPLES = {
    "int": "7",
    "float": "0.25",
    "str": "text",
    "moe_freq_type": "[0]*1+[1]*2",
    "la_freq_type": "3",
    "no_rope_freq_type": "[0,1]",
    "tuple_type": "3,4",
}


@pytest.mark.slow
def test_every_megatron_flag_reads_as_upstream_reads_it(live_parser: object) -> None:
    """Each flag in each spelling, one at a time, against Megatron's own parser."""
    differences = []
    count = 0
    for flag in _compat.flag_table():
        for option in flag.options:
            if flag.action == "store":
                if flag.type == "bool" or flag.type.startswith("_parse"):
                    continue
                value = str(flag.choices[0]) if flag.choices else SAMPLES[flag.type]
                argv = [option, *[value] * (flag.nargs if isinstance(flag.nargs, int) else 1)]
            else:
                argv = [option]
            ours = parse(argv)
            count += 1
            namespace = live_parser.parse_args(argv)  # type: ignore[attr-defined]
            theirs = getattr(namespace, flag.dest)
            mine = next(iter(ours.values()))
            if flag.dest == "pretrained_checkpoint" or flag.dest == "save":
                continue  # --init-from and --output-dir: ours on purpose
            if (mine.option.dest, mine.value) != (flag.dest, _plain(theirs)):
                differences.append((option, mine.value, theirs))
    assert differences == []
    assert count > 800


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        "--tp 2 --no-overlap-param-gather --fp8 delayed --data-path 0.3 a 0.7 b",
        "--attention-backend flash --window-size 1,2 --train-tokens 1B --moe-layer-freq [0]*2+[1]",
        "--cpu-offloading-optimizer --seq_length 2_048 --no-gradient-accumulation-fusion",
        "--onnx-safe false --gradient-accumulation-fusion --vpp 2 --pp 2 --exit-signal SIGINT",
    ],
)
def test_argv_and_overlay_make_upstreams_parser_agree(hf: str, extra: str) -> None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    result = plan(hf, *extra.split())
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    parser.set_defaults(**result.overlay())
    namespace = parser.parse_args(result.megatron_argv())
    wrong = {
        dest: (value, _plain(getattr(namespace, dest)))
        for dest, value in result.values.items()
        if _plain(getattr(namespace, dest)) != value
    }
    assert wrong == {}


# --- the flags themselves ---------------------------------------------------------------------


def test_every_own_flag_changes_the_plan(hf: str, tmp_path: Path) -> None:
    """Report 79: an option that is accepted and does nothing."""
    data = write_index(tmp_path / "d", [1024] * 640)
    weights = str(write_checkpoint(tmp_path / "w"))
    samples = {
        "--hf-model": None,
        "--output-dir": "o",
        "--init-from": weights,
        "--data-path": write_index(tmp_path / "e", [1024] * 320),
        "--valid-data-path": None,  # excludes --data-path
        "--restart-schedule-at": None,  # needs a checkpoint: tests/dist has them
        "--warmup-ratio": "0.3",
        "--lora-dropout": "0.3",
        "--precision": "fp16",
        "--fp8": "delayed",
        "--parallel": "auto",
        "--backend": "torch",
        "--linear-cross-entropy": "off",
        "--fused-kernels": "off",
        "--env": "slurm",
        "--device": "h200",
        "--train-tokens": "1B",
        "--epochs": "2",
    }
    for flag in OWN_FLAGS:
        value = samples.get(flag.name, flag.choices[-1] if flag.choices else "3")
        if value is None:
            continue
        argv = ["--hf-model", hf, "--seq-length", "1024", "--lr", "0.1", "--gbs", "64"]
        argv += ["--output-dir", "p", "--data-path", data]
        if flag.name not in ("--train-tokens", "--train-samples", "--epochs", "--train-iters"):
            argv += ["--train-iters", "1000"]
        if flag.group == FINE_TUNING and flag.name != "--sft":
            with pytest.raises(UserError, match=r"no effect .*--sft"):
                given = [flag.name] if flag.kind == "flag" else [flag.name, value]
                args.resolve([*argv, *given])
            argv += ["--sft", *(["--no-packing"] if flag.name == "--pad-to-max-length" else [])]
            if flag.name.startswith("--lora-") and flag.name != "--lora-rank":
                argv += ["--lora-rank", "8"]
        if flag.name == "--keep-every":
            argv += ["--keep-last", "2"]
        argv += [USER_FLAGS_MARK]
        reference = ["--train-samples", "700"] if "--train-iters" not in argv else []
        before = args.resolve([*argv, *reference])
        for spelling in (flag.name, *flag.aliases):
            given = [spelling] if flag.kind == "flag" else [spelling, value]
            after = args.resolve([*argv, *given])
            assert (after.values, after.own) != (before.values, before.own), spelling


def test_help_names_every_own_flag_and_alias() -> None:
    text = args.help_text("x")
    assert all(spelling in text for f in OWN_FLAGS for spelling in (f.name, *f.aliases))
    everything = args.help_text("x", everything=True)
    assert all(f.options[0] in everything for f in _compat.flag_table())
    assert max(map(len, text.splitlines())) <= 100
    for flag in OWN_FLAGS:  # a full left column, too, ends in a blank
        head = re.escape(f"  {flag.name} {flag.metavar}".rstrip())
        assert re.search(rf"^{head} +\S", text, re.M), flag.name


def test_own_fields_and_flags_match() -> None:
    dests = {f.dest for f in OWN_FLAGS}
    assert {f for f in _OWN_FIELDS if f not in dests} == set()
    assert {d for d in dests if d not in _OWN_FIELDS} <= set(megatron_defaults())


def test_plan_is_json(hf: str) -> None:
    result = plan(hf)
    assert json.loads(json.dumps(result.as_dict()))["values"]["num_layers"] == 28
    assert "num_layers" in result.describe() and "model config" in result.describe()


def test_unknown_dest_in_a_model_is_an_error(hf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    real = args._model

    def altered(directory: str) -> object:
        spec, eos = real(directory)
        return dataclasses.replace(spec, args={**spec.args, "num_layerz": 3}), eos

    monkeypatch.setattr(args, "_model", altered)
    with pytest.raises(UserError, match="num_layerz"):
        plan(hf)


def test_nothing_heavy_is_imported(hf: str) -> None:
    program = (
        "import sys; from megatron_patch.training import args;"
        f"args.resolve(['--hf-model', {hf!r}, '--seq-length', '64', '--train-iters', '9']);"
        "args.help_text('x', True);"
        "print([m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


# --- small helpers ----------------------------------------------------------------------------


def test_atomic_write(tmp_path: Path) -> None:
    target = tmp_path / "f"
    atomic_write(target, "one")
    target.chmod(0o640)
    atomic_write(target, b"two")
    assert target.read_bytes() == b"two" and target.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    with pytest.raises(OSError):
        atomic_write(tmp_path / "no" / "f", "x")


def test_human_numbers() -> None:
    assert human_bytes(512) == "512.0 B" or human_bytes(512) == "512 B"
    assert human_bytes(1536) == "1.5 KiB" and human_bytes(80 * 2**30) == "80.0 GiB"
    assert human_count(950) == "950" and human_count(1_720_000_000) == "1.72B"
    assert human_count(999_999) == "1M" and human_count(2e15) == "2000T"
