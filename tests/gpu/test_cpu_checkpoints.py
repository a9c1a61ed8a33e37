"""Checkpoints made where there is no GPU, in training with Transformer Engine on one.

As a program (``python -m tests.gpu.test_cpu_checkpoints KIND FOLDER``) this is the CPU's side,
which sees no GPU: a random transformers model, its conversion, and the first loss of training on
the CPU. The test starts that for every kind of model at once, trains a step on the GPU from the
same checkpoint, and converts what the GPU run saved back to Hugging Face files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))

#: Sizes that the fast kernels take, for whichever of these keys a config has.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

#: Kinds of `test_converted_weights.MODELS`, and how far the first loss may be from the CPU's in
#: float32, relative. The kernels of Gated DeltaNet multiply in TF32.
KINDS = {
    "qwen2": 1e-4,
    "qwen3": 1e-4,
    "moe": 1e-4,
    "deepseek-v3": 1e-4,
    "deepseek-v2": 1e-4,
    "glm4": 1e-4,
    "mistral": 1e-4,
    "mixtral": 1e-4,
    "smollm3": 1e-4,
    "qwen2-moe": 1e-4,
    "qwen3-next": 3e-3,
    "qwen3.5-moe": 3e-3,
    "gpt-oss": 1e-4,
}

#: Further runs in low precision, where other kernels work: kind, flags, and the same bound.
LOW = {
    "qwen3-bf16": ("qwen3", ("--precision", "bf16"), 5e-3),
    "mistral-bf16": ("mistral", ("--precision", "bf16"), 5e-3),
    "deepseek-v3-bf16": ("deepseek-v3", ("--precision", "bf16"), 1e-2),
    "qwen3-next-bf16": ("qwen3-next", ("--precision", "bf16"), 1e-2),
    "smollm3-bf16": ("smollm3", ("--precision", "bf16"), 5e-3),
    "qwen3-fp8": ("qwen3", ("--precision", "bf16", "--fp8", "delayed"), 5e-2),
}

#: A run from the checkpoint of a run in FP8.
AGAIN = "qwen3-fp8 again"

RUNS = {kind: (kind, ("--precision", "fp32"), limit) for kind, limit in KINDS.items()} | LOW


def cpu_side(kind: str, folder: Path) -> None:
    """Make, convert and train; ``cpu.json`` tells the losses and how to start the same run."""
    from megatron_patch.training import metrics
    from tests.dist import test_converted_weights as converted
    from tests.dist.harness import RankServer

    config = converted.MODELS[kind]
    config = config | {key: size for key, size in SIZES.items() if config.get(key) is not None}
    ranks = RankServer()
    try:
        start = converted.convert(ranks, config, folder)
        argv = converted.flags(start, folder / "cpu", start.mcore)
        job = ranks.run("tests.dist.jobs:train", 1, folder / "job", argv=[*argv, "--device", "cpu"])
        assert job.values[0]["status"] == 0, job.logs[0].read_text()[-3000:]
    finally:
        ranks.close()
    (first,) = metrics.read(folder / "cpu")
    result = {"transformers": start.loss, "cpu": first["lm loss"], "argv": argv}
    (folder / "cpu.json").write_text(json.dumps(result))


def run(command: list[str], log: Path, **environment: str) -> None:
    """Run a program of this checkout; its output goes to a file, and into the failure."""
    with log.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", *command],
            stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, check=False, timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
        )  # fmt: skip
    assert done.returncode == 0, f"{command}:\n{log.read_text()[-4000:]}"


@dataclass(frozen=True)
class Trained:
    """Losses of both sides, and what the GPU run was made from and made into."""

    cpu: float
    gpu: float
    transformers: float
    given: Path
    back: Path


def train(name: str, folder: Path) -> Trained:
    """One run on the GPU from the CPU's checkpoint, and its own checkpoint as HF files again."""
    from megatron_patch.training import metrics

    kind, more, _ = RUNS[name]
    made = folder / kind
    known = json.loads((made / "cpu.json").read_text())
    output = folder / f"{name}-gpu"
    argv = [str(output) if word == str(made / "cpu") else word for word in known["argv"]]
    run(["megatron_patch.pretrain", *argv, *more], folder / f"{name}-gpu.log")
    (first,) = metrics.read(output)
    back = folder / f"{name}-back"
    where = ["--input-dir", str(output), "--output-dir", str(back)]
    run(["megatron_patch", "convert", "mcore2hf", *where], folder / f"{name}-back.log")
    return Trained(known["cpu"], first["lm loss"], known["transformers"], made / "hf", back)


def other_bookkeeping(folder: Path) -> float:
    """First loss in FP8 from a checkpoint of FP8 whose bookkeeping is in every form."""
    from megatron_patch.convert import dist_io
    from megatron_patch.training import metrics
    from tests.unit.checkpoints import change_bookkeeping

    start = folder / "qwen3-fp8-gpu" / "checkpoints"
    assert change_bookkeeping(dist_io.find_checkpoint(start))
    known = json.loads((folder / "qwen3" / "cpu.json").read_text())
    other = {
        str(folder / "qwen3" / "cpu"): str(folder / "again"),
        str(folder / "qwen3" / "mcore"): str(start),
    }
    argv = [other.get(word, word) for word in known["argv"]]
    run(["megatron_patch.pretrain", *argv, *RUNS["qwen3-fp8"][1]], folder / "again.log")
    (first,) = metrics.read(folder / "again")
    return first["lm loss"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every run, or the exception that ended it; all at once, each mostly imports."""
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, Any] = {}

    def attempt(function: Any, *args: Any, **more: Any) -> Any:
        try:
            return function(*args, **more)
        except Exception as error:
            return error

    def make(kind: str) -> Any:
        command = ["tests.gpu.test_cpu_checkpoints", kind, str(folder / kind)]
        return attempt(run, command, folder / f"{kind}.log", CUDA_VISIBLE_DEVICES="")

    kinds = sorted({kind for kind, _, _ in RUNS.values()})
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) * 3 // 4)) as pool:
        trouble = {kind: error for kind, error in zip(kinds, pool.map(make, kinds), strict=True)}
        names = [name for name, (kind, _, _) in RUNS.items() if trouble[kind] is None]
        results = pool.map(lambda name: attempt(train, name, folder), names)
        found = {name: trouble[kind] for name, (kind, _, _) in RUNS.items()}
        found |= dict(zip(names, results, strict=True))
    found[AGAIN] = attempt(other_bookkeeping, folder)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_first_loss_is_the_cpus(name: str, trained: dict[str, Any]) -> None:
    import torch

    from tests.dist.test_converted_weights import load_tensors

    kind, more, limit = RUNS[name]
    if kind == "qwen3-next" and importlib.util.find_spec("fla") is None:
        pytest.skip("needs flash-linear-attention")
    if isinstance(trained[name], Exception):
        raise trained[name]
    result: Trained = trained[name]
    print(
        f"{name}: transformers {result.transformers:.6f}, CPU {result.cpu:.6f}, GPU "
        f"{result.gpu:.6f}, off by {abs(result.gpu / result.cpu - 1):.1e} (limit {limit:g})"
    )
    assert result.cpu == pytest.approx(result.transformers, rel=5e-6)
    assert result.gpu == pytest.approx(result.cpu, rel=limit)
    # The step at a learning rate of 1e-30 moved zeros only: what the GPU saved is the model that
    # was given, bookkeeping aside.
    given, back = load_tensors(result.given), load_tensors(result.back)
    assert sorted(given) == sorted(back)
    for tensor_name, tensor in back.items():
        moved = (tensor.float() - given[tensor_name].to(tensor.dtype).float()).abs().max()
        assert moved < 1e-25, tensor_name
    weights = {tensor.dtype for tensor in back.values()}
    assert torch.float32 in weights if "fp32" in more else torch.bfloat16 in weights


def test_fp8_goes_on_with_any_form_of_bookkeeping(trained: dict[str, Any]) -> None:
    for name in ("qwen3-fp8", AGAIN):
        if isinstance(trained[name], Exception):
            raise trained[name]
    print(f"FP8: {trained['qwen3-fp8'].gpu:.6f}, with other bookkeeping {trained[AGAIN]:.6f}")
    assert trained[AGAIN] == pytest.approx(trained["qwen3-fp8"].gpu, rel=2e-2)


if __name__ == "__main__":
    cpu_side(sys.argv[1], Path(sys.argv[2]))
