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


def reading(
    rank: int, world_size: int, directory: Path, argv: list[str], cut: str | None = None
) -> dict[str, Any]:
    """Train from Hugging Face files; how many bytes of weights and of headers this rank read.

    Args:
        rank: global rank.
        world_size: number of ranks.
        directory: gets `weights/`.
        argv: the entry point's command line.
        cut: a file that loses its second half after its header has been read, on rank 0.
    """
    from megatron_patch.convert import hf_io, load

    count = {"bytes": 0, "headers": 0}

    def counted(function: Any, kind: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = _characters()
            try:
                return function(*args, **kwargs)
            finally:
                count[kind] += _characters() - before

        return call

    def cutting(stages: Any, source: Any) -> Any:
        if cut is not None and rank == 0:
            with open(cut, "r+b") as file:
                file.truncate(Path(cut).stat().st_size // 2)
        return inner(stages, source)

    hf_io.read_model = counted(hf_io.read_model, "headers")
    inner = counted(load.load, "bytes")
    load.load = cutting
    status = jobs.train(rank, world_size, directory, argv, weights=True)["status"]
    return {"status": status, **count}


def _characters() -> int:
    """Bytes that this process has read by system calls, cached or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def node_of_its_own(
    rank: int, world_size: int, directory: Path, argv: list[str], output: bool = False
) -> dict[str, Any]:
    """Train as the only rank of a node, which has its cache, and if asked its output, to itself."""
    import os

    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    cache = directory / f"cache-of-node-{rank}"
    own = ["--output-dir", str(directory / f"run-of-node-{rank}")] if output else []
    argv = [*argv, "--data-cache-path", str(cache), *own]
    status = jobs.train(rank, world_size, directory, argv)
    return {**status, "files": sorted(p.name for p in cache.rglob("*.npy"))}
