"""The plan of a conversion: every tensor of both sides exactly once, before a weight is read.

Three lists meet: the family's rules, what Megatron-Core would save (`meta_model`), and what the
source holds (safetensors headers or a checkpoint's metadata). Gaps, overlaps and leftovers of any
of them are errors here, so that the streaming that follows cannot end in half a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import dist_io, hf_io, layout, rules
from megatron_patch.convert.dist_io import Checkpoint, RegionRows
from megatron_patch.convert.hf_io import Shard, Stored, Target
from megatron_patch.convert.meta_model import CheckpointLayout, Place, checkpoint_layout
from megatron_patch.convert.rows import (
    FP8_BLOCK,
    NO_RUNS,
    Copy,
    Files,
    JoinedRows,
    Quantised,
    Rows,
    RunTable,
    Transposed,
    forward_copy,
    forward_runs,
    inverse_copy,
    inverse_runs,
    moves_rows,
    rows_of,
    tensor_bytes,
)
from megatron_patch.convert.rules import PadVocab, Rule, Stack
from megatron_patch.util import UserError, atomic_write, human_bytes

if TYPE_CHECKING:
    from megatron_patch.models.family import ModelSpec

#: What `hf2mcore` remembers beside the configuration, for the way back.
RECORD = "conversion.json"

_FLOAT = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Step:
    """One Megatron tensor and the HF tensors that belong to it.

    Attributes:
        rule: How they belong together.
        place: Where the Megatron tensor, or a piece of it, stands in the checkpoint.
        given: dtype in the source.
        dtype: dtype in the result.
        first: The piece's first row in the tensor.
        whole: The tensor's shape, where the place is a piece of it.
    """

    rule: Rule
    place: Place
    given: str
    dtype: str
    first: int = 0
    whole: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the Megatron tensor in the result's dtype."""
        return tensor_bytes(self.place.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Skipped:
    """What a conversion leaves behind: what, how many bytes, why."""

    what: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class ImportPlan:
    """HF -> Megatron.

    Attributes:
        hf_dir: Source.
        spec: The model.
        stored: The source's tensors.
        steps: In the order of the source's files.
        objects: Bookkeeping entries that a checkpoint of this model has.
        skipped: What is not written.
        notes: What a user should know.
        copies: Names under which the source repeats a tensor (`rules.copies`).
        stacks: Names under which the source holds several tensors (`rules.stacks`).
        left_out: What the source holds beside the model.
        runs: Which rows every operation moves where.
    """

    hf_dir: Path
    spec: ModelSpec
    stored: Mapping[str, Stored]
    steps: tuple[Step, ...]
    objects: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    copies: tuple[str, ...]
    stacks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    runs: RunTable = NO_RUNS

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        return sum(step.nbytes for step in self.steps)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Checkpoint key -> shape and dtype."""
        return {step.place.key: (step.place.global_shape, step.dtype) for step in self.steps}

    def copy(self, step: Step, files: Files) -> Copy:
        """The Megatron tensor of a step."""
        sources = tuple(self.stored[name].rows(files) for name in step.rule.hf)
        operation = step.rule.operation
        whole = step.place.shape if step.whole is None else step.whole
        copy = forward_copy(operation, sources, whole, step.dtype, self.runs)
        return copy.part(step.first, step.place.shape)

    def fingerprint(self) -> str:
        """Changes with everything that decides what is written where."""
        return _digest([[s.place.key, s.place.offset, s.place.shape, s.dtype] for s in self.steps])

    def lines(self) -> Iterator[str]:
        """The plan for people, one line a tensor."""
        for step in self.steps:
            yield (
                f"{' + '.join(step.rule.hf)} -> {_where(step.place)} {list(step.place.shape)} "
                f"{_cast(step)} {_name(step.rule)} {human_bytes(step.nbytes)}"
            )


@dataclass(frozen=True, slots=True)
class Export:
    """One HF tensor to write.

    Attributes:
        target: Its place.
        step: The step that it belongs to.
        part: Which of the rule's tensors it is.
        scales: Whether it holds the scales of that tensor's FP8 form.
        transposed: Whether the file keeps its axes the other way round.
        kept: A tensor of the original that is no part of the model; then there is no step.
    """

    target: Target
    step: Step | None
    part: int = 0
    scales: bool = False
    transposed: bool = False
    kept: Stored | None = None


@dataclass(frozen=True)
class ExportPlan:
    """Megatron -> HF.

    Attributes:
        checkpoint: Source.
        hf_dir: Where configuration and tokenizer come from.
        spec: The model.
        steps: One a Megatron tensor.
        shards: The files to write.
        exports: One a HF tensor, in the order of the files.
        skipped: What is not written.
        notes: What a user should know.
        runs: Which rows every operation moves where.
        powers: Whether scales of FP8 weights are powers of two.
    """

    checkpoint: Checkpoint
    hf_dir: Path
    spec: ModelSpec
    steps: tuple[Step, ...]
    shards: tuple[Shard, ...]
    exports: tuple[Export, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    runs: RunTable = NO_RUNS
    powers: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        return sum(tensor_bytes(e.target.shape, e.target.dtype) for e in self.exports)

    def copy(self, export: Export, files: Files) -> Copy | Quantised | Transposed:
        """An HF tensor."""
        if export.kept is not None:
            rows = export.kept.rows(files)
            return forward_copy(rules.Rename(), (rows,), export.kept.shape, export.kept.dtype)
        assert export.step is not None
        place = export.step.place
        region = region_rows(files, self.checkpoint, place)
        operation = export.step.rule.operation
        target, part = export.target, export.part
        if not export.scales and target.dtype != hf_io.FP8:
            shape = target.shape[::-1] if export.transposed else target.shape
            copy = inverse_copy(operation, region, part, shape, target.dtype, self.runs)
            return Transposed(copy) if export.transposed else copy
        shape = export.step.rule.shapes[part]
        numbers = inverse_copy(operation, region, part, shape, region.dtype, self.runs)
        return Quantised(numbers, export.scales, self.powers)

    def fingerprint(self) -> str:
        """Changes with everything that decides what is written where."""
        return _digest([[e.target.name, e.target.file, e.target.offset, e.target.dtype]
                        for e in self.exports])  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The plan for people, one line a tensor."""
        for export in self.exports:
            step, target = export.step, export.target
            size = tensor_bytes(target.shape, target.dtype)
            if step is None:
                yield f"{target.name} as it is {human_bytes(size)} in {target.file}"
                continue
            yield (
                f"{_where(step.place)} -> {target.name} {list(target.shape)} {_cast(step)} "
                f"{_name(step.rule)} {human_bytes(size)} in {target.file}"
            )


@dataclass(frozen=True)
class Source:
    """An HF directory whose tensors are those of a model, all of them.

    Attributes:
        folder: The directory.
        rules: The model's rules.
        stored: Name -> tensor; quantised ones are read as numbers.
        repeated: Names under which the files repeat a tensor -> the name of its original.
        skipped: What is not part of the model.
        stacks: Names of tensors in the files that hold several of the model's.
        left_out: What the files hold beside the model.
    """

    folder: Path
    rules: tuple[Rule, ...]
    stored: Mapping[str, Stored]
    repeated: Mapping[str, str]
    skipped: tuple[Skipped, ...]
    stacks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def read_source(folder: Path, spec: ModelSpec) -> Source:
    """Read the headers of an HF directory and compare them with a model.

    Raises:
        UserError: A file is damaged, or a tensor is missing, left over or of another shape.
    """
    stored = hf_io.with_scales(hf_io.read_model(folder))
    whole = [stack.name for stack in rules.stacks(spec) if stack.name in stored]
    stored = hf_io.unstacked(stored, rules.stacks(spec))
    given = {name for name in stored if not rules.DERIVED.search(name)}
    skipped = [
        Skipped(name, stored[name].nbytes, "recomputed from config.json")
        for name in sorted(set(stored) - given)
    ]
    all_rules = rules.spec_rules(spec)
    repeated = {name: of for name, of in rules.copies(spec).items() if name in given}
    given -= set(repeated)
    skipped += [Skipped(n, stored[n].nbytes, f"the same as {of}") for n, of in repeated.items()]
    left = rules.left_out(spec, given)
    for what, names in left:
        given -= names
        size = sum(stored[name].nbytes for name in names)
        why = "not part of the model that is trained"
        skipped.append(Skipped(f"{what} ({len(names)} tensors)", size, why))
    named = {name for rule in all_rules for name in rule.hf}
    rules.refuse_differences(f"{folder}", given, named, rules.no_mtp(spec, given))
    for rule in all_rules:
        for name, shape in zip(rule.hf, rule.shapes, strict=True):
            _same_shape(f"{stored[name].path}: {name}", stored[name].shape, shape)
    beside = tuple(what for what, _ in _named_left_out(spec, stored))
    return Source(folder, all_rules, stored, repeated, tuple(skipped), tuple(whole), beside)


def check_dtypes(rule: Rule, stored: Mapping[str, Stored], dtype: str | None) -> None:
    """Refuse tensors of several formats that are to be parts of one.

    Args:
        rule: What they are made to.
        stored: The tensors.
        dtype: torch dtype name of the result; None: theirs.

    Raises:
        UserError: Names them.
    """
    kinds = {stored[name].dtype for name in rule.hf}
    if len(kinds) > 1 and not (dtype and kinds <= set(_FLOAT)):
        raise UserError(
            f"{' and '.join(rule.hf)} become one tensor, but are {' and '.join(sorted(kinds))}"
            f". Save the model in one dtype."
        )


def plan_import(
    hf_dir: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    lay_out: Callable[[Path], CheckpointLayout] = checkpoint_layout,
) -> ImportPlan:
    """Plan HF -> Megatron.

    Args:
        hf_dir: Model directory with safetensors files.
        dtype: torch dtype name for floating tensors; None keeps the files'.
        lay_out: Asks Megatron-Core.

    Raises:
        UserError: The directory, its config and Megatron-Core do not agree on every tensor.
    """
    folder = Path(hf_dir)
    spec = resolve(folder)
    source = read_source(folder, spec)
    stored = source.stored
    places = lay_out(folder)
    steps = []
    for rule, place in _joined(source.rules, places):
        check_dtypes(rule, stored, dtype)
        first = 0
        for piece in place.parts:
            step = _step(rule, piece, stored[rule.hf[0]].dtype, dtype)
            steps.append(replace(step, first=first, whole=place.shape))
            first += rows_of(piece.shape)
    _one_dtype_a_key(steps)
    steps.sort(key=lambda step: (stored[step.rule.hf[0]].path, stored[step.rule.hf[0]].offset))
    return ImportPlan(
        folder,
        spec,
        stored,
        tuple(steps),
        places.objects,
        source.skipped,
        _notes(spec),
        tuple(source.repeated),
        source.stacks,
        source.left_out,
        _forward_table(steps),
    )


def plan_export(
    mcore_dir: str | os.PathLike[str],
    hf_dir: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard: int = 5 * 10**9,
    *,
    lay_out: Callable[[Path], CheckpointLayout] = checkpoint_layout,
) -> ExportPlan:
    """Plan Megatron -> HF.

    Args:
        mcore_dir: A step's directory, its parent, or a run directory.
        hf_dir: Configuration and tokenizer; None: those beside the checkpoint.
        dtype: torch dtype name for floating tensors; None keeps the checkpoint's.
        max_shard: Most bytes in a file.
        lay_out: Asks Megatron-Core.

    Raises:
        UserError: Checkpoint, config and Megatron-Core do not agree on every tensor.
    """
    folder = dist_io.find_checkpoint(mcore_dir)
    source = Path(hf_dir) if hf_dir is not None else find_hf(folder)
    spec = resolve(source)
    checkpoint = dist_io.read_checkpoint(folder)
    all_rules = rules.spec_rules(spec)
    steps, notes, used = [], [], set()
    missing = []
    for rule, place in _joined(all_rules, lay_out(source)):
        found = locate(place, checkpoint)
        if found is None:
            missing += [part.key for part in place.parts if locate(part, checkpoint) is None]
            continue
        entry = checkpoint.tensors[found.parts[0].key]
        used |= {part.key for part in found.parts}
        pad = rule.operation
        if isinstance(pad, PadVocab) and pad.rows <= entry.shape[0] != pad.padded:
            # Padded by another rule, for example Megatron's own, which depends on TP.
            rule = replace(rule, operation=PadVocab(spec.true_vocab_size, entry.shape[0]))
            found = replace(found, global_shape=entry.shape, shape=entry.shape)
            notes.append(f"{found.key}: padded to {entry.shape[0]} rows by another tool")
        for part in found.parts:
            shape = checkpoint.tensors[part.key].shape
            _same_shape(f"{folder}: {part.key}", shape, part.global_shape)
        steps.append(_step(rule, found, entry.dtype, None if dtype == FP8_BLOCKS else dtype))
    skipped, extra = others(checkpoint, used)
    if missing or extra:
        rules.refuse_differences(f"{folder}", used | set(extra), used | set(missing))
    joined = _stacks_to_write(source, spec)
    quantised = _quantised(source, steps, joined) if dtype == FP8_BLOCKS else frozenset()
    kept, words = _kept_aside(source, spec)
    notes += words
    wanted = _hf_tensors(steps, spec, source, quantised)
    shards, exports = _lay_out_files(wanted, joined, kept, max_shard)
    with Files() as files:
        for step in steps:
            region_rows(files, checkpoint, step.place)
    return ExportPlan(
        checkpoint,
        source,
        spec,
        tuple(steps),
        shards,
        exports,
        tuple(skipped),
        tuple(notes),
        _inverse_table(steps),
        hf_io.scale_powers(source),
    )


def resolve(folder: Path) -> ModelSpec:
    """The model of a directory with ``config.json``."""
    from megatron_patch.models.registry import get_family, load_config

    hf = load_config(folder)
    return get_family(hf.model_type).resolve(hf)


def _forward_table(steps: Sequence[Step]) -> RunTable:
    found = {}
    for step in steps:
        operation = step.rule.operation
        rows = tuple(rows_of(shape) for shape in step.rule.shapes)
        if moves_rows(operation) and (operation, rows) not in found:
            found[operation, rows] = forward_runs(operation, rows)
    return RunTable(found, {})


def _inverse_table(steps: Sequence[Step]) -> RunTable:
    found = {}
    for step in steps:
        operation, rows = step.rule.operation, rows_of(step.place.shape)
        if moves_rows(operation) and (operation, rows) not in found:
            found[operation, rows] = inverse_runs(operation, rows)
    return RunTable({}, found)


def _notes(spec: ModelSpec) -> tuple[str, ...]:
    padding = spec.padded_vocab_size - spec.true_vocab_size
    if not padding:
        return ()
    return (
        f"vocabulary padded from {spec.true_vocab_size} to {spec.padded_vocab_size} rows with "
        f"zeros, the same at every TP; they never enter softmax and are dropped on the way back",
    )


def find_hf(step: Path) -> Path:
    """The configuration that travels with a checkpoint: ``hf`` beside it, or in its run directory.

    Raises:
        UserError: None is there.
    """
    run = [step.parent.parent] if step.parent.name == "checkpoints" else []
    for folder in (step, step.parent, *run):
        if (folder / "hf" / "config.json").exists():
            return folder / "hf"
    raise UserError(
        f"{step}: no hf/config.json in it or beside it, so the model is unknown. Name the original "
        f"Hugging Face directory with --hf-dir."
    )


def _joined(all_rules: Sequence[Rule], places: CheckpointLayout) -> Iterator[tuple[Rule, Place]]:
    """Every rule with its place; every place is used."""
    left = set(places.tensors)
    for rule in all_rules:
        name = layout.checkpoint_key(rule.name)
        place = places.tensors.get(name)
        if place is None:
            raise UserError(f"Megatron-Core's model has no {name}, which a weight rule makes.")
        left.discard(name)
        _same_shape(f"Megatron-Core's {name}", place.shape, rules.megatron_shape(rule))
        yield rule, place
    if left:
        some = ", ".join(sorted(left)[:5])
        raise UserError(f"no weight rule makes {len(left)} of Megatron-Core's tensors: {some}")


def _same_shape(what: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise UserError(
            f"{what} is {list(found)}, but config.json says {list(expected)}. The weights and the "
            f"config belong to different models."
        )


def region_rows(files: Files, checkpoint: Checkpoint, place: Place) -> Rows:
    """A tensor of a checkpoint, whatever its keys and chunks.

    Raises:
        UserError: The chunks do not cover it exactly once.
    """
    parts = tuple(
        RegionRows(files, checkpoint.tensors[part.key], part.offset, part.shape)
        for part in place.parts
    )
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def _step(rule: Rule, place: Place, given: str, dtype: str | None) -> Step:
    changes = dtype is not None and given in _FLOAT and not rule.keeps_dtype
    return Step(rule, place, given, dtype if changes and dtype is not None else given)


def _one_dtype_a_key(steps: Sequence[Step]) -> None:
    """A key has one dtype for all layers."""
    seen: dict[str, Step] = {}
    for step in steps:
        first = seen.setdefault(step.place.key, step)
        if first.dtype != step.dtype:
            raise UserError(
                f"{first.rule.hf[0]} is {first.dtype} and {step.rule.hf[0]} is {step.dtype}; both "
                f"are stored under {step.place.key}, which has one dtype. Choose it with --dtype."
            )


def locate(place: Place, checkpoint: Checkpoint) -> Place | None:
    """A tensor's place, also where layers are stacked that Megatron-Core would not stack now."""
    if place.pieces:
        found = [locate(piece, checkpoint) for piece in place.pieces]
        here = tuple(piece for piece in found if piece is not None)
        return replace(place, pieces=here) if len(here) == len(found) else None
    if place.key in checkpoint.tensors:
        return place
    pieces = place.key.split(".layers.", 1)
    if len(pieces) < 2:
        return None
    head, tail = pieces
    number, _, rest = tail.partition(".")
    if number.isdecimal():  # one key a layer expected: look for all layers under one
        entry = checkpoint.tensors.get(f"{head}.layers.{rest}")
        if entry is None:
            return None
        return replace(
            place,
            key=entry.key,
            global_shape=(entry.shape[0], *place.global_shape),
            offset=(int(number), *place.offset),
        )
    key = f"{head}.layers.{place.offset[0]}.{tail}"
    if key not in checkpoint.tensors:
        return None
    return replace(place, key=key, global_shape=place.global_shape[1:], offset=place.offset[1:])


def others(checkpoint: Checkpoint, used: set[str]) -> tuple[list[Skipped], list[str]]:
    """What a checkpoint holds besides the weights: counted by kind, or a leftover."""
    from megatron_patch.patches.strict_load import ADAPTER, is_extra_state

    sizes: dict[str, list[int]] = {}
    extra = []
    for key, entry in checkpoint.tensors.items():
        if key in used:
            continue
        kind = _kind(key)
        if kind is None and is_extra_state(key):
            kind = "_extra_state"
        if kind is None and ADAPTER in key:
            kind = "adapter"
        if kind is None:
            extra.append(key)
        else:
            sizes.setdefault(kind, []).append(entry.nbytes)
    for key, record in checkpoint.objects.items():
        name = key.rsplit("/shard_", 1)[0]
        kind = "_extra_state" if is_extra_state(name) else _kind(name) or name
        sizes.setdefault(kind, []).append(record.length)
    why = {
        "optimizer": "optimizer state: not part of a model",
        "_extra_state": "bookkeeping of low-precision kernels",
        dist_io.COMMON: "arguments and counters of the run",
        "adapter": "low-rank adapters: written in PEFT's files, merged by the run that made them",
    }
    return [
        Skipped(f"{kind} ({len(counts)} entries)", sum(counts), why.get(kind, "state of the run"))
        for kind, counts in sorted(sizes.items())
    ], extra


def _kind(key: str) -> str | None:
    """Which part of a training checkpoint a key belongs to; None for weights."""
    first, _, rest = key.partition(".")
    if first.startswith("chained_"):
        first = rest.partition(".")[0]
    known = ("optimizer", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
    return first if first in known else None


#: ``--dtype`` of an export whose linear layers are FP8 with scales.
FP8_BLOCKS = "fp8"

#: What DeepSeek quantises: projections of attention and of MLPs, shared and routed.
_PROJECTIONS = re.compile(r"\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")


def _quantised(source: Path, steps: Sequence[Step], joined: Mapping[str, Stack]) -> frozenset[str]:
    """Names of the tensors that were quantised in the original, or would have been."""
    known = _recorded(source, "fp8")
    if known is None:
        stored = hf_io.read_model(source) if _has_weights(source) else {}
        known = {name for name in stored if name + hf_io.SCALE in stored}
    return frozenset(
        name
        for step in steps
        for name, shape in zip(step.rule.hf, step.rule.shapes, strict=True)
        if len(shape) == 2
        and name not in joined
        and (name in known if known else _PROJECTIONS.search(name))
    )


#: A tensor to write: name, shape and dtype; its step, which of the rule's it is, whether scales.
_Wanted = tuple[str, tuple[int, ...], str, Step, int, bool]


def _hf_tensors(
    steps: Sequence[Step], spec: ModelSpec, source: Path, quantised: Collection[str]
) -> list[_Wanted]:
    tensors: list[_Wanted] = []
    again: dict[str, list[str]] = {}
    found = had_copies(source, spec)
    for name, original in rules.copies(spec).items():
        if name in found:
            again.setdefault(original, []).append(name)
    for step in steps:
        for part, (name, shape) in enumerate(zip(step.rule.hf, step.rule.shapes, strict=True)):
            eight = name in quantised
            dtype = hf_io.FP8 if eight else step.dtype
            tensors.append((name, shape, dtype, step, part, False))
            if eight:
                scales = tuple(-(-size // FP8_BLOCK) for size in shape)
                tensors.append((name + hf_io.SCALE, scales, "float32", step, part, True))
            for other in again.get(name, ()):
                tensors.append((other, shape, step.dtype, step, part, False))
    return tensors


def _stacks_to_write(source: Path, spec: ModelSpec) -> dict[str, Stack]:
    """Name of a part -> the stack in which it is written: as files have it, or the original had."""
    known = rules.stacks(spec)
    if not known:
        return {}
    had = _recorded(source, "stacks")
    if had is None:
        had = set(hf_io.with_scales(hf_io.read_model(source))) if _has_weights(source) else set()
    wanted = [stack for stack in known if stack.always or stack.name in had]
    return {part: stack for stack in wanted for part in stack.parts}


def _kept_aside(source: Path, spec: ModelSpec) -> tuple[list[Stored], list[str]]:
    """Tensors of the original that the model does not have, and what a user should know of them."""
    if not _has_weights(source):
        return [], [
            f"without the original's {what}: name its directory with --hf-dir to copy it along"
            for what in sorted(_recorded(source, "left_out") or ())
        ]
    stored = hf_io.read_model(source)
    found, notes = [], []
    for what, names in _named_left_out(spec, stored):
        found += [stored[name] for name in sorted(names)]
        notes.append(f"{what} ({len(names)} tensors) copied along from {source}, untrained")
    return found, notes


def _named_left_out(
    spec: ModelSpec, names: Collection[str]
) -> tuple[tuple[str, frozenset[str]], ...]:
    """`rules.left_out` where the family has names for it; else config.json is to leave it out."""
    from megatron_patch.models.registry import get_family

    family = get_family(spec.family)
    named = bool(family.left_out or family.mtp_names)
    return rules.left_out(spec, names) if named else ()


def _lay_out_files(
    tensors: Sequence[_Wanted],
    joined: Mapping[str, Stack],
    kept: Sequence[Stored],
    max_shard: int,
) -> tuple[tuple[Shard, ...], tuple[Export, ...]]:
    """Places in files; the parts of a stack follow one another, where the first of them stands."""
    groups: dict[str, list[_Wanted]] = {}
    for tensor in tensors:
        stack = joined.get(tensor[0])
        groups.setdefault(stack.name if stack else tensor[0], []).append(tensor)
    in_files = [
        (name, joined[group[0][0]].shape if group[0][0] in joined else group[0][1], group[0][2])
        for name, group in groups.items()
    ]
    in_files += [(tensor.name, tensor.shape, tensor.dtype) for tensor in kept]
    shards, targets = hf_io.plan_shards(in_files, max_shard)
    exports: list[Export] = []
    for target, group in zip(targets, groups.values(), strict=False):
        stack = joined.get(group[0][0])
        if stack is None:
            ((*_, step, part, scales),) = group
            exports.append(Export(target, step, part, scales))
            continue
        origins = {name: (step, part) for name, *_, step, part, _ in group}
        exports += [
            Export(place, *origins[place.name], transposed=stack.transposed)
            for place in hf_io.parts_of(target, stack)
        ]
    beside = zip(targets[len(groups) :], kept, strict=True)
    exports += [Export(target, None, kept=tensor) for target, tensor in beside]
    return shards, tuple(exports)


def _has_weights(source: Path) -> bool:
    return (source / hf_io.INDEX).exists() or any(source.glob("*.safetensors"))


def _recorded(source: Path, key: str) -> set[str] | None:
    """What `write_record` remembered of a model's original files; None without a record."""
    record = source / RECORD
    if not record.exists():
        return None
    return set(json.loads(record.read_text(encoding="utf-8")).get(key, ()))


def had_copies(source: Path, spec: ModelSpec) -> set[str]:
    """Names under which a model's files repeated tensors, see `rules.copies`."""
    found = _recorded(source, "copies")
    if found is not None:
        return found
    return set(rules.copies(spec)) & set(hf_io.read_model(source) if _has_weights(source) else ())


def write_record(source: Path, target: Path, spec: ModelSpec) -> None:
    """Remember what the files of a model repeat and quantise, for the way back."""
    if (source / RECORD).exists():
        shutil.copyfile(source / RECORD, target / RECORD)
        return
    if not _has_weights(source):
        return
    stored = hf_io.read_model(source)
    joined = hf_io.with_scales(stored)
    record = {
        "copies": sorted(set(rules.copies(spec)) & set(stored)),
        "dtype": hf_io.dtype_of(joined),
        "fp8": [name for name in stored if name + hf_io.SCALE in stored],
        "stacks": [stack.name for stack in rules.stacks(spec) if stack.name in joined],
        "left_out": [what for what, _ in _named_left_out(spec, stored)],
    }
    atomic_write(target / RECORD, json.dumps(record) + "\n")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _where(place: Place) -> str:
    lead = place.offset[: len(place.global_shape) - len(place.shape)]
    return place.key + (f"[{', '.join(map(str, lead))}]" if lead else "")


def _cast(step: Step) -> str:
    return step.dtype if step.dtype == step.given else f"{step.given} -> {step.dtype}"


def _name(rule: Rule) -> str:
    return type(rule.operation).__name__


def split(sizes: Sequence[int], parts: int) -> list[range]:
    """Consecutive items in ``parts`` groups of about the same number of bytes."""
    total, at, groups = sum(sizes), 0, []
    begin, seen = 0, 0
    for number in range(1, parts + 1):
        while at < len(sizes) and (
            number == parts or seen + sizes[at] / 2 <= total * number / parts
        ):
            seen += sizes[at]
            at += 1
        groups.append(range(begin, at))
        begin = at
    return groups
