"""Do a Hugging Face directory and a Megatron checkpoint hold the same model? One verdict.

Every tensor is compared in both directions, bit for bit: what the rules make of the HF files with
the checkpoint, and what they make of the checkpoint with the HF files. Where the two sides have
other number formats, the narrower one decides, and the outcome says so. Nothing is held but blocks
of rows; the plan's refusals (names, shapes) become findings here, so that a broken pair ends in
FAIL and a name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import dist_io, hf_io, layout, meta_model, plan, rules
from megatron_patch.convert.dist_io import Checkpoint
from megatron_patch.convert.meta_model import Place
from megatron_patch.convert.rows import (
    BUFFER,
    Copy,
    Files,
    forward_copy,
    inverse_copy,
    row_bytes,
    rows_of,
    tensor_bytes,
)
from megatron_patch.convert.rules import PadVocab, Rule
from megatron_patch.util import UserError, atomic_write, human_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_patch.models.family import ModelSpec

#: Formats from wide to narrow; a comparison is made in the narrower one.
_WIDTH = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference: which tensor, what is wrong, and by how much where that can be said."""

    name: str
    what: str
    largest: float = 0.0
    relative: float = 0.0


@dataclass
class Outcome:
    """What `verify` found.

    Attributes:
        findings: Differences, in the model's order.
        tensors: HF tensors that were compared.
        nbytes: Their bytes.
        notes: What a reader of the verdict should know.
        digest: Over all tensors of the HF side, in the model's order.
    """

    findings: list[Finding] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    def lines(self) -> Iterator[str]:
        """For people."""
        for note in self.notes:
            yield f"note: {note}"
        if self.findings:
            yield f"first difference: {self.findings[0].name}: {self.findings[0].what}"
            for finding in self.findings[1:20]:
                yield f"  also: {finding.name}: {finding.what}"
            if len(self.findings) > 20:
                yield f"  and {len(self.findings) - 20} more"
        largest = max((f.largest for f in self.findings), default=0.0)
        relative = max((f.relative for f in self.findings), default=0.0)
        yield (
            f"{self.tensors} tensors ({human_bytes(self.nbytes)}) compared both ways, "
            f"{len(self.findings)} differ; max absolute difference {largest:g}, "
            f"max relative {relative:g}"
        )
        if self.digest:
            yield f"sha256 of the Hugging Face side: {self.digest}"


def verify(
    hf_dir: str | os.PathLike[str],
    mcore_dir: str | os.PathLike[str],
    *,
    report: str | os.PathLike[str] | None = None,
) -> Outcome:
    """Compare every tensor of both sides.

    Args:
        hf_dir: Model directory with safetensors files.
        mcore_dir: A step's directory, its parent, or a run directory.
        report: File for the digests of every tensor of both sides, as JSON.

    Raises:
        UserError: One of the two cannot be read at all.
    """
    folder = Path(hf_dir)
    step = dist_io.find_checkpoint(mcore_dir)
    spec = plan.resolve(folder)
    stored = hf_io.with_scales(hf_io.read_model(folder))
    stored = hf_io.unstacked(stored, rules.stacks(spec))
    checkpoint = dist_io.read_checkpoint(step)
    places = meta_model.checkpoint_layout(folder)
    outcome = Outcome()
    # A checkpoint that `hf2mcore` made has zeros there; training may leave what it started from.
    strict_padding = (step.parent / "hf" / plan.RECORD).exists() and step.name == "release"
    every = rules.spec_rules(spec)
    _compare_names(spec, every, stored, checkpoint, places, outcome)
    digests: dict[str, Any] = {}
    whole = hashlib.sha256()
    with Files() as files:
        for rule in every:
            place = plan.locate(places.tensors[layout.checkpoint_key(rule.name)], checkpoint)
            if place is None or any(name not in stored for name in rule.hf):
                continue  # a finding already
            pair = _Pair(rule, place, stored, checkpoint, files, strict_padding, outcome)
            pair.compare(digests, whole)
        for name, original in rules.copies(spec).items():
            if name in stored and original in stored:
                _compare_copy(name, original, stored, files, outcome)
    outcome.digest = whole.hexdigest()
    if report is not None:
        content = {"passed": outcome.passed, "model": outcome.digest, "tensors": digests}
        atomic_write(report, json.dumps(content, indent=1) + "\n")
    return outcome


def _compare_names(
    spec: ModelSpec,
    every: Sequence[Rule],
    stored: dict[str, hf_io.Stored],
    checkpoint: Checkpoint,
    places: meta_model.CheckpointLayout,
    outcome: Outcome,
) -> None:
    expected = {name for rule in every for name in rule.hf}
    optional = set(rules.copies(spec)).union(*(some for _, some in rules.left_out(spec, stored)))
    for name in sorted(expected - set(stored)):
        outcome.findings.append(Finding(name, "missing from the Hugging Face files"))
    for name in sorted(set(stored) - expected - optional):
        if not rules.DERIVED.search(name):
            outcome.findings.append(Finding(name, "not part of the model that config.json says"))
    used = set()
    for rule in every:
        place = places.tensors[layout.checkpoint_key(rule.name)]
        found = plan.locate(place, checkpoint)
        if found is None:
            where = f"{place.key} is missing from the Megatron checkpoint"
            outcome.findings.append(Finding(" + ".join(rule.hf), where))
        else:
            used |= {part.key for part in found.parts}
    for key in plan.others(checkpoint, used)[1]:
        outcome.findings.append(Finding(key, "in the Megatron checkpoint, not part of the model"))


class _Pair:
    """One rule: the HF tensors and the Megatron tensor that should say the same."""

    def __init__(
        self,
        rule: Rule,
        place: Place,
        stored: dict[str, hf_io.Stored],
        checkpoint: Checkpoint,
        files: Files,
        strict_padding: bool,
        outcome: Outcome,
    ) -> None:
        self.rule, self.place, self.outcome = rule, place, outcome
        self.checkpoint = checkpoint
        self.entry = checkpoint.tensors[place.parts[0].key]
        self.hf = tuple(stored[name] for name in rule.hf)
        self.files = files
        self.strict_padding = strict_padding

    def compare(self, digests: dict[str, Any], whole: Any) -> None:
        """Both directions; findings go to the outcome."""
        if self._shapes_differ():
            return
        given, held = self.hf[0].dtype, self.entry.dtype
        dtype = max(given, held, key=_width)
        if given != held:
            note = f"compared as {dtype}: the files are {given}, the checkpoint is {held}"
            if note not in self.outcome.notes:
                self.outcome.notes.append(note)
        place = self.place
        region = plan.region_rows(self.files, self.checkpoint, place)
        operation = self.rule.operation
        for part, tensor in enumerate(self.hf):
            back = inverse_copy(operation, region, part, tensor.shape, dtype)
            here = forward_copy(rules.Rename(), (tensor.rows(self.files),), tensor.shape, dtype)
            found = _compare(here, back)
            digests[tensor.name] = {"hf": found.left, "megatron": found.right}
            whole.update(tensor.name.encode() + found.left.encode())
            self.outcome.tensors += 1
            self.outcome.nbytes += tensor.nbytes
            if found.first is not None:
                self._report(tensor.name, found)
        sources = tuple(tensor.rows(self.files) for tensor in self.hf)
        there = forward_copy(operation, sources, place.shape, dtype)
        held_copy = forward_copy(rules.Rename(), (region,), place.shape, dtype)
        padding = isinstance(operation, PadVocab) and not self.strict_padding
        rows = self.hf[0].shape[0] if padding else rows_of(place.shape)
        found = _compare(there, held_copy, rows)
        if found.first is not None and not self._known():
            self._report(" + ".join(self.rule.hf), found)

    def _known(self) -> bool:
        return any(finding.name in self.rule.hf for finding in self.outcome.findings)

    def _shapes_differ(self) -> bool:
        before = len(self.outcome.findings)
        for tensor, shape in zip(self.hf, self.rule.shapes, strict=True):
            if tensor.shape != shape:
                what = f"is {list(tensor.shape)} in {tensor.path.name}, config says {list(shape)}"
                if isinstance(self.rule.operation, PadVocab) and tensor.shape[0] > shape[0]:
                    what += ": rows that pad the vocabulary have leaked into it"
                self.outcome.findings.append(Finding(tensor.name, what))
        pad = self.rule.operation
        if isinstance(pad, PadVocab) and pad.rows <= self.entry.shape[0] != pad.padded:
            shape = self.entry.shape
            operation = PadVocab(pad.rows, shape[0])
            self.rule = Rule(self.rule.name, self.rule.hf, self.rule.shapes, operation)
            self.place = Place(self.place.key, shape, self.place.offset, shape)
        else:
            for part in self.place.parts:
                shape = self.checkpoint.tensors[part.key].shape
                if shape != part.global_shape:
                    what = (
                        f"{part.key} is {list(shape)} in the checkpoint, config says "
                        f"{list(part.global_shape)}"
                    )
                    self.outcome.findings.append(Finding(" + ".join(self.rule.hf), what))
        if len(self.outcome.findings) > before:
            return True
        try:
            plan.region_rows(self.files, self.checkpoint, self.place)
        except UserError as error:
            self.outcome.findings.append(Finding(" + ".join(self.rule.hf), str(error)))
            return True
        return False

    def _report(self, name: str, found: _Comparison) -> None:
        largest, relative = found.largest, found.relative
        what = (
            f"first at row {found.first}, {found.rows} rows differ, "
            f"max absolute difference {largest:g}, max relative {relative:g} ({self.place.key}"
        )
        lead = len(self.place.global_shape) - len(self.place.shape)
        if lead:
            what += f"[{', '.join(map(str, self.place.offset[:lead]))}]"
        self.outcome.findings.append(Finding(name, what + ")", largest, relative))


def _width(dtype: str) -> int:
    return _WIDTH.index(dtype) if dtype in _WIDTH else -1


@dataclass
class _Comparison:
    """Of two tensors: digests, first row that differs, how many, and by how much."""

    left: str = ""
    right: str = ""
    first: int | None = None
    rows: int = 0
    largest: float = 0.0
    relative: float = 0.0


def _compare(left: Copy, right: Copy, rows: int | None = None) -> _Comparison:
    """Compare two tensors of one shape and dtype row by row, bit for bit."""
    count = rows_of(left.shape) if rows is None else rows
    size = row_bytes(left.shape, left.dtype)
    each = max(1, BUFFER // max(1, size))
    found = _Comparison()
    digests = hashlib.sha256(), hashlib.sha256()
    buffers = bytearray(BUFFER), bytearray(BUFFER)
    for low in range(0, count, each):
        high = min(low + each, count)
        both = []
        for copy, digest, buffer in zip((left, right), digests, buffers, strict=True):
            data = b"".join(copy.blocks(low, high, buffer))
            digest.update(data)
            both.append(data)
        if both[0] != both[1]:
            _differences(both[0], both[1], left, low, found)
    found.left, found.right = (digest.hexdigest()[:32] for digest in digests)
    return found


def _differences(a: bytes, b: bytes, copy: Copy, low: int, found: _Comparison) -> None:
    import torch

    dtype = getattr(torch, copy.dtype)
    left, right = (torch.frombuffer(bytearray(x), dtype=dtype).reshape(-1) for x in (a, b))
    size = row_bytes(copy.shape, copy.dtype)
    for row in range(len(a) // size):
        if a[row * size : (row + 1) * size] != b[row * size : (row + 1) * size]:
            found.rows += 1
            if found.first is None:
                found.first = low + row
    gap = (left.double() - right.double()).abs()
    scale = torch.maximum(left.double().abs(), right.double().abs())
    found.largest = max(found.largest, float(gap.max()))
    relative = torch.where(gap > 0, gap / scale, torch.zeros_like(gap))
    found.relative = max(found.relative, float(relative.max()))


def _compare_copy(
    name: str, original: str, stored: dict[str, hf_io.Stored], files: Files, outcome: Outcome
) -> None:
    pair = stored[name], stored[original]
    if (pair[0].shape, pair[0].dtype) == (pair[1].shape, pair[1].dtype):
        one, other = (
            forward_copy(rules.Rename(), (tensor.rows(files),), tensor.shape, tensor.dtype)
            for tensor in pair
        )
        if _compare(one, other).first is None:
            return
    what = f"differs from {original}, which the model has in its place"
    outcome.findings.append(Finding(name, what))


# --- logits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logits:
    """Two models' logits on the same tokens.

    Attributes:
        largest: Largest absolute difference.
        relative: The same, divided by the spread (standard deviation) of transformers' logits.
        agreement: Share of positions at which both put the same token first.
        tokens: Positions compared.
    """

    largest: float
    relative: float
    agreement: float
    tokens: int

    #: fp32 on both sides, in another order of summation.
    limit: float = 1e-4

    @property
    def passed(self) -> bool:
        """Whether they agree."""
        return self.relative <= self.limit and self.agreement == 1.0

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"logits: {self.tokens} positions, max absolute difference {self.largest:g}, relative "
            f"to their spread {self.relative:.1e} (limit {self.limit:g}), same first choice at "
            f"{100 * self.agreement:.4g} %"
        ]


def compare_logits(hf_dir: Path, mcore_dir: str | os.PathLike[str]) -> Logits:
    """Run both models on the CPU in fp32 on seeded random tokens.

    Needs memory for both models at once, and takes the process over (Megatron's global state).

    Args:
        hf_dir: Model directory, loaded with transformers.
        mcore_dir: The checkpoint.
    """
    import torch

    from megatron_patch.convert import one_rank

    spec = plan.resolve(hf_dir)
    length = min(160, spec.args["max_position_embeddings"])
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(spec.true_vocab_size, (2, length), generator=generator)
    reference = _transformers_logits(hf_dir, spec.family, tokens)
    # Megatron announces itself and its process groups; the verdict stays readable.
    with contextlib.redirect_stdout(io.StringIO()), one_rank.one_rank():
        model = one_rank.build(spec)
        fill(model, plan.plan_export(mcore_dir, hf_dir))
        found = one_rank.logits(model, tokens)[..., : spec.true_vocab_size]
    gap = (found - reference).abs()
    spread = float(reference.std())
    return Logits(
        largest=float(gap.max()),
        relative=float(gap.max()) / spread if spread else float(gap.max()),
        agreement=float((found.argmax(-1) == reference.argmax(-1)).double().mean()),
        tokens=tokens.numel(),
    )


def _transformers_logits(hf_dir: Path, family: str, tokens: Tensor) -> Tensor:
    """Logits of transformers' own class of a family; code that the model brings is never run."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_patch._compat import import_model_code

    content = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    given = {k: v for k, v in content.items() if k not in ("model_type", "auto_map")}
    kind = content["model_type"]
    # A model type that has no class of its own there is another's.
    kind = kind if kind.startswith(family) else family
    import_model_code(family)
    model: Any = AutoModelForCausalLM.from_pretrained(
        hf_dir,
        config=AutoConfig.for_model(kind, **given),
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
    )
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(tokens).logits.float()
    return logits


def fill(model: Any, exported: plan.ExportPlan) -> None:
    """Fill a model from the checkpoint itself, not from the HF files.

    Args:
        model: a `GPTModel` of one rank.
        exported: the checkpoint's plan.
    """
    import torch

    state = model.state_dict()
    with Files() as files, torch.no_grad():
        for step in exported.steps:
            place = step.place
            region = plan.region_rows(files, exported.checkpoint, place)
            data = bytearray(tensor_bytes(place.shape, region.dtype))
            region.read(0, rows_of(place.shape), memoryview(data))
            tensor = torch.frombuffer(data, dtype=getattr(torch, region.dtype)).view(place.shape)
            target = state[layout.checkpoint_key(step.rule.name)]
            target[: place.shape[0]] = tensor[: target.shape[0]]
