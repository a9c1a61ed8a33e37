"""Low-rank adapters beside the linear layers of a model, one for each Hugging Face module.

Megatron fuses query, key and value (and gate and up) into one linear layer; an adapter keeps them
apart, `B_q A_q`, `B_k A_k`, `B_v A_v`, as PEFT does, so that what is trained loads there unchanged.
A hook adds its output to the frozen layer's. Splitting over TP is the layer's own: where it splits
its output, `A` is whole and `B` has the rank's rows; where it splits its input, `A` has the rank's
columns and `B` is whole. What crosses ranks is only `r` wide.

Shape suffixes: s tokens on this rank (split under sequence parallelism), b batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import mpu, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.parameter import Parameter

from megatron_patch.convert.rules import GroupedQKV, Rule


def initial(name: str, rank: int, width: int, seed: int) -> Tensor:
    """PEFT's start for `A` (uniform, Kaiming), drawn by its name: the same at every layout.

    Args:
        name: of the Hugging Face module.
        rank: r.
        width: inputs of the module.
        seed: of the run.

    Returns:
        float32 [r, width] on the CPU.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = 1 / math.sqrt(width)  # kaiming_uniform with a = sqrt(5)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


class _Beside(torch.nn.Module):
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *rest: Any
    ) -> None:
        """Weights that were trained without adapters leave them at their start."""
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)


class Adapter(_Beside):
    """The adapters of one linear layer.

    Args:
        layer: the linear layer; its output is (value, bias), its input the first argument.
        rule: which Hugging Face modules it is made of.
        config: the model's `TransformerConfig`.
        rank: r.
        alpha: the output is scaled by alpha / r.
        dropout: of the input.
        seed: of the start.
        only: last names of the modules that get one; None: all that the layer is made of.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        rule: Rule,
        config: Any,
        *,
        rank: int,
        alpha: float,
        dropout: float,
        seed: int,
        only: frozenset[str] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.rank, self.scale, self.dropout = config, rank, alpha / rank, dropout
        self.modules_of_hf = tuple(name.removesuffix(".weight") for name in rule.hf)
        self.parts = tuple(name.rpartition(".")[2] for name in self.modules_of_hf)
        self.tp_group = mpu.get_tensor_model_parallel_group()
        size, me = self.tp_group.size(), self.tp_group.rank()
        rows, width = layer.weight.shape
        whole_rows = sum(shape[0] for shape in rule.shapes)
        whole_width = rule.shapes[0][1]
        self.kind = _split_of(rows, width, whole_rows, whole_width, size, self.modules_of_hf)
        self.groups = rule.operation.groups if isinstance(rule.operation, GroupedQKV) else 0
        self.groups //= size if self.kind == "column" else 1
        self.sequence_parallel = bool(config.sequence_parallel) and size > 1
        self.norm = _norm_of(layer, config)
        make = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.rows: list[int] = []
        for part, name, shape in zip(self.parts, self.modules_of_hf, rule.shapes, strict=True):
            self.rows.append(shape[0] // (size if self.kind == "column" else 1))
            if only is not None and part not in only:
                continue
            start = initial(name, rank, whole_width, seed)
            if self.kind == "row":
                start = start.chunk(size, dim=1)[me]
            a = Parameter(start.to(**make).contiguous())
            b = Parameter(torch.zeros(self.rows[-1], rank, **make))
            # What is whole on every rank sees only the rank's tokens under sequence parallelism.
            for parameter, split, axis in (
                (a, self.kind == "row", 1),
                (b, self.kind == "column", 0),
            ):
                if split:
                    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, axis, 1)
                else:
                    parameter.sequence_parallel = self.sequence_parallel
            self.register_parameter(f"{part}_A", a)
            self.register_parameter(f"{part}_B", b)
        # Not a submodule: its weights belong to the model.
        self._handle = layer.register_forward_hook(self._add)

    def _add(self, _layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        value, bias = output
        return value + self(inputs[0]), bias

    def forward(self, x_sb: Tensor) -> Tensor:
        """The adapters' part of the layer's output.

        Args:
            x_sb: the layer's input [s, b, inputs], before its norm if it has one.
        """
        x = self.norm(x_sb) if self.norm is not None else x_sb
        if self.dropout and self.training:
            split = self.kind == "row" or self.sequence_parallel
            fork = tensor_parallel.get_cuda_rng_tracker().fork if split else contextlib.nullcontext
            with fork():
                x = F.dropout(x, self.dropout)
        there = [part for part in self.parts if hasattr(self, f"{part}_A")]
        z = F.linear(x, torch.cat([self.get_parameter(f"{part}_A") for part in there]))
        if self.kind == "row":
            z = (
                mappings.reduce_scatter_to_sequence_parallel_region(z, group=self.tp_group)
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region(z, group=self.tp_group)
            )
        elif self.kind == "column":
            z = (
                mappings.gather_from_sequence_parallel_region(z, group=self.tp_group)
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region(z, group=self.tp_group)
            )
        inner = dict(zip(there, z.split(self.rank, dim=-1), strict=True))
        outs = [
            F.linear(inner[part], self.get_parameter(f"{part}_B"))
            if part in inner
            else z.new_zeros(*z.shape[:-1], rows)
            for part, rows in zip(self.parts, self.rows, strict=True)
        ]
        if self.groups:
            # Query, key and value rows of a group stand together; see `rules.GroupedQKV`.
            outs = [out.unflatten(-1, (self.groups, -1)) for out in outs]
            return torch.cat(outs, dim=-1).flatten(-2) * self.scale
        return (torch.cat(outs, dim=-1) if len(outs) > 1 else outs[0]) * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Whole tensors of PEFT's shapes under `prefix`."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        axes = {}
        for part in self.parts:
            if self.kind == "row":
                axes[f"{part}_A"] = 1
            elif self.kind == "column":
                axes[f"{part}_B"] = 0
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class ExpertAdapter(_Beside):
    """The adapters of a layer's routed experts, one for each expert and parameter of transformers.

    transformers 5 holds all gates and up projections of a layer in one parameter, and PEFT adapts
    it as such: an expert's gate and up share ``A``. Shapes: E experts of this rank, h the model's
    width, f an expert's on this rank. Where expert tensor parallelism splits the weight, it splits
    ``gate_up_B`` and ``down_A``; what each rank holds whole gets the sum of the ranks' gradients.

    Args:
        experts: upstream's module, grouped or sequential.
        name: its Hugging Face name, for the start.
        rank: r.
        alpha: outputs are scaled by alpha / r.
        seed: of the start.
    """

    def __init__(
        self, experts: torch.nn.Module, name: str, *, rank: int, alpha: float, seed: int
    ) -> None:
        super().__init__()
        self.rank, self.scale = rank, alpha / rank
        self.group = mpu.get_expert_tensor_parallel_group()
        local = getattr(experts, "local_experts", None)
        count = experts.num_local_experts
        fc1 = [e.linear_fc1 for e in local] if local is not None else [experts.linear_fc1]
        fc2 = [e.linear_fc2 for e in local] if local is not None else [experts.linear_fc2]
        weight = fc1[0].weight if local is not None else fc1[0].weight0
        like = {"dtype": weight.dtype, "device": weight.device}
        split, me = self.group.size(), self.group.rank()
        rows, h = weight.shape
        f = rows // 2
        first = mpu.get_expert_model_parallel_rank() * count
        starts = {"gate_up": h, "down": f * split}
        made = {
            part: torch.stack(
                [initial(f"{name}.{first + e}.{part}", rank, width, seed) for e in range(count)]
            )
            for part, width in starts.items()
        }
        made["down"] = made["down"].chunk(split, dim=2)[me]
        self.gate_up_A = Parameter(made["gate_up"].to(**like).contiguous())
        self.gate_up_B = Parameter(torch.zeros(count, 2, f, rank, **like))
        self.down_A = Parameter(made["down"].to(**like).contiguous())
        self.down_B = Parameter(torch.zeros(count, h, rank, **like))
        for own, parameter in self.named_parameters():
            # As the weights beside them: reduced over the ranks that hold the same experts.
            if hasattr(weight, "allreduce"):
                parameter.allreduce = weight.allreduce
            if own in _OVER_ETP or split == 1:
                axis = _OVER_ETP.get(own, 0)
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        for part, layers in (("gate_up", fc1), ("down", fc2)):
            for number, layer in enumerate(layers):
                one = number if local is not None else None
                layer.register_forward_hook(partial(self._add, part, one))

    def _add(
        self, part: str, one: int | None, _layer: Any, inputs: tuple[Any, ...], output: Any
    ) -> Any:
        value, bias = output
        x = inputs[0]
        counts = [x.shape[0]] if one is not None else _counts(inputs[1])
        first = one if one is not None else 0
        pieces = [
            self.delta(part, first + number, piece)
            for number, piece in enumerate(x.split(counts))
            if piece.shape[0] or one is not None
        ]
        if not pieces:
            return output
        delta = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return value + delta.view_as(value), bias

    def delta(self, part: str, expert: int, x: Tensor) -> Tensor:
        """What an expert's adapter adds: [tokens, ..., inputs] to [tokens, ..., outputs]."""
        a, b = self.get_parameter(f"{part}_A")[expert], self.get_parameter(f"{part}_B")[expert]
        if self.group.size() > 1:
            # Each rank sees a part of the gradient of what all hold whole.
            if part == "gate_up":
                a = mappings.copy_to_tensor_model_parallel_region(a, group=self.group)
            else:
                b = mappings.copy_to_tensor_model_parallel_region(b, group=self.group)
        return F.linear(F.linear(x, a), b.reshape(-1, self.rank)) * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Whole tensors [experts, ...] under `prefix`."""
        ahead = len(sharded_offsets)
        replica = mpu.get_expert_data_parallel_rank()
        etp = (self.group.rank(), self.group.size())
        found = {}
        for name, parameter in self.named_parameters():
            offsets = [
                *sharded_offsets,
                (
                    ahead,
                    mpu.get_expert_model_parallel_rank(),
                    mpu.get_expert_model_parallel_world_size(),
                ),
            ]
            if name in _OVER_ETP:
                offsets.append((ahead + _OVER_ETP[name], *etp))
            found[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *offsets,
                replica_id=(0, 0 if name in _OVER_ETP else etp[0], replica),
                prepend_axis_num=ahead,
            )
        return found


#: Parameters that expert tensor parallelism splits, and the axis.
_OVER_ETP = {"gate_up_B": 2, "down_A": 2}


def _counts(tokens_per_expert: Any) -> list[int]:
    if isinstance(tokens_per_expert, torch.Tensor):
        return [int(n) for n in tokens_per_expert.tolist()]
    return list(tokens_per_expert)


def _split_of(
    rows: int, width: int, whole_rows: int, whole_width: int, size: int, names: Sequence[str]
) -> str:
    """How a layer of this shape is split over TP."""
    if (rows, width) == (whole_rows, whole_width):
        return "whole"
    if (rows * size, width) == (whole_rows, whole_width):
        return "column"
    if (rows, width * size) == (whole_rows, whole_width):
        return "row"
    raise ValueError(
        f"{', '.join(names)}: a weight of [{rows}, {width}] on each of {size} ranks is no part of "
        f"[{whole_rows}, {whole_width}]"
    )


def _norm_of(layer: torch.nn.Module, config: Any) -> Any:
    """The norm that a layer applies to its input by itself, as a function; None without."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return None
    # Sources: `TELayerNormColumnParallelLinear` and this package's `NormColumnParallelLinear`.
    eps = getattr(layer, "eps", config.layernorm_epsilon)

    def norm(x: Tensor) -> Tensor:
        scale = weight + 1 if config.layernorm_zero_centered_gamma else weight
        bias = getattr(layer, "layer_norm_bias", None)
        if bias is None:
            return F.rms_norm(x, (x.shape[-1],), scale, eps)
        return F.layer_norm(x, (x.shape[-1],), scale, bias, eps)

    return norm
