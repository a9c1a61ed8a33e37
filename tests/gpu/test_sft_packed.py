"""Packed samples on a GPU: loss and gradient norm of the same samples alone, in bf16, by step.

Attention is Transformer Engine's where it is installed, or this library's. Boundaries that are not
kept show in the first loss already: the samples have nothing to do with each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_patch.training import metrics
from tests.dist.test_sft import write_data, write_sft_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Head and matrix sizes that the fast kernels take; 18 samples of 3 to 250 tokens.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
LENGTHS = (250, 3, 61, 130, 17, 200, 96, 5, 180, 33, 71, 128, 64, 12, 155, 240, 90, 44)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_packed_is_alone(kind: str, tmp_path: Path) -> None:
    more = {"router_aux_loss_coef": 0.0} if kind == "moe" else {}
    model = write_sft_model(tmp_path / "hf", kind, **SIZES, **more)
    data = write_data(tmp_path / "data.jsonl", LENGTHS)

    def run(name: str, *flags: str) -> list[dict[str, float]]:
        argv = [
            *("--hf-model", str(model), "--data-path", str(data)),
            *("--output-dir", str(tmp_path / name), "--seq-length", "256", "--epochs", "5"),
            *("--lr", "1e-3", "--warmup-steps", "0", "--seed", "3", "--save-hf", "none", *flags),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_patch.sft", *argv],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return metrics.read(tmp_path / name)

    first = run("first", "--epochs", "1", "--global-batch-size", "8", "--no-save-optim")
    start = ("--init-from", str(tmp_path / "first"))
    packs = str(-(-sum(LENGTHS) // 256) + 1)
    packed = run("packed", "--global-batch-size", packs, *start)
    alone = run("alone", "--global-batch-size", str(len(LENGTHS)), "--no-packing", *start)
    assert first and len(packed) == len(alone) == 5, "an epoch is a step"
    for one, two in zip(packed, alone, strict=True):
        assert one["lm loss"] == pytest.approx(two["lm loss"], rel=3e-3)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=3e-2)
    print(json.dumps([[r["lm loss"] for r in runs] for runs in (packed, alone)]))
    assert np.ptp([r["lm loss"] for r in packed]) > 0.05, "losses move"
