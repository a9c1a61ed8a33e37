"""Stopping and going on on one GPU, in the precisions of real runs; what saving holds up.

The optimizer is the distributed Adam. States are the bytes of two checkpoints of one step: the one
that was loaded, and the one that is saved at once by the process that has loaded it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patch.training import metrics
from tests.dist.harness import ROOT
from tests.dist.tiny import MODELS, at_step, stored, write_corpus, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Sizes that the fast kernels take.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "moe_intermediate_size": 256,
}
PRECISION_AWARE = (
    *("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"),
    *("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
)
CASES = {
    "bf16": ("dense", ()),
    "bf16-moe": ("moe", ()),
    "precision-aware": ("dense", PRECISION_AWARE),
    "fp16-masters": ("dense", (*PRECISION_AWARE, "--main-params-dtype", "fp16")),
    "fp8-parameters": ("dense", ("--fp8", "delayed", "--fp8-param-gather")),
    "fp8-precision-aware": (
        "dense",
        ("--fp8", "delayed", "--fp8-param-gather", *PRECISION_AWARE),
    ),
}


def command(folder: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--hf-model", str(folder / "hf"), "--data-path", str(folder / "corpus")),
        *("--output-dir", str(output), "--seq-length", "64", "--micro-batch-size", "2"),
        *("--global-batch-size", "4", "--train-iters", "10", "--save-interval", "5"),
        *("--lr", "1e-3", "--warmup-steps", "2", "--seed", "11", "--use-distributed-optimizer"),
        # More than one bucket, where nothing is reduced either.
        *("--overlap-grad-reduce", "--ddp-bucket-size", "300000"),
        *more,
    ]


@pytest.mark.parametrize("case", CASES)
def test_goes_on_exactly(case: str, tmp_path: Path) -> None:
    kind, more = CASES[case]
    model = MODELS[kind]
    write_model(tmp_path / "hf", model | {k: v for k, v in SIZES.items() if k in model})
    write_corpus(tmp_path / "corpus")
    # Attention's backward pass may otherwise add in any order.
    exact = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    program = "import json, sys; from pathlib import Path; from tests.dist.jobs import train; "
    program += "sys.exit(train(0, 1, Path(sys.argv[1]), **json.loads(sys.argv[2]))['status'])"

    def train(name: str, output: Path, **options: Any) -> list[dict[str, Any]]:
        argv = command(tmp_path, output, *more)
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder), json.dumps({"argv": argv} | options)],
            capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
            env=os.environ | exact | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return metrics.read(output)

    whole = train("a", tmp_path / "whole")
    copy = at_step(tmp_path / "whole", tmp_path / "run")
    rest = train("b", copy, resave=True)
    assert [row["iteration"] for row in rest] == [6, 7, 8, 9, 10]
    then = stored(copy / "checkpoints" / "iter_0000005")
    again = stored(tmp_path / "b" / "resaved" / "iter_0000005")
    assert sorted(then) == sorted(again)
    for state in ("param", "exp_avg", "exp_avg_sq"):
        assert sum(f"optimizer.state.{state}." in key for key in then) > 5
    different = [key for key in then if then[key] != again[key]]
    pairs = [(a["lm loss"], b["lm loss"]) for a, b in zip(whole[5:], rest, strict=True)]
    print(json.dumps({"case": case, "states": len(then), "different": different, "losses": pairs}))
    assert not different
    assert all(a == b for a, b in pairs), pairs
    ends = [stored(run / "checkpoints" / "iter_0000010") for run in (tmp_path / "whole", copy)]
    assert ends[0] == ends[1], "five steps later too"


def test_what_a_save_holds_up(tmp_path: Path) -> None:
    """Seconds that the step after a save takes longer: at once, and in the background."""
    model = MODELS["dense"] | {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    write_model(tmp_path / "hf", model)
    write_corpus(tmp_path / "corpus")
    stalls = {}
    for name, more in (("sync", ()), ("async", ("--async-save",))):
        argv = command(tmp_path, tmp_path / name, *more)
        argv += ["--train-iters", "24", "--save-interval", "8", "--keep-last", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_patch.pretrain", *argv],
            capture_output=True, text=True, check=False, timeout=300,
            env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        seconds = {row["iteration"]: row["seconds"] for row in metrics.read(tmp_path / name)}
        usual = statistics.median(seconds.values())
        stalls[name] = [round(seconds[step] - usual, 3) for step in (9, 17)]
        (size,) = [
            sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
            for folder in (tmp_path / name / "checkpoints").glob("iter_*")
        ]
    print(json.dumps({"checkpoint_bytes": size, "stall_seconds": stalls}))
    assert stalls["async"][1] < stalls["sync"][1]
