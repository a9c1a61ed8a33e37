"""Hugging Face files straight into the ranks of a training run, at any parallel layout.

No other file is made. What a rank holds is asked of Megatron-Core (``sharded_state_dict``: which
part of which checkpoint key every parameter is), and the rules say which rows of which HF tensors
that part is made of. One replica reads; the others receive:

- of a data-parallel group the first rank reads, and broadcasts parameter by parameter;
- what tensor-parallel ranks hold alike is read by the first of them, and passed on first;
- the embedding that the last pipeline stage shares comes from the first.

So the ranks together read the model once. Memory is a buffer of a megabyte beside the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import layout
from megatron_patch.convert.meta_model import CONTENT_METADATA
from megatron_patch.convert.plan import Source, check_dtypes
from megatron_patch.convert.rows import BUFFER, Copy, Files, forward_copy, moves_rows, row_bytes
from megatron_patch.convert.rules import PadVocab, Rule, copy_differs
from megatron_patch.convert.stream import Progress
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = layout.checkpoint_key("embedding.weight")

_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class _Part:
    """A part of a Megatron tensor that a rank holds.

    Attributes:
        rule: How the whole is made.
        shape: Shape of the whole.
        start: Where the part begins.
        sizes: The part's sizes.
        data: The rank's own memory of it.
    """

    rule: Rule
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Tensor

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.sizes == self.shape


@dataclass(frozen=True)
class _Held:
    """A parameter or buffer of this rank.

    Attributes:
        key: Its checkpoint key.
        name: Name in a state dict at TP1, PP1 and EP1.
        target: The tensor itself.
        work: Memory to read into: the target's own, or apart where that is quantised.
        parts: What it consists of.
    """

    key: str
    name: str
    target: Any
    work: Tensor
    parts: tuple[_Part, ...]


def load(stages: Sequence[Any], source: Source) -> None:
    """Fill this rank's stages; every rank of the run calls it.

    Args:
        stages: The rank's model chunks, before they are wrapped for data parallelism.
        source: The files, whose names and shapes have been compared with the model.

    Raises:
        UserError: On every rank, if a file could not be read on one of them.
    """
    import torch
    from megatron.core import mpu

    held = _held(stages, source)
    trouble: str | None = None
    shared = _sharing(any(one.key == _EMBEDDING for one in held))
    embedding: Tensor | None = None
    done, progress = 0, Progress(sum(one.work.nbytes for one in held))
    first = torch.distributed.get_rank() == 0
    with Files() as files, torch.no_grad():
        reader = _Reader(source, files)
        for one in held:
            if first:
                progress.show(done)
            done += one.work.nbytes
            if one.key == _EMBEDDING:
                if embedding is not None:  # a stage that is both first and last keeps two
                    one.work.copy_(embedding)
                    continue
                embedding = one.work
            if _EXPERTS in one.key:
                replicas = mpu.get_expert_data_parallel_group()
                tensor = mpu.get_expert_tensor_parallel_group()
            else:
                replicas = mpu.get_data_parallel_group(with_context_parallel=True)
                tensor = mpu.get_tensor_model_parallel_group()
            if replicas.rank() == 0:
                alike = tensor.size() > 1 and all(part.whole for part in one.parts)
                stages_alike = one.key == _EMBEDDING and shared is not None
                reads = (not alike or tensor.rank() == 0) and (
                    not stages_alike or shared.rank() == 0
                )
                if reads and trouble is None:
                    # The others wait for this rank's broadcasts: they go on, and all end together.
                    try:
                        for part in one.parts:
                            reader.fill(part)
                    except (UserError, OSError) as error:
                        trouble = str(error)
                if stages_alike:
                    _broadcast(one.work, shared)
                if alike:
                    _broadcast(one.work, tensor)
            if replicas.size() > 1:
                _broadcast(one.work, replicas)
            if one.work is not one.target:
                _set_quantised(one.target, one.work)
    everyone: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, trouble)
    for words in everyone:
        if words is not None:
            raise UserError(words)
    if first:
        progress.end(done)
        print(f"> weights of {source.folder}: {len(held)} tensors of rank 0", flush=True)


def _held(stages: Sequence[Any], source: Source) -> list[_Held]:
    """What this rank holds, in the order of the files; the embedding comes last.

    Raises:
        UserError: A parameter that no rule makes.
    """
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    by_name = {layout.checkpoint_key(rule.name): rule for rule in source.rules}
    metadata = dict(CONTENT_METADATA) | {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)
    }
    found: list[_Held] = []
    for stage in stages:
        if any(parameter.is_meta for parameter in stage.parameters()):
            raise UserError(
                "--init-model-with-meta-device leaves no place to read Hugging Face weights into: "
                "drop it, or convert them first (megatron-patch convert hf2mcore)"
            )
        state = stage.sharded_state_dict(metadata=metadata)
        # The others are bookkeeping of low-precision kernels.
        entries = [entry for entry in state.values() if not isinstance(entry, ShardedObject)]
        found += [_one(entry, by_name) for entry in entries]
        filled = {id(entry.data) for entry in entries}
        lacking = [name for name, p in stage.named_parameters() if id(p) not in filled]
        if lacking:
            raise UserError(f"no weight rule makes {', '.join(lacking[:3])} of this model")

    def place(one: _Held) -> tuple[bool, Path, int]:
        tensor = source.stored[one.parts[0].rule.hf[0]]
        return one.key == _EMBEDDING, tensor.path, tensor.offset

    return sorted(found, key=place)


def _one(entry: Any, by_name: dict[str, Rule]) -> _Held:
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    target = entry.data
    work = target.data
    if type(work) is not torch.Tensor:  # a quantised parameter
        work = torch.empty(target.shape, dtype=torch.bfloat16, device=target.device)
    if isinstance(entry, ShardedTensorFactory):
        shards = dataclasses.replace(entry, data=work).build()
        shards = list(shards.values()) if isinstance(shards, dict) else shards
    else:
        shards = [dataclasses.replace(entry, data=work)]
    parts = []
    # Under several keys, one after another in the tensor's rows (Gated DeltaNet).
    sections = {s.key: s.global_shape[-s.data.ndim] if s.data.ndim else 1 for s in shards}
    keys, rows = list(sections), list(sections.values())
    for shard in shards:
        name = _name(shard.key if len(keys) == 1 else entry.key, shard.global_offset)
        rule = by_name.get(name)
        if rule is None:
            raise UserError(
                f"the model has {name}, but no weight of {len(by_name)} that config.json stands for"
            )
        axes = shard.data.ndim
        shape, start = list(shard.global_shape[-axes:]), list(shard.global_offset[-axes:])
        if len(keys) > 1:
            shape[0] = sum(rows)
            start[0] += sum(rows[: keys.index(shard.key)])
        parts.append(
            _Part(
                rule,
                tuple(shape),
                tuple(start),
                tuple(shard.data.shape),
                shard.data,
            )
        )
    return _Held(entry.key, name, target, work if work is not target.data else target, tuple(parts))


def _name(key: str, offset: Sequence[int]) -> str:
    """The name that a checkpoint key has in a state dict, its layer and expert written out."""
    numbers = iter(offset)
    if re.match(r"\w+\.layers\.(?!\d)", key):
        key = key.replace(".layers.", f".layers.{next(numbers)}.", 1)
    if ".experts.experts." in key:
        key = key.replace(".experts.experts.", f".experts.local_experts.{next(numbers)}.")
    return key.replace(".transformer_layer.", ".mtp_model_layer.")


class _Reader:
    """Reads parts of Megatron tensors out of HF files."""

    def __init__(self, source: Source, files: Files) -> None:
        self._source, self._files = source, files
        self._buffers = bytearray(BUFFER), bytearray(BUFFER)
        self._rows: tuple[Sequence[str], tuple[Any, ...]] = ((), ())
        self._again: dict[str, list[str]] = {}
        for name, original in source.repeated.items():
            self._again.setdefault(original, []).append(name)

    def fill(self, part: _Part) -> None:
        """Read one part.

        Raises:
            UserError: The files end before, or hold two versions of a repeated tensor.
        """
        import torch

        stored, rule = self._source.stored, part.rule
        check_dtypes(rule, stored, None)
        again = self._again.get(rule.hf[0], []) if len(rule.hf) == 1 else []
        copies = [self._copy(part, rule.hf), *(self._copy(part, (name,)) for name in again)]
        begin = part.start[0] if part.start else 0
        end = begin + (part.sizes[0] if part.sizes else 1)
        others = (part.start[1:], part.sizes[1:], part.shape[1:])
        dtype, at = getattr(torch, copies[0].dtype), 0
        rows = part.data.view(-1, *part.sizes[1:])
        for blocks in self._blocks(copies, begin, end):
            if any(block != blocks[0] for block in blocks[1:]):
                raise UserError(copy_differs(again[0], rule.hf[0]))
            block = torch.frombuffer(blocks[0], dtype=dtype).view(-1, *copies[0].shape[1:])
            if copies[0].shape[1:] != part.sizes[1:]:
                cut = (slice(a, a + n) for a, n, _ in zip(*others, strict=True))
                block = block[(slice(None), *cut)]
            rows[at : at + len(block)].copy_(block)
            at += len(block)
        assert at == end - begin, (rule.name, at, begin, end)

    def _blocks(self, copies: Sequence[Copy], begin: int, end: int) -> Iterator[list[memoryview]]:
        if len(copies) == 1:
            for block in copies[0].blocks(begin, end, self._buffers[0]):
                yield [block]
            return
        step = max(1, BUFFER // max(1, row_bytes(copies[0].shape, copies[0].dtype)))
        for low in range(begin, end, step):
            high = min(low + step, end)
            yield [memoryview(b"".join(c.blocks(low, high, self._buffers[1]))) for c in copies]

    def _copy(self, part: _Part, names: Sequence[str]) -> Copy:
        stored, operation = self._source.stored, part.rule.operation
        if isinstance(operation, PadVocab):
            operation = PadVocab(operation.rows, part.shape[0])
        if names != self._rows[0]:
            # Kept for the next part: some are made whole to be read at all.
            self._rows = names, tuple(stored[name].rows(self._files) for name in names)
        sources = self._rows[1]
        shape = part.shape
        if moves_rows(operation) and part.sizes[1:2] != part.shape[1:2]:
            first, count = part.start[1], part.sizes[1]
            sources = tuple(source.columns(first, first + count) for source in sources)
            shape = (shape[0], count, *shape[2:])
        return forward_copy(operation, sources, shape, sources[0].dtype)


def _sharing(holds: bool) -> Any:
    """The group of the first and last pipeline stage, where each of its ranks holds the embedding.

    Args:
        holds: Whether this rank does.
    """
    import torch
    from megatron.core import mpu

    if mpu.get_pipeline_model_parallel_world_size() == 1 or not mpu.is_rank_in_embedding_group():
        return None
    group = mpu.get_embedding_group()
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, holds, group=group)
    return group if len(everyone) > 1 and all(everyone) else None


def _broadcast(tensor: Tensor, group: Any) -> None:
    """From the first rank of a group to the others."""
    import torch

    source = torch.distributed.get_process_group_ranks(group)[0]
    cuda = "nccl" in str(torch.distributed.get_backend(group))
    apart = (cuda and not tensor.is_cuda) or not tensor.is_contiguous()
    if not apart:
        torch.distributed.broadcast(tensor.data, source, group=group)
        return
    copy = (tensor.cuda() if cuda else tensor).contiguous()
    torch.distributed.broadcast(copy, source, group=group)
    tensor.copy_(copy)


def _set_quantised(target: Any, values: Tensor) -> None:
    """A parameter that is kept in low precision, and what its master copy starts from."""
    target.copy_(values)
    if getattr(target, "_high_precision_init_val", None) is not None:
        target._high_precision_init_val = values.cpu()
