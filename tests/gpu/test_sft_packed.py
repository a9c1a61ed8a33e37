"""Packed samples on a GPU: loss and gradient norm of the same samples alone, in bf16, by step.

Attention is Transformer Engine's where it is installed, or this library's. Boundaries that are not
kept show in the first loss already: the samples have nothing to do with each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_patch.training import metrics
from tests.dist.tiny import MODELS, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "toolkits" / "benchmark"))
import sft_speed

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
PACKS = -(-sum(LENGTHS) // 256) + 1


def steps(folder: Path, model: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """Records of five epochs, an epoch a step; from the same random weights for one seed."""
    argv = [
        *("--hf-model", str(model), "--data-path", str(folder / "data")),
        *("--output-dir", str(folder / name), "--seq-length", "256", "--epochs", "5"),
        *("--lr", "1e-3", "--warmup-steps", "0", "--seed", "3"),
        *("--save-hf", "none", "--no-save-optim", *flags),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_patch.sft", *argv],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = metrics.read(folder / name)
    assert len(records) == 5, "an epoch is a step"
    return records


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_packed_is_alone(kind: str, tmp_path: Path) -> None:
    config = MODELS[kind] | SIZES
    if kind == "moe":
        config["router_aux_loss_coef"] = 0.0
    model = write_model(tmp_path / "hf", config)
    sft_speed.write_set(tmp_path / "data", config["vocab_size"], list(LENGTHS))
    packed = steps(tmp_path, model, "packed", "--global-batch-size", str(PACKS))
    alone = steps(
        tmp_path, model, "alone", "--global-batch-size", str(len(LENGTHS)), "--no-packing"
    )
    print(json.dumps([[r["lm loss"] for r in records] for records in (packed, alone)]))
    for one, two in zip(packed, alone, strict=True):
        assert one["lm loss"] == pytest.approx(two["lm loss"], rel=3e-3)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=3e-2)
    assert np.ptp([r["lm loss"] for r in packed]) > 0.05, "losses move"
