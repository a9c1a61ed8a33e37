"""`test_layouts` for other attention: Gated DeltaNet with gated attention, windows and sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import RankServer
from tests.dist.test_layouts import Start, check_layout, start_of
from tests.dist.tiny import COMMON

DELTA: dict[str, Any] = COMMON | {
    "model_type": "qwen3_next",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 16,
    # Norms of sums that nearly cancel let float32 noise grow.
    "rms_norm_eps": 1e-3,
}
WINDOW: dict[str, Any] = {key: value for key, value in COMMON.items() if key != "attention_bias"}
WINDOW |= {"model_type": "mistral", "tie_word_embeddings": True, "sliding_window": 20}

#: Sinks, a window in every other layer, biases everywhere. A clamp that is met would turn noise
#: into gradients that are there or not.
SINKS: dict[str, Any] = COMMON | {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
    "swiglu_limit": 7.0,
}

MODELS = {"delta": DELTA, "window": WINDOW, "sinks": SINKS}
CASES = (
    ("delta", 2, ("--tp", "2")),
    ("delta", 2, ("--cp", "2")),
    ("window", 4, ("--cp", "2", "--tp", "2")),
    *(
        pytest.param("sinks", 2, layout, marks=pytest.mark.slow)
        for layout in (("--tp", "2"), ("--tp", "2", "--ep", "2"), ("--pp", "2"), ("--cp", "2"))
    ),
)


@pytest.fixture(scope="module")
def starts(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Start]:
    """One start a kind, made when a test asks for it."""
    return cache(lambda kind: start_of(ranks, tmp_path_factory.mktemp(kind), MODELS[kind]))


@pytest.mark.parametrize(("kind", "world", "layout"), CASES)
def test_layout_changes_nothing(
    kind: str,
    world: int,
    layout: tuple[str, ...],
    ranks: RankServer,
    starts: Callable[[str], Start],
    tmp_path: Path,
) -> None:
    # The gradient of Gated DeltaNet's dt_bias is a sum that nearly cancels: 5e-4 at TP 2, where
    # the weights still agree to 5e-7 after ten steps.
    gradient = 2e-3 if kind == "delta" else 1e-5
    check_layout(ranks, starts(kind), tmp_path, world, layout, f"{kind} {layout}", gradient)
