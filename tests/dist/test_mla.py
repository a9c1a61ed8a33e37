"""Latent attention and a mixture of experts by plain Megatron flags, on the torch backend.

A model in DeepSeek's shape (low-rank queries and keys, values narrower than keys, one dense layer
before expert layers with a shared expert): it trains, its checkpoint has Transformer Engine's
names, and every layout has the gradients of one rank.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import tensors, worst, write_corpus

MODEL = shlex.split("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --max-position-embeddings 64 --vocab-size 500 --padded-vocab-size 500
    --tokenizer-type NullTokenizer --null-tokenizer-eod-id 0
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --init-method-std 0.05
    --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm --rope-type rope
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1]
    --moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
""")

#: What Megatron-Core's Transformer Engine spec calls the parameters of such a model. Experts
#: are stacked along an axis of their own name.
ATTENTION = shlex.split("""
    input_layernorm.weight
    self_attention.linear_q_down_proj.weight
    self_attention.linear_q_up_proj.layer_norm_weight
    self_attention.linear_q_up_proj.weight
    self_attention.linear_kv_down_proj.weight
    self_attention.linear_kv_up_proj.layer_norm_weight
    self_attention.linear_kv_up_proj.weight
    self_attention.linear_proj.weight
""")
DENSE = ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
MOE = shlex.split("""
    pre_mlp_layernorm.weight
    mlp.router.weight
    mlp.shared_experts.linear_fc1.weight
    mlp.shared_experts.linear_fc2.weight
    mlp.experts.experts.linear_fc1.weight
    mlp.experts.experts.linear_fc2.weight
""")
NAMES = {
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
    *(f"decoder.layers.{i}.{name}" for i in (0, 1) for name in ATTENTION),
    *(f"decoder.layers.0.{name}" for name in DENSE),
    *(f"decoder.layers.1.{name}" for name in MOE),
}


def run(
    ranks: RankServer, corpus: Path, folder: Path, world: int, more: tuple[str, ...]
) -> tuple[list[float], dict[str, np.ndarray]]:
    argv = [
        *MODEL,
        *("--data-path", str(corpus), "--output-dir", str(folder / "run")),
        *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
        *("--train-iters", "4", "--lr", "0.1", "--min-lr", "0.1", "--warmup-steps", "0"),
        *("--optimizer", "sgd", "--no-use-distributed-optimizer", "--no-overlap-param-gather"),
        *("--clip-grad", "0", "--weight-decay", "0", "--seed", "11", "--precision", "fp32"),
        *more,
    ]
    result = ranks.run("tests.dist.jobs:train", world, folder, argv=argv, grads_after=1)
    assert result.values == [{"status": 0}] * world
    losses = [row["lm loss"] for row in metrics.read(folder / "run")]
    return losses, tensors(ranks, folder / "grads", folder / "g")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("mla") / "corpus"
    write_corpus(prefix)
    return prefix


@pytest.fixture(scope="module")
def one_rank(
    ranks: RankServer, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float], dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("mla-one")
    first = folder / "first"
    run(ranks, corpus, first, 1, ("--train-iters", "1"))
    start = first / "run" / "checkpoints"
    more = ("--init-from", str(start), "--no-save-optim")
    return start, *run(ranks, corpus, folder / "second", 1, more)


def test_names_are_transformer_engines(
    one_rank: tuple[Path, list[float], dict[str, np.ndarray]],
) -> None:
    _, _, grads = one_rank
    assert {re.sub(r"^model0\.", "", name) for name in grads} == NAMES
    for name, grad in grads.items():
        assert np.isfinite(grad).all()
        assert grad.any(), f"{name} takes no part"


@pytest.mark.parametrize("layout", ["--tp", "--cp", "--pp"])
def test_layout_changes_nothing(
    layout: str,
    ranks: RankServer,
    corpus: Path,
    one_rank: tuple[Path, list[float], dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    start, want_losses, want_grads = one_rank
    more = ("--init-from", str(start), "--no-save-optim", layout, "2")
    losses, grads = run(ranks, corpus, tmp_path, 2, more)
    assert np.ptp(want_losses) > 0.01
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    gap, name = worst(grads, want_grads)
    assert gap < 1e-5, name
