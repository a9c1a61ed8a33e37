"""A Megatron model in this process: one rank, fp32, on the CPU or the first GPU.

For proofs only: conversion itself needs no model and no process group.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_patch.convert.meta_model import parse_model

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_patch.models.family import ModelSpec


@contextmanager
def one_rank() -> Iterator[None]:
    """Process groups of size one, on the CPU platform where there is no GPU."""
    import torch

    from megatron_patch.patches import registry
    from megatron_patch.platform import cpu, torch_backend

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.enable()
    if on_cpu or importlib.util.find_spec("transformer_engine") is None:
        torch_backend.enable()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
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


def build(spec: ModelSpec, **more: Any) -> Any:
    """The `GPTModel` of a spec, through the same configuration and hooks as training."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_patch.training.model import model_config

    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        more.setdefault("use_cpu_initialization", not torch.cuda.is_available())
        config = model_config(parse_model(spec, **more), spec)
    finally:
        sys.argv = argv
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    return model.eval()


def logits(model: Any, tokens: Tensor) -> Tensor:
    """``[batch, sequence]`` token ids to fp32 logits ``[batch, sequence, padded vocabulary]``."""
    import torch

    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # The CPU platform turns compilation off before megatron is imported; another user of this
    # process may have imported it earlier.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found: Tensor = model(tokens, positions, None).float()
    return found


def decoder(model: Any, length: int) -> Callable[[Tensor], Tensor]:
    """What continues one text: called with its new tokens, gives the logits behind the last.

    Keys and values of earlier tokens are kept (upstream's static batching). Gated DeltaNet has no
    such state upstream; models with it compute the whole text again for every token.

    Args:
        model: of `build`.
        length: most tokens that the text will have.

    Returns:
        Function of int64 [1, n] to float32 [padded vocabulary].
    """
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext

    if model.config.experimental_attention_variant is not None:
        said: list[Tensor] = []

        def again(tokens: Tensor) -> Tensor:
            said.append(tokens)
            return logits(model, torch.cat(said, dim=1))[0, -1]

        return again
    context = StaticInferenceContext(1, length)

    def step(tokens: Tensor) -> Tensor:
        start, size = context.sequence_len_offset, tokens.shape[1]
        positions = torch.arange(start, start + size, device=tokens.device)[None]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = model(tokens, positions, None, inference_context=context)
        context.sequence_len_offset = start + size
        context.enable_decode_mode()
        last: Tensor = found[0, -1].float()
        return last

    return step
