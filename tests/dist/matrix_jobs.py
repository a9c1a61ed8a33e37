"""What the ranks do in `test_resume_matrix.py`: train, and tell what a resume has to keep."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

from tests.dist import jobs


def _digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()[:16]


def train(
    rank: int, world_size: int, directory: Path, argv: list[str], resave: bool = False
) -> dict[str, Any]:
    """Train by the entry point.

    Returns:
        `buckets`: (elements, of them padding) of every gradient bucket. `rows`: digests of the
        sequences of every micro-batch, on the ranks that read any. `random`: at every step, digests
        of the states of Python's, NumPy's, torch's and the model-parallel generators; two of them
        draw a number at every step, so that they move.
    """
    import random

    import numpy as np
    import torch
    from megatron.core import mpu, tensor_parallel
    from megatron.training import training as upstream

    from megatron_patch.training import step

    held: dict[str, Any] = {"rows": [], "random": []}
    set_up, get_batch = upstream.setup_model_and_optimizer, step.get_batch

    def keeping(*args: Any, **kwargs: Any) -> Any:
        batch = get_batch(*args, **kwargs)
        first = mpu.is_pipeline_first_stage(ignore_virtual=True)
        if batch["tokens"] is not None and first and not mpu.get_tensor_model_parallel_rank():
            held["rows"] += [_digest(row.tolist()) for row in batch["tokens"]]
        return batch

    def looking(*args: Any, **kwargs: Any) -> Any:
        built = set_up(*args, **kwargs)
        held["buckets"] = [
            (bucket.grad_data.numel(), bucket.grad_data.numel() - bucket.numel_unpadded)
            for chunk in built[0]
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            for bucket in buffer.buckets
        ]
        optimize = built[1].step

        def drawing() -> Any:
            random.random(), np.random.rand()
            tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
            states = {
                "python": random.getstate(),
                "numpy": [np.array(x).tolist() for x in np.random.get_state()],
                "torch": torch.get_rng_state().tolist(),
                **{name: state.tolist() for name, state in tracker.items()},
            }
            held["random"].append({name: _digest(state) for name, state in states.items()})
            return optimize()

        built[1].step = drawing
        return built

    step.get_batch, upstream.setup_model_and_optimizer = keeping, looking
    status = jobs.train(rank, world_size, directory, argv, resave=resave)["status"]
    return {"status": status, **held}
