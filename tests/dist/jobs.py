"""What the ranks do in `tests/dist`: train by the real entry point, and look at the tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _canonical(model: list[Any], value: Callable[[Any], Any]) -> dict[str, Any]:
    """The model's sharded state dict with `value(parameter)` in place of every parameter.

    Saved by `dist_checkpointing`, it gives whole tensors whose names do not depend on the layout.
    """
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from megatron.core.utils import unwrap_model

    out: dict[str, Any] = {}
    for index, chunk in enumerate(unwrap_model(model)):
        by_pointer = {p.data_ptr(): p for p in chunk.parameters()}
        state = chunk.sharded_state_dict(
            metadata={
                "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
                "singleton_local_shards": False,
            }
        )

        def swap(x: Any, by_pointer: dict[int, Any] = by_pointer) -> Any:
            if isinstance(x, ShardedTensor | ShardedTensorFactory):
                parameter = by_pointer.get(x.data.data_ptr())
                if parameter is None:
                    return None  # a buffer
                new = value(parameter).detach().reshape(x.data.shape).clone()
                return dataclasses.replace(x, data=new)
            return None if isinstance(x, ShardedObject) else x

        dict_list_map_inplace(swap, state)
        out[f"model{index}"] = {k: v for k, v in state.items() if v is not None}
    return out


def _check_replicas(state: dict[str, Any]) -> None:
    """Copies of one shard on several ranks must be equal bit for bit."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    mine = []
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedTensorFactory):
            continue  # its parts are named only when it is built, by the save that follows
        digest = hashlib.sha256(leaf.data.contiguous().float().numpy().tobytes()).hexdigest()
        mine.append(((leaf.key, tuple(leaf.global_offset)), digest))
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    seen: dict[Any, str] = {}
    for shards in everyone:
        for place, digest in shards:
            assert seen.setdefault(place, digest) == digest, f"replicas of {place} differ"


def _save(state: dict[str, Any], directory: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    _check_replicas(state)
    dist_checkpointing.save(state, str(directory))


def train(
    rank: int,
    world_size: int,
    directory: Path,
    argv: list[str],
    grads_after: int | None = None,
    weights: bool = False,
    resave: bool = False,
    die_in_step: int | None = None,
    die_after: float | None = None,
    without: list[str] | None = None,
    entry: str = "pretrain",
    file_limit: int | None = None,
    minutes_ago: float | None = None,
) -> dict[str, Any]:
    """Train by the entry point; optionally keep gradients of a step and the final weights.

    Args:
        rank: global rank.
        world_size: number of ranks.
        directory: gets `grads/`, `weights/` and `resaved/` as torch_dist.
        argv: the entry point's command line.
        grads_after: number of the step whose reduced gradients are kept.
        weights: whether to keep the weights after the last step.
        resave: whether to save a checkpoint of what was loaded before the first step.
        die_in_step: step of this process in which rank 0 kills itself, gradients done.
        die_after: seconds until all ranks are killed, wherever they are then.
        without: patches to leave out.
        entry: `pretrain` or `sft`.
        file_limit: bytes that a file may grow to once training begins; a stand-in for a full disk.
        minutes_ago: how long the run has been going on when its first step begins.
    """
    if die_after is not None:
        _kill_me_in(die_after)
    import torch
    from megatron.training import training as upstream

    main = importlib.import_module(f"megatron_patch.{entry}").main
    original = upstream.setup_model_and_optimizer
    held: dict[str, Any] = {}

    def set_up(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        held["model"] = model
        step, count = optimizer.step, iter(range(1, 1 << 30))

        def recording_step() -> Any:
            number = next(count)
            if number == die_in_step and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == grads_after:
                _save(_canonical(model, lambda p: p.main_grad.float()), directory / "grads")
            return step()

        optimizer.step = recording_step
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        if minutes_ago is not None:
            upstream._TRAIN_START_TIME -= 60 * minutes_ago
        if resave:
            _resave(model, optimizer, scheduler, directory / "resaved")
        return model, optimizer, scheduler

    if without:
        _leave_out(without)
    destroy = torch.distributed.destroy_process_group
    upstream.setup_model_and_optimizer = set_up
    torch.distributed.destroy_process_group = lambda *_: None  # kept for the work below
    status = main(argv)
    torch.distributed.destroy_process_group = destroy
    if status == 0 and weights:
        _save(_canonical(held["model"], lambda p: p.data.float()), directory / "weights")
    return {"status": status}


def _kill_me_in(seconds: float) -> None:
    """SIGKILL from another process, so that no lock of this one delays it."""
    me = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        if os.getppid() == me:
            os.kill(me, signal.SIGKILL)
        os._exit(0)


def _resave(model: list[Any], optimizer: Any, scheduler: Any, directory: Path) -> None:
    """Save by upstream's own function, in another place than the run's."""
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    args = get_args()
    save, args.save = args.save, str(directory)
    save_checkpoint(args.iteration, model, optimizer, scheduler, 0)
    args.save = save


def _leave_out(names: list[str]) -> None:
    """Run on the upstream that the named patches mend."""
    from megatron_patch.patches import registry

    apply = registry.apply

    def apply_others(*args: Any, **kwargs: Any) -> Any:
        done = apply(*args, **kwargs)
        registry.revert(names)
        return done

    registry.apply = apply_others


def load_tensors(rank: int, world_size: int, directory: Path, source: str) -> dict[str, Any]:
    """Read a folder written by `train` into one `tensors.pt` of whole tensors."""
    import torch
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    state = {k: v for k, v in load_plain_tensors(source).items() if torch.is_tensor(v)}
    torch.save(state, directory / "tensors.pt")
    return {"names": sorted(state)}


def count_parameters(
    rank: int, world_size: int, directory: Path, argv: list[str]
) -> dict[str, Any]:
    """Build the model of a command line by the entry point: what this rank holds of it.

    The biases of routers are counted along, although they are buffers.
    """
    from megatron.core import mpu
    from megatron.core.utils import unwrap_model
    from megatron.training import training as upstream

    from megatron_patch import pretrain

    original = upstream.setup_model_and_optimizer
    found: dict[str, Any] = {}

    def set_up(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        chunks = unwrap_model(built[0])
        count = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        count += sum(
            buffer.numel()
            for chunk in chunks
            for name, buffer in chunk.named_buffers()
            if name.endswith("expert_bias")
        )
        found.update(stage=mpu.get_pipeline_model_parallel_rank(), count=count)
        return built

    upstream.setup_model_and_optimizer = set_up
    assert pretrain.main(argv) == 0
    return found
