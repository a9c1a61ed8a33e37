"""Old positional calls are recognised and answered, never run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from megatron_patch.launch import __main__ as launch
from megatron_patch.training import legacy
from megatron_patch.training.flags import parse

FULL = shlex.split(
    "dlc 8B 2 64 1e-5 1e-6 4096 4096 bf16 4 2 1 1 4 true true true false sel false 500 "
    "/data/text_document /data/text_document /ckpt 1000000000 10000000 /out"
)


def flags_of(text: str) -> dict[str, list[str]]:
    """Flags of the command inside an answer, read as a shell would."""
    block = text.split("\n\n")[1].replace("\\\n", " ")
    tokens = shlex.split(block)
    out: dict[str, list[str]] = {}
    name = ""
    for token in tokens:
        if token.startswith("--"):
            name = token
            out[name] = []
        elif name:
            out[name].append(token)
    return out


def test_the_documented_call() -> None:
    text = legacy.answer(FULL, "run_mcore_qwen3.sh", {})
    assert text.startswith("positional arguments are not taken")
    flags = flags_of(text)
    assert flags["--micro-batch-size"] == ["2"] and flags["--global-batch-size"] == ["64"]
    assert flags["--lr"] == ["1e-5"] and flags["--min-lr"] == ["1e-6"]
    assert flags["--seq-length"] == ["4096"]
    assert (flags["--tp"], flags["--pp"], flags["--ep"]) == (["4"], ["2"], ["4"])
    assert "--cp" not in flags and "--etp" not in flags
    assert flags["--precision"] == ["bf16"]
    assert flags["--recompute-granularity"] == ["selective"]
    assert flags["--save-interval"] == ["500"]
    assert flags["--data-path"] == ["/data/text_document"]
    assert flags["--init-from"] == ["/ckpt"] and flags["--output-dir"] == ["/out"]
    assert flags["--train-tokens"] == ["1000000000"]
    assert flags["--warmup-steps"] == [str(10_000_000 // (64 * 4096))]
    assert "bash run_mcore_qwen3.sh" in text


@pytest.mark.parametrize("order", legacy.ORDERS, ids=lambda o: o.scripts[0])
def test_every_order_is_recognised_from_its_values(order: legacy.Order) -> None:
    """A complete call of each script, by its full name; and its flags are all real ones."""
    sample = {
        "ENV": "dsw", "SIZE": "7B", "MBS": "1", "GBS": "8", "LR": "1e-5", "MIN_LR": "1e-6",
        "SEQ": "2048", "PAD": "2048", "PR": "bf16", "AC": "full", "OFFLOAD": "false",
        "DATA": "/d/a", "VALID": "/d/v", "INIT": "none", "OUT": "/o", "PATCH": "/repo",
        "EXTRA_VOCAB": "293", "TOKENS": "1000000", "WARMUP_TOKENS": "20000", "MOE": "false",
        "EPOCHS": "2", "FL": "true", "SP": "true", "DO": "true", "SFT": "false", "TE": "true",
        "SAVE_INTERVAL": "500", "ITERS": "300", "WARMUP_ITERS": "30",
    }  # fmt: skip
    values = [sample.get(name, "1") for name in order.names]
    for script in order.scripts:
        found = legacy.recognise(values, f"examples/{script}.sh")
        assert found is not None and found.names == order.names, script
        flags = flags_of(legacy.answer(values, f"{script}.sh", {}))
        argv = [t for name, tokens in flags.items() for t in (name, *tokens)]
        read = parse(argv)
        assert read["micro_batch_size"].value == 1 and read["output_dir"].value == "/o"
        assert read["recompute_num_layers"].value == 1
        length = {"train_tokens", "train_iters", "epochs"} & set(read)
        assert len(length) == 1


def test_scripts_that_share_a_name_differ_by_their_values() -> None:
    """run_mcore_qwen.sh: Qwen2 takes EP, Qwen2.5 does not."""
    with_ep = "dsw 7B 1 8 1e-5 1e-6 128 128 bf16 4 2 1 8 true true true false none false 100"
    with_ep += " /d /v /c 1000 10 /o"
    without = with_ep.replace("4 2 1 8", "4 2 2")
    assert flags_of(legacy.answer(with_ep.split(), "run_mcore_qwen.sh", {}))["--ep"] == ["8"]
    flags = flags_of(legacy.answer(without.split(), "run_mcore_qwen.sh", {}))
    assert "--ep" not in flags and flags["--cp"] == ["2"]
    assert flags["--data-path"] == ["/d"] and flags["--init-from"] == ["/c"]


def test_a_call_that_ends_early() -> None:
    text = legacy.answer(["dsw", "8B", "1", "8"], "run_mcore_qwen3.sh", {})
    assert flags_of(text)["--global-batch-size"] == ["8"]
    assert "ends before LR, MIN_LR" in text


def test_a_call_is_only_read_in_the_orders_of_its_family() -> None:
    short = [*FULL[:12], *FULL[13:]]
    text = legacy.answer(short, "/x/examples/qwen3/run_mcore_qwen3.sh", {})
    assert (
        "26 values fit no order" in text
        and "(qwen3/run_mcore_qwen3.sh and its like took 27)" in text
    )
    assert "--hf-model" not in text and "qwen2" not in text
    start = ["dsw", "8B", "1", "8"]
    text = legacy.answer(start, "/x/examples/llama3_1/run_mcore_llama3_1.sh", {})
    assert flags_of(text)["--hf-model"] == ["/path/to/llama3_1-8B"]
    assert "read in the order of llama3_1/run_mcore_llama3_1.sh" in text
    text = legacy.answer(FULL, "/x/examples/qwen3_next/run_mcore_qwen3_next.sh", {})
    assert flags_of(text)["--hf-model"] == ["/path/to/qwen3_next-8B"]


def variant(**changes: str) -> list[str]:
    order = legacy.ORDERS[0].names
    return [changes.get(name, value) for name, value in zip(order, FULL, strict=True)]


def test_fine_tuning_counts_iterations() -> None:
    text = legacy.answer(variant(SFT="true", TOKENS="300", WARMUP_TOKENS="30"), None, {})
    flags = flags_of(text)
    assert flags["--train-iters"] == ["300"] and flags["--warmup-steps"] == ["30"]
    assert flags["--sft"] == [] and "--train-tokens" not in flags
    assert "fine-tunes" in text and "entry point" not in text
    assert "--sft" not in flags_of(legacy.answer(FULL, None, {}))


def test_scripts_that_only_fine_tune_say_so_too() -> None:
    values = "dsw /repo 7B 1 1e-5 1e-6 128 128 0 bf16 1 1 sel true true true true /d /v none 2 /o"
    flags = flags_of(legacy.answer(values.split(), "run_finetune_megatron_llama.sh", {}))
    assert flags["--sft"] == [] and flags["--epochs"] == ["2"]


def test_switches() -> None:
    flags = flags_of(
        legacy.answer(
            variant(
                PR="fp8",
                FL="false",
                DO="false",
                SP="false",
                OFFLOAD="false",
                AC="none",
                INIT="none",
                DATA="0.3 /a 0.7 /b",
            ),
            "run_mcore_qwen3.sh",
            {},
        )
    )
    assert flags["--fp8"] == ["blockwise"] and flags["--attention-backend"] == ["fused"]
    assert "--no-use-distributed-optimizer" in flags and "--no-sequence-parallel" in flags
    assert "--init-from" not in flags and "--recompute-granularity" not in flags
    assert flags["--data-path"] == ["0.3", "/a", "0.7", "/b"]
    half = flags_of(legacy.answer(variant(OFFLOAD="0.5"), None, {}))
    assert half["--optimizer-offload-fraction"] == ["0.5"]
    assert "--cpu-offloading-optimizer" in half
    away = flags_of(legacy.answer(variant(AC="offload"), None, {"MP_AC_LAYERS": "4"}))
    assert away["--cpu-offloading-num-layers"] == ["4"]


def test_exported_variables_become_flags() -> None:
    environ = {"MP_PP0_LAYERS": "6", "MP_VP": "2", "MP_DATASET_TYPE": "raw"}
    text = legacy.answer(FULL, "run_mcore_qwen3.sh", environ)
    flags = flags_of(text)
    assert flags["--decoder-first-pipeline-num-layers"] == ["6"]
    assert flags["--num-layers-per-virtual-pipeline-stage"] == ["2"]
    assert "MP_DATASET_TYPE=raw" in text


def test_exported_variables_are_named_beside_named_flags() -> None:
    environ = {"MP_VP": "2", "MP_SFT_PACKING": "true", "MP_PYTHON": "x", "MP_AC_LAYERS": ""}
    first, second = legacy.unread(environ)
    assert first.startswith("MP_VP=2 in the environment is not read; use --num-layers-per-virtual")
    assert second.startswith("MP_SFT_PACKING=true") and "--no-packing" in second
    for said in legacy._VARIABLES.values():
        for flag in re.findall(r"--[a-z-]+", said):
            parse([flag] if flag in ("--sft", "--no-packing") else [flag, "2"])


def test_a_launcher_says_which_variables_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MP_PP0_LAYERS", "6")
    assert launch.main(["run", "pretrain", "run.sh", "0", "--lr", "1"]) == 2
    assert "note: MP_PP0_LAYERS=6 in the environment" in capsys.readouterr().out


def test_values_are_quoted() -> None:
    text = legacy.answer(variant(OUT="/my runs/$(date)"), "run_mcore_qwen3.sh", {})
    assert flags_of(text)["--output-dir"] == ["/my runs/$(date)"]
    assert re.search(r"'/my runs/\$\(date\)'", text)


def test_a_stray_word_is_no_old_call() -> None:
    assert legacy.recognise(["train", "now"]) is None
    assert "is not a flag" in legacy.answer(["train", "now"])


def test_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_patch.training.legacy", "run_mcore_qwen3.sh", *FULL],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: positional arguments")
