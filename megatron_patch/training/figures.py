"""What ranks measure in a step, brought together without a wait of its own for the device.

A reduction is started when the step is done; its result is copied beside it and read after the
loss, for which rank 0 waits anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def _on_device(values: Sequence[float]) -> Tensor:
    """Float64 where collectives take it, without waiting for the device."""
    import torch

    here = torch.tensor(values, dtype=torch.float64)
    if torch.distributed.get_backend() != "nccl":
        return here
    return here.pin_memory().to(torch.cuda.current_device(), non_blocking=True)


def read_later(values: Tensor) -> Callable[[], list[float]]:
    """Copy to the host beside what runs; the returned function waits for the copy and no more."""
    import torch

    if not values.is_cuda:
        return values.tolist
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    here.copy_(values, non_blocking=True)
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> list[float]:
        done.synchronize()
        return list(here.tolist())

    return read


def largest(values: Sequence[float]) -> Callable[[], list[float]]:
    """The largest of each value over all ranks, to be read later.

    Args:
        values: as many on each rank, in the same order.
    """
    import torch

    mine = _on_device(values)
    torch.distributed.all_reduce(mine, op=torch.distributed.ReduceOp.MAX)
    return read_later(mine)


# --- speed --------------------------------------------------------------------------------------

#: Part of a device's name -> dense bf16 TFLOP/s (source: NVIDIA data sheets, without sparsity).
#: The first that is found counts.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H20", 148.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)


def peak_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name; None where it is not known."""
    return next((peak * 1e12 for part, peak in _PEAKS if part in name), None)


def device_peak() -> float | None:
    """`peak_flops` of this process's device; None on a CPU."""
    import torch

    if torch.distributed.get_backend() != "nccl":
        return None
    return peak_flops(torch.cuda.get_device_name())


# --- mixtures of experts ------------------------------------------------------------------------


class ExpertLoad:
    """Tokens of each expert, dropped choices, biases and losses of the routers, for each layer.

    Counted on the device in the forward pass (once each, also where it is recomputed), summed over
    all ranks in one message a step.

    Args:
        layers: of the model, those of multi-token prediction included.
        experts: of a layer.
        names: the balancing losses that upstream's tracker holds.
    """

    def __init__(self, layers: int, experts: int, names: Sequence[str]) -> None:
        self._layers, self._experts, self._names = layers, experts, tuple(names)
        self._routers: list[Any] = []
        self._counts: Tensor | None = None

    def install(self, stage: Any) -> None:
        """Count in every router of a stage."""
        from megatron.core.transformer.moe.router import TopKRouter

        for module in stage.modules():
            if isinstance(module, TopKRouter):
                self._routers.append(module)
                module.register_forward_hook(self._count, with_kwargs=True)

    def _row(self, router: Any) -> int:
        """The layer's number over all stages, from 0."""
        shift = router.config.num_layers if router.is_mtp_layer else 0
        return int(router.layer_number) - 1 + shift

    def _count(self, router: Any, _args: Any, given: dict[str, Any], output: Any) -> None:
        """A hook: what the router chose."""
        import torch

        # Without gradients it is an evaluation, or the first of two passes.
        if not (router.training and torch.is_grad_enabled()):
            return
        chosen = output[1].detach()
        padding = given.get("padding_mask")
        if padding is not None:
            chosen = chosen & ~padding.reshape(-1, 1)
            tokens: Any = (~padding).sum()
        else:
            tokens = chosen.shape[0]
        if self._counts is None:
            self._counts = torch.zeros(
                (self._layers, self._experts + 1), dtype=torch.float64, device=chosen.device
            )
        row = self._counts[self._row(router)]
        row[:-1] += chosen.sum(dim=0)
        row[-1] += tokens * router.topk

    def collect(self) -> Callable[[], dict[str, Any]]:
        """Bring together what the step has counted; the returned function reads it.

        All ranks have to call it.
        """
        import torch
        from megatron.core import mpu
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        counts = self._counts
        if counts is None:  # a stage without routers
            counts = _on_device([0.0] * (self._layers * (self._experts + 1))).view(self._layers, -1)
        parts = [counts]
        metrics = get_moe_metrics_tracker().metrics
        once = mpu.get_data_parallel_world_size()
        tensor = mpu.get_tensor_and_context_parallel_group().size()
        for name in self._names:
            entry = metrics.get(name)
            if entry is None:
                parts.append(torch.zeros_like(counts[:, :1]))
                continue
            # Upstream sums over one group and averages over others; here all ranks are summed.
            copies = once * tensor if entry.avg_group is not None else 1
            if entry.avg_group is None:
                copies *= once if entry.needs_dp_avg else 1
                copies *= tensor if entry.reduce_group is None else 1
            share = entry.values.to(counts.dtype) / (copies * get_num_microbatches())
            parts.append(share[:, None])
        parts.append(self._biases(counts))
        flat = torch.cat([part.reshape(-1) for part in parts])
        torch.distributed.all_reduce(flat)
        if self._counts is not None:
            self._counts.zero_()
        read = read_later(flat)
        return lambda: self._words(read())

    def _biases(self, like: Tensor) -> Tensor:
        """[layers, 2]: lowest and highest bias, from one rank of each stage, else zeros."""
        import torch
        from megatron.core import mpu

        out = torch.zeros((self._layers, 2), dtype=like.dtype, device=like.device)
        first = (
            mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        )
        for router in self._routers if first else ():
            if router.expert_bias is not None:
                row = self._row(router)
                out[row, 0], out[row, 1] = router.expert_bias.min(), router.expert_bias.max()
        return out

    def _words(self, flat: list[float]) -> dict[str, Any]:
        """The record of a step from the message; layers without routers are left out."""
        import numpy as np

        sizes = [self._experts + 1] + [1] * len(self._names) + [2]
        arrays, at = [], 0
        for size in sizes:
            arrays.append(np.array(flat[at : at + size * self._layers]).reshape(self._layers, size))
            at += size * self._layers
        counts, wanted = arrays[0][:, :-1], arrays[0][:, -1]
        there = wanted > 0
        if not there.any():
            return {}
        mean = counts[there].mean(1)
        load = counts[there].max(1) / np.maximum(mean, 1e-12)
        record: dict[str, Any] = {
            "moe_layers": (np.flatnonzero(there) + 1).tolist(),
            "moe_max_tokens": [int(x) for x in counts[there].max(1)],
            "moe_mean_tokens": [round(float(x), 3) for x in mean],
            "moe_load": [round(float(x), 4) for x in load],
            "moe_load_max": round(float(load.max()), 4),
            "moe_dropped_tokens": round(float((wanted - counts.sum(1))[there].sum())),
        }
        for name, array in zip(self._names, arrays[1:-1], strict=True):
            record[name] = float(array.sum() / there.sum())
        low, high = arrays[-1][there].T
        if low.any() or high.any():
            record["moe_bias_range"] = [
                [float(a), float(b)] for a, b in zip(low, high, strict=True)
            ]
            record["moe_bias_spread"] = float((high - low).max())
        return record


#: The load of this process's experts; None for a dense model.
EXPERTS: ExpertLoad | None = None


def expert_load(args: Any) -> ExpertLoad | None:
    """What is to be counted for validated Megatron arguments."""
    if not args.num_experts:
        return None
    kinds = args.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    found = [names[kind] for kind in kinds if kind in names]
    if args.moe_z_loss_coeff is not None:
        found.append("z_loss")
    return ExpertLoad(args.num_layers + (args.mtp_num_layers or 0), args.num_experts, found)
