"""Modules of the torch backend on real ranks, compared with one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _world(rank: int, world_size: int) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model_parallel_cuda_manual_seed(5)


def _config(**more: Any) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "normalization": "RMSNorm",
            "params_dtype": torch.float64,
            "pipeline_dtype": torch.float64,
            **more,
        }
    )


def replicated(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """A replicated linear layer: one start on all ranks, one copy in a checkpoint."""
    import torch
    from megatron.core import mpu

    from megatron_patch.ops.linear import ReplicatedLinear

    _world(rank, world_size)
    config = _config(tensor_model_parallel_size=world_size, sequence_parallel=True)
    layer = ReplicatedLinear(
        16,
        6,
        parallel_mode="duplicated",
        config=config,
        init_method=torch.nn.init.normal_,
        bias=True,
        skip_bias_add=False,
    )
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    shards = layer.sharded_state_dict("x.", metadata=metadata)
    return {
        "weight": layer.weight.tolist(),
        "replicas": {key: list(shard.replica_id) for key, shard in shards.items()},
        "shapes": {key: list(shard.global_shape) for key, shard in shards.items()},
    }


def norm_linear(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Norm and column-parallel linear under sequence parallelism, gradients made whole."""
    import torch
    from megatron.core import mpu

    from megatron_patch.ops.linear import NormColumnParallelLinear

    _world(rank, world_size)
    config = _config(
        tensor_model_parallel_size=world_size,
        sequence_parallel=world_size > 1,
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
    )
    layer = NormColumnParallelLinear(
        16,
        12,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
    )
    generator = torch.Generator().manual_seed(2)
    whole = {
        "weight": torch.randn(12, 16, generator=generator, dtype=torch.float64),
        "bias": torch.randn(12, generator=generator, dtype=torch.float64),
        "layer_norm_weight": torch.randn(16, generator=generator, dtype=torch.float64),
        "layer_norm_bias": torch.randn(16, generator=generator, dtype=torch.float64),
    }
    x = torch.randn(8, 2, 16, generator=generator, dtype=torch.float64)
    factor = torch.randn(8, 2, 12, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for name, value in whole.items():
            part = value if name.startswith("layer_norm") else value.chunk(world_size)[rank]
            getattr(layer, name).copy_(part)
    mine = x.chunk(world_size)[rank].clone().requires_grad_()
    out, bias = layer(mine)
    assert bias is None
    (out * factor.chunk(world_size, dim=-1)[rank]).sum().backward()
    group = mpu.get_tensor_model_parallel_group()

    def gather(value: torch.Tensor, dim: int) -> list[Any]:
        parts = [torch.empty_like(value) for _ in range(world_size)]
        torch.distributed.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, dim).tolist()

    found = {
        "output": gather(out.detach(), -1),
        "input": gather(mine.grad, 0),
        "weight": gather(layer.weight.grad, 0),
        "bias": gather(layer.bias.grad, 0),
    }
    for name in ("layer_norm_weight", "layer_norm_bias"):
        parameter = getattr(layer, name)
        if parameter.sequence_parallel:  # what upstream reads before it sums over TP ranks
            torch.distributed.all_reduce(parameter.grad, group=group)
        found[name] = parameter.grad.tolist()
    return found


def padded_vocab(
    rank: int, world_size: int, directory: Path, true: int, padded: int
) -> dict[str, Any]:
    """Loss and gradients of a GPT model whose vocabulary has `padded` rows, `true` of them real."""
    import torch
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_submodules as submodules_of,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_patch.training.model import mask_padded_vocab

    _world(rank, world_size)
    config = _config(
        tensor_model_parallel_size=world_size,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        num_layers=1,
    )
    model = GPTModel(
        config,
        ModuleSpec(module=TransformerLayer, submodules=submodules_of()),
        vocab_size=padded,
        max_sequence_length=8,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(128, 16, generator=generator, dtype=torch.float64)[:padded]
    head[true:] *= 50  # without the mask these would take the whole softmax
    embedding = torch.randn(128, 16, generator=generator, dtype=torch.float64)[:padded]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name not in ("embedding.word_embeddings.weight", "output_layer.weight"):
                p.fill_(1.0 if p.dim() == 1 else 0.02)  # whatever the split
        model.output_layer.weight.copy_(head.chunk(world_size)[rank])
        model.embedding.word_embeddings.weight.copy_(embedding.chunk(world_size)[rank])
    mask_padded_vocab(model, true)
    tokens = torch.randint(true, (2, 9), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(8).expand(2, -1)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    loss.mean().backward()

    def whole(value: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(value) for _ in range(world_size)]
        group = mpu.get_tensor_model_parallel_group()
        torch.distributed.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts)

    model.eval()
    with torch.no_grad():
        logits = model(tokens[:, :-1], positions, None)
    best = whole(logits.permute(2, 0, 1).contiguous()).argmax(0)
    gradient = whole(model.output_layer.weight.grad)
    return {
        "loss": loss.tolist(),
        "head": gradient[:true].tolist(),
        "head_padding": gradient[true:].abs().max().item() if padded > true else 0.0,
        "embedding": whole(model.embedding.word_embeddings.weight.grad)[:true].tolist(),
        "norm": model.decoder.final_layernorm.weight.grad.tolist(),
        "largest_choice": best.max().item(),
        "hooks": len(model.output_layer._forward_hooks),
    }
