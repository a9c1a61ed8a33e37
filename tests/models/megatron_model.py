"""A Megatron model of a resolved spec in this process: one rank, fp32, CPU or the first GPU."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_patch.models.family import ModelSpec


def parse(overlay: dict[str, Any]) -> argparse.Namespace:
    """Megatron's own parser and validation, with ``overlay`` as its defaults."""
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    run = {
        "micro_batch_size": 1,
        "seq_length": min(160, overlay["max_position_embeddings"]),
        "transformer_impl": "transformer_engine",
        "use_cpu_initialization": not torch.cuda.is_available(),
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "train_iters": 1,
        "lr": 1e-3,
    }
    parser.set_defaults(**{**run, **overlay})
    args = parser.parse_args([])
    args.rank, args.world_size, args.local_rank = 0, 1, 0
    validate_args(args)
    return args


@contextmanager
def one_rank() -> Iterator[None]:
    """Process groups of size one, on the CPU platform where there is no GPU."""
    from megatron_patch.patches import registry
    from megatron_patch.platform import cpu, torch_backend

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.enable()
    if on_cpu or importlib.util.find_spec("transformer_engine") is None:
        torch_backend.enable()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    store = torch.distributed.HashStore()
    backend = "gloo" if on_cpu else "nccl"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        registry.revert([patch.name for patch in torch_backend.PATCHES])
        cpu.disable()


def build(spec: ModelSpec) -> Any:
    """The `GPTModel` of a spec, through the same configuration and hooks as training."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_patch.training.model import model_config

    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        config = model_config(parse(spec.args), spec)
    finally:
        sys.argv = argv
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    return model.eval()


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``[batch, sequence]`` token ids to fp32 logits ``[batch, sequence, padded vocabulary]``."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # The CPU platform turns compilation off before megatron is imported; another test of this
    # session may have imported it earlier.
    with torch.compiler.set_stance("force_eager"):
        return model(tokens, positions, None).float()
