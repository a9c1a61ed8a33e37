"""Weight rules: how one Megatron tensor is made of Hugging Face tensors, and back.

A rule is data. It names a logical weight (`layout` knows today's checkpoint key), the HF tensors
with their shapes, and an operation that knows its inverse. Rules see whole tensors; splitting them
over ranks belongs to Megatron's ``sharded_state_dict``.

HF names are those of saved files, never of live modules: transformers 5 fuses MoE parameters in
memory only.

Shape legend: V vocabulary, H hidden, G query groups, Q queries per group, D head size, F MLP size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from megatron_patch.convert import layout
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_patch.models.family import ModelSpec

#: Buffers in older HF files that every reader recomputes.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")

#: Where HF keeps the output layer.
HEAD = "lm_head.weight"


class Operation(Protocol):
    """A change of layout together with its inverse; dtype, device and every bit are kept.

    An operation that only moves rows of its tensors, or adds rows of zeros, says so with a class
    attribute ``rowwise = True``: conversion then copies runs of rows and holds no tensor (`rows`).
    """

    def __hash__(self) -> int:
        """Operations are frozen dataclasses."""

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """HF tensors to the Megatron tensor."""

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The Megatron tensor to HF tensors, in the same order."""


@dataclass(frozen=True, slots=True)
class Rename:
    """The same tensor under another name."""

    rowwise: ClassVar[bool] = True

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """One tensor, unchanged."""
        (part,) = parts
        return part

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """One tensor, unchanged."""
        return (whole,)


@dataclass(frozen=True, slots=True)
class GroupedQKV:
    """Query, key and value rows interleaved by query group: ``[q * Q, k, v]`` for each of G groups.

    Works for weights ``[rows, H]`` and biases ``[rows]``. Source of the layout:
    ``megatron/core/transformer/attention.py: get_query_key_value_tensors``.

    Attributes:
        groups: G.
        queries: Q, query heads per group.
        head_dim: D.
    """

    rowwise: ClassVar[bool] = True
    groups: int
    queries: int
    head_dim: int

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """``[G*Q*D, ...], [G*D, ...], [G*D, ...]`` to ``[G*(Q+2)*D, ...]``."""
        import torch

        by_group = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """``[G*(Q+2)*D, ...]`` to query, key and value."""
        rows = (self.queries * self.head_dim, self.head_dim, self.head_dim)
        by_group = whole.reshape(self.groups, sum(rows), *whole.shape[1:])
        starts = (0, rows[0], rows[0] + rows[1])
        return tuple(
            by_group.narrow(1, start, count).flatten(0, 1)
            for start, count in zip(starts, rows, strict=True)
        )


@dataclass(frozen=True, slots=True)
class GatedQKV:
    """`GroupedQKV` with a gate for every query: ``[q * Q, gate * Q, k, v]`` for each of G groups.

    HF keeps the gate of a head behind its query, in one projection of ``2 * G * Q * D`` rows.
    Source of the layout: ``megatron/core/transformer/attention.py: get_query_key_value_tensors``
    with ``output_gate``.

    Attributes:
        groups: G.
        queries: Q, query heads per group.
        head_dim: D.
    """

    rowwise: ClassVar[bool] = True
    groups: int
    queries: int
    head_dim: int

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """``[G*Q*2*D, ...], [G*D, ...], [G*D, ...]`` to ``[G*(2*Q+2)*D, ...]``."""
        both, key, value = parts
        tail = both.shape[1:]
        pairs = both.reshape(self.groups, self.queries, 2, self.head_dim, *tail)
        apart = pairs.transpose(1, 2).reshape(-1, *tail)
        return GroupedQKV(self.groups, 2 * self.queries, self.head_dim).forward((apart, key, value))

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """``[G*(2*Q+2)*D, ...]`` to queries with gates, keys and values."""
        grouped = GroupedQKV(self.groups, 2 * self.queries, self.head_dim)
        apart, key, value = grouped.inverse(whole)
        tail = apart.shape[1:]
        pairs = apart.reshape(self.groups, 2, self.queries, self.head_dim, *tail)
        return pairs.transpose(1, 2).reshape(-1, *tail), key, value


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The input projection of Gated DeltaNet, by key head in HF files, by kind in Megatron's.

    HF: for each of K key heads ``[query, key, values, gates]``, and in a second tensor
    ``[betas, alphas]``; Megatron: all queries, then all keys, values, gates, betas, alphas.
    Sources: ``fix_query_key_value_ordering`` of transformers' Qwen3-Next and
    ``megatron/core/ssm/gated_delta_net``.

    Attributes:
        heads: K, the number of key heads.
        key: Size of a key head.
        value: Size of the value heads that belong to one key head, together.
        ratio: Their number.
    """

    rowwise: ClassVar[bool] = True
    heads: int
    key: int
    value: int
    ratio: int

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """``[K*(2*key + 2*value), ...], [K*2*ratio, ...]`` to one tensor of all rows."""
        import torch

        wide, narrow = (part.reshape(self.heads, -1, *part.shape[1:]) for part in parts)
        sizes = [self.key, self.key, self.value, self.value]
        pieces = (*torch.split(wide, sizes, dim=1), *torch.split(narrow, self.ratio, dim=1))
        return torch.cat([piece.flatten(0, 1) for piece in pieces])

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """One tensor to the two of HF."""
        import torch

        sizes = (self.key, self.key, self.value, self.value, self.ratio, self.ratio)
        pieces = [
            piece.reshape(self.heads, size, *whole.shape[1:])
            for piece, size in zip(
                torch.split(whole, [self.heads * size for size in sizes]), sizes, strict=True
            )
        ]
        wide, narrow = torch.cat(pieces[:4], dim=1), torch.cat(pieces[4:], dim=1)
        return wide.flatten(0, 1), narrow.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors one after another.

    Attributes:
        rows: Rows of each.
    """

    rowwise: ClassVar[bool] = True
    rows: tuple[int, ...]

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """All rows in one tensor."""
        import torch

        return torch.cat(parts, dim=0)

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """One tensor to its parts."""
        import torch

        return torch.split(whole, list(self.rows))


@dataclass(frozen=True, slots=True)
class GatedUp:
    """Gate rows above up rows: ``[F, ...], [F, ...]`` and ``[2F, ...]``."""

    rowwise: ClassVar[bool] = True

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Gate and up to one tensor."""
        import torch

        return torch.cat(parts, dim=0)

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """One tensor to gate and up."""
        return whole.chunk(2, dim=0)


@dataclass(frozen=True, slots=True)
class Alternating:
    """Gate and up rows in turns, as GPT-OSS has them, to gate rows above up rows."""

    rowwise: ClassVar[bool] = True

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """``[2F, ...]`` with rows gate 0, up 0, gate 1, ... to all gates, then all ups."""
        import torch

        (part,) = parts
        return torch.cat((part[0::2], part[1::2]), dim=0)

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Gates above ups to rows in turns."""
        import torch

        return (torch.stack(whole.chunk(2, dim=0), dim=1).flatten(0, 1),)


@dataclass(frozen=True, slots=True)
class PadVocab:
    """Zero rows after the vocabulary's; they are dropped on the way back.

    Attributes:
        rows: V, the true size.
        padded: The padded size.
    """

    rowwise: ClassVar[bool] = True
    rows: int
    padded: int

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        """``[V, H]`` to ``[padded, H]``."""
        (part,) = parts
        if self.padded == self.rows:
            return part
        whole = part.new_zeros((self.padded, *part.shape[1:]))
        whole[: self.rows] = part
        return whole

    def inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """``[padded, H]`` to ``[V, H]``."""
        return (whole[: self.rows],)


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor and the HF tensors that it is made of.

    Attributes:
        name: Logical name of the weight, see `layout`.
        hf: HF names, in the order that the operation takes them.
        shapes: The HF tensors' shapes.
        operation: What is done.
        keeps_dtype: A conversion to another dtype leaves this one as it is (a router's bias, which
            stays fp32).
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    operation: Operation = Rename()
    keeps_dtype: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """One tensor in files that holds the tensors of several rules, one after another.

    Rules know its parts, by names that no file has to have.

    Attributes:
        name: Name in files.
        shape: Shape in files.
        parts: Names of its parts, in the order of the file.
        inner: Shape of every part, as rules have it.
        transposed: The file keeps the two axes of a part the other way round.
        always: Files never hold the parts apart.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    inner: tuple[int, ...]
    transposed: bool = False
    always: bool = False


def stacks(spec: ModelSpec) -> tuple[Stack, ...]:
    """The tensors in which files of a model may hold, or always hold, several."""
    from megatron_patch.models.registry import get_family

    return get_family(spec.family).stacks(spec)


def file_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors in files, where parts that may stand apart do."""
    joined = {part: stack for stack in stacks(spec) if stack.always for part in stack.parts}
    found: dict[str, tuple[int, ...]] = {}
    for rule in spec_rules(spec):
        for name, shape in zip(rule.hf, rule.shapes, strict=True):
            stack = joined.get(name)
            found[stack.name if stack else name] = stack.shape if stack else shape
    return found


def unstack(hf_tensors: Mapping[str, Tensor], spec: ModelSpec) -> Mapping[str, Tensor]:
    """Tensors of files by the names that rules know; parts are views."""
    known = stacks(spec)
    if not known:
        return hf_tensors
    found = dict(hf_tensors)
    for stack in known:
        tensor = found.pop(stack.name, None)
        if tensor is not None:
            refuse_stack(stack, tuple(tensor.shape), "the checkpoint", found)
            inner = stack.inner[::-1] if stack.transposed else stack.inner
            pieces = tensor.reshape(len(stack.parts), *inner)
            pieces = pieces.transpose(1, 2) if stack.transposed else pieces
            found |= zip(stack.parts, pieces, strict=True)
    return found


def to_megatron(
    hf_tensors: Mapping[str, Tensor], spec: ModelSpec, *, grouped_experts: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Turn the tensors of an HF model into those of a Megatron model, one at a time.

    Names are checked before the first tensor is touched. A file may repeat tensors (`copies`), as
    long as each equals its original.

    Args:
        hf_tensors: Name in the saved files -> whole tensor; may load lazily.
        spec: The resolved model.
        grouped_experts: Names of grouped-GEMM experts instead of sequential ones.

    Yields:
        Name in the Megatron model's state dict (TP1, PP1, EP1) and tensor.

    Raises:
        UserError: A tensor is missing, left over or of another shape than the config says.
    """
    rules = spec_rules(spec)
    hf_tensors = unstack(hf_tensors, spec)
    given = {name for name in hf_tensors if not DERIVED.search(name)}
    expected = {name for rule in rules for name in rule.hf}
    found = {name: original for name, original in copies(spec).items() if name in given}
    _check_copies(hf_tensors, found)
    given -= set(found).union(*(some for _, some in left_out(spec, given)))
    refuse_differences("the Hugging Face checkpoint", given, expected, no_mtp(spec, given))
    for rule in rules:
        parts = tuple(hf_tensors[name] for name in rule.hf)
        for name, part, shape in zip(rule.hf, parts, rule.shapes, strict=True):
            if tuple(part.shape) != shape:
                raise UserError(
                    f"{name} is {list(part.shape)} in the checkpoint, but config.json says "
                    f"{list(shape)}. The files and the config belong to different models."
                )
        key = layout.checkpoint_key(rule.name, grouped_experts=grouped_experts)
        yield key, rule.operation.forward(parts)


def to_hf(
    megatron_tensors: Mapping[str, Tensor],
    spec: ModelSpec,
    *,
    grouped_experts: bool = False,
    repeated: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `to_megatron`: same tensors, same bits, without the padded rows.

    Args:
        megatron_tensors: Name in the state dict -> whole tensor. ``_extra_state`` entries, which
            hold bookkeeping of low-precision kernels, are skipped.
        spec: The resolved model.
        grouped_experts: As in `to_megatron`.
        repeated: Names of `copies` to write too, for sources that had them in their files.

    Yields:
        Name in HF files and tensor. Tensors may be views of the given ones.

    Raises:
        UserError: A tensor is missing, left over or of another shape than the config says.
    """
    rules = spec_rules(spec)
    given = {name for name in megatron_tensors if not name.endswith("_extra_state")}
    keys = {
        layout.checkpoint_key(rule.name, grouped_experts=grouped_experts): rule for rule in rules
    }
    refuse_differences("the Megatron model", given, set(keys))
    written: dict[str, list[str]] = {}
    for again, original in copies(spec).items():
        if again in repeated:
            written.setdefault(original, []).append(again)
    joined = {part: stack for stack in stacks(spec) if stack.always for part in stack.parts}
    held: dict[str, Tensor] = {}
    for key, rule in keys.items():
        whole = megatron_tensors[key]
        expected = megatron_shape(rule)
        if tuple(whole.shape) != expected:
            raise UserError(
                f"{key} is {list(whole.shape)} in the Megatron model, but config.json says "
                f"{list(expected)}. The checkpoint and the config belong to different models."
            )
        for name, part in zip(rule.hf, rule.operation.inverse(whole), strict=True):
            if name in joined:
                held[name] = part
                if all(other in held for other in joined[name].parts):
                    yield joined[name].name, _stacked(joined[name], held)
                continue
            yield name, part
            for again in written.get(name, ()):
                yield again, part.clone()


def _stacked(stack: Stack, held: dict[str, Tensor]) -> Tensor:
    import torch

    parts = [held.pop(name) for name in stack.parts]
    parts = [part.T for part in parts] if stack.transposed else parts
    return torch.stack(parts).reshape(stack.shape)


def refuse_stack(stack: Stack, shape: tuple[int, ...], where: str, names: Collection[str]) -> None:
    """Refuse a tensor of another shape than its parts', and one that is there twice.

    Raises:
        UserError: Both shapes, or the name of the part that is there, too.
    """
    if shape != stack.shape:
        raise UserError(
            f"{stack.name} is {list(shape)} in {where}, but config.json says {list(stack.shape)}. "
            f"The files and the config belong to different models."
        )
    twice = next((part for part in stack.parts if part in names), None)
    if twice is not None:
        raise UserError(
            f"{where} holds {stack.name} and a part of it, {twice}. Remove the one that is stale."
        )


def spec_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The rules of a resolved model; every name of either side stands in exactly one of them.

    Raises:
        ValueError: The family's rules name a tensor twice (a mistake in the family).
    """
    from megatron_patch.models.registry import get_family

    rules = get_family(spec.family).rules(spec)
    for side, names in (
        ("Hugging Face", Counter(name for rule in rules for name in rule.hf)),
        ("Megatron", Counter(layout.checkpoint_key(rule.name) for rule in rules)),
    ):
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(f"{side} names covered by two rules: {_some(twice)}")
    return rules


def megatron_shape(rule: Rule) -> tuple[int, ...]:
    """Shape of the rule's result, found without data."""
    from megatron_patch.convert.rows import forward_runs, moves_rows, rows_of

    if moves_rows(rule.operation):
        # Not by meta tensors, whose first use loads torch's compiler: seconds.
        runs = forward_runs(rule.operation, tuple(rows_of(shape) for shape in rule.shapes))
        return (sum(run.count for run in runs), *rule.shapes[0][1:]) if rule.shapes[0] else ()
    import torch

    parts = tuple(torch.empty(shape, device="meta") for shape in rule.shapes)
    return tuple(rule.operation.forward(parts).shape)


def embedding(spec: ModelSpec) -> str:
    """Where HF keeps the embedding, which a tied model's file repeats as the output layer."""
    return f"{spec.prefix}embed_tokens.weight"


def copies(spec: ModelSpec) -> dict[str, str]:
    """Names under which files may repeat a tensor -> the name that rules know it by.

    The output layer of a tied model, and what a family's layers for multi-token prediction share
    with the model.
    """
    from megatron_patch.models.registry import get_family

    tied = ((HEAD, embedding(spec)),) if spec.tied else ()
    return dict(tied + get_family(spec.family).copies(spec))


#: What a family's layers for multi-token prediction are called where they are left out.
_MTP = "layers for multi-token prediction"


def left_out(spec: ModelSpec, names: Iterable[str]) -> tuple[tuple[str, frozenset[str]], ...]:
    """Names in files that are no part of a model, by what they are.

    Layers for multi-token prediction of a model that is to have none are a choice (a zero in
    config.json), not a mistake; such a layer is known by its projection of two inputs, or by the
    family's pattern.
    """
    from megatron_patch.models.registry import get_family

    family, names = get_family(spec.family), set(names)
    found = [
        (what, frozenset(name for name in names if re.match(pattern, name)))
        for pattern, what in family.left_out
    ]
    if not spec.mtp and family.mtp_names:
        found.append((_MTP, frozenset(n for n in names if re.match(family.mtp_names, n))))
    elif not spec.mtp:
        marks = (re.fullmatch(r"(model\.layers\.(\d+)\.)eh_proj\.weight", name) for name in names)
        layers = tuple(m[1] for m in marks if m and int(m[2]) >= len(spec.layers))
        if layers:
            found.append((_MTP, frozenset(n for n in names if n.startswith(layers))))
    return tuple((what, some) for what, some in found if some)


def no_mtp(spec: ModelSpec, given: Collection[str]) -> str:
    """A remedy where files lack every layer for multi-token prediction; else nothing."""
    own = {n for rule in spec_rules(spec) if rule.name.startswith("mtp.") for n in rule.hf}
    if not own or own & set(given):
        return ""
    from megatron_patch.models.registry import get_family

    return (
        " None of the layers for multi-token prediction is there, as in files that transformers "
        f"saved: set {get_family(spec.family).mtp_key} to 0 in config.json to train without them."
    )


def copy_differs(name: str, original: str) -> str:
    """What to tell a user whose files hold two versions of a tensor that a model has once."""
    if name == HEAD:
        return (
            f"config.json ties the embeddings, but {HEAD} differs from {original} in the files. "
            f"Set tie_word_embeddings to false, or remove the stale {HEAD}."
        )
    return (
        f"{name} differs from {original} in the files, but layers for multi-token prediction "
        f"share it with the model here. Remove {name} to train with the model's own."
    )


def _check_copies(hf_tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> None:
    import torch

    for name, original in found.items():
        if original in hf_tensors and not torch.equal(hf_tensors[name], hf_tensors[original]):
            raise UserError(copy_differs(name, original))


def refuse_differences(what: str, given: set[str], expected: set[str], hint: str = "") -> None:
    """Refuse names that ``what`` lacks or holds beyond what its config says.

    Raises:
        UserError: Counts and names of both.
    """
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing or extra:
        lacks = f"lacks {len(missing)} tensors ({_some(missing)})" if missing else ""
        holds = f"holds {len(extra)} tensors too many ({_some(extra)})" if extra else ""
        raise UserError(
            f"{what} does not match config.json: it {' and '.join(filter(None, (lacks, holds)))}. "
            f"Check that the weights and config.json are of the same model.{hint}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", ... {len(names) - 5} more" if len(names) > 5 else "")
