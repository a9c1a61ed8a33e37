"""What the ranks do in `test_entry.py`: train, and keep what the model saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.dist import jobs


def batches(rank: int, world_size: int, directory: Path, argv: list[str]) -> dict[str, Any]:
    """Every micro-batch as this rank's model got it, with the rank's place."""
    from megatron.core import mpu

    from megatron_patch.training import step

    seen: list[dict[str, Any]] = []
    get_batch = step.get_batch

    def keeping(*args: Any, **kwargs: Any) -> Any:
        batch = get_batch(*args, **kwargs)
        seen.append({k: None if v is None else v.tolist() for k, v in batch.items()})
        return batch

    step.get_batch = keeping
    status = jobs.train(rank, world_size, directory, argv)["status"]
    return {
        "status": status,
        "tp": mpu.get_tensor_model_parallel_rank(),
        "cp": mpu.get_context_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "batches": seen,
    }


def balancing(
    rank: int, world_size: int, directory: Path, argv: list[str], top_k: int, micro_batches: int
) -> dict[str, Any]:
    """The last router's gradient of the balancing loss alone, written out, and a step's gradients.

    Source: Switch Transformers (Fedus et al. 2021), equation 4, over the choices of k experts:
    experts x sum over experts of (share of the choices) x (mean probability).
    """
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward
    inputs: list[Any] = []
    start: dict[str, Any] = {}

    def keeping(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_number == self.config.num_layers and len(inputs) < micro_batches:
            start.setdefault("weight", self.weight.detach().clone())
            inputs.append(x.detach().clone())
        return forward(self, x, *args, **kwargs)

    TopKRouter.forward = keeping
    status = jobs.train(rank, world_size, directory, argv, grads_after=1)["status"]
    weight = start["weight"].double().requires_grad_()
    total = 0.0
    for x in inputs:
        probabilities = (x.flatten(0, -2).double() @ weight.T).softmax(-1)
        tokens, experts = probabilities.shape
        chosen = probabilities.topk(top_k).indices.flatten()
        share = torch.bincount(chosen, minlength=experts) / (tokens * top_k)
        total = total + experts * (share * probabilities.mean(0)).sum()
    (total / micro_batches).backward()
    return {"status": status, "calls": len(inputs), "gradient": weight.grad.tolist()}
