"""Decoding with kept keys and values gives the logits of whole passes, for every kind of layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import configs
import pytest
import torch

from megatron_patch.convert import one_rank, plan

KINDS: dict[str, dict[str, Any]] = {
    "dense": configs.QWEN3,
    "latent": configs.DEEPSEEK_V3,
    "window": configs.MISTRAL | {"sliding_window": 6},
    "delta": configs.QWEN3_NEXT,
}


@pytest.mark.parametrize(
    "kind", [k if k == "latent" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_decoding_is_a_whole_pass(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    ids = torch.randint(0, 200, (1, 20), generator=torch.Generator().manual_seed(1))
    with one_rank.one_rank():
        model = one_rank.build(plan.resolve(tmp_path))
        want = one_rank.logits(model, ids)[0]
        decode = one_rank.decoder(model, 20)
        got = [decode(ids[:, :9])]
        got += [decode(ids[:, n : n + 1]) for n in range(9, 20)]
    torch.testing.assert_close(torch.stack(got), want[8:], rtol=1e-5, atol=1e-5)
