"""Fine-tuning samples as the rows of a run: which row is trained when, and what it holds.

A row is a pack (or one sample, without packing). Row ``i`` of the endless list of rows belongs to
step ``i // rows a step``; within a step rows go micro-batch after micro-batch, rank after rank, as
Megatron's sampler deals them out. So what a run has consumed is one number, and going on from it is
exact, in the middle of an epoch too. Everything here depends on (data, seed, length, alignment,
rows a step) only and is the same on all nodes; what is expensive is kept beside the samples.

Weights: the loss mask of a row holds weights whose sum over a step is the number of its real tokens
``V``, whatever the loss unit; Megatron then divides by ``V``. So the balancing losses of experts,
which it weighs by tokens, and the extra heads of MTP keep the size their coefficient says.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_patch.data import packing, sft_store
from megatron_patch.data.chat import Sample
from megatron_patch.data.packing import Alignment, IntArray, Schedule
from megatron_patch.data.sft_store import Samples
from megatron_patch.util import UserError, atomic_write, human_count

#: Rows of the evaluation set repeat; no run evaluates more often.
_EVALUATIONS = 1 << 20


@contextlib.contextmanager
def alone(folder: str | os.PathLike[str]) -> Iterator[None]:
    """One process at a time makes what is kept in ``folder``; the others find it made."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, ".making"), "ab") as handle:
        # Where the file system has no locks each makes its own; the results are equal.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# ----------------------------------------------------------------------------------------- samples


@dataclass
class Pool:
    """Samples of several sets that a run may use, cut to its length.

    Attributes:
        sets: The sample sets.
        names: What the user calls them.
        of: Set of each usable sample, int64.
        number: Its number in the set, int64.
        lengths: Its tokens, int64.
        trained: Its tokens with loss, int64.
        counts: What was left out or cut, by name.
    """

    sets: tuple[Samples, ...]
    names: tuple[str, ...]
    of: IntArray
    number: IntArray
    lengths: IntArray
    trained: IntArray
    counts: Mapping[str, int]

    def __len__(self) -> int:
        return int(self.of.size)

    def __getitem__(self, index: int) -> Sample:
        """Usable sample ``index``, cut where it is too long."""
        sample = self.sets[int(self.of[index])][int(self.number[index])]
        length = int(self.lengths[index])
        return Sample(sample.ids[:length], sample.mask[:length])

    def name(self, index: int) -> str:
        """How a message names a sample."""
        return f"{self.names[int(self.of[index])]} sample {int(self.number[index])}"

    def part(self, keep: npt.NDArray[np.bool_]) -> Pool:
        """The same sets with some of the samples."""
        return Pool(
            self.sets,
            self.names,
            self.of[keep],
            self.number[keep],
            self.lengths[keep],
            self.trained[keep],
            self.counts,
        )


def pool(sets: Sequence[tuple[str, Samples]], length: int, *, on_overlong: str = "drop") -> Pool:
    """Samples of ``sets`` that fit into ``length`` tokens.

    Args:
        sets: Name and samples of each.
        length: Longest sample.
        on_overlong: ``drop``, ``truncate`` (keep the beginning) or ``error``.

    Raises:
        UserError: A sample is longer and ``on_overlong`` is ``error``; or nothing is left.
    """
    parts: list[tuple[IntArray, ...]] = []
    counts = {"samples": 0, "overlong": 0, "emptied": 0}
    for number, (name, samples) in enumerate(sets):
        lengths = samples.lengths.astype(np.int64)
        trained = samples.trained()
        counts["samples"] += len(samples)
        over = np.flatnonzero(lengths > length)
        counts["overlong"] += int(over.size)
        keep = trained > 0
        if over.size and on_overlong == "error":
            raise UserError(
                f"{name} sample {int(over[0])} has {int(lengths[over[0]])} tokens, more than "
                f"--seq-length {length} ({over.size} samples do): raise it, or choose "
                "--on-overlong drop or truncate"
            )
        if on_overlong == "truncate":
            for index in over.tolist():
                trained[index] = int(samples[index].mask[:length].sum())
                counts["emptied"] += not trained[index]
            lengths = np.minimum(lengths, length)
            keep = trained > 0
        else:
            keep = keep & (lengths <= length)
        kept = np.flatnonzero(keep)
        parts.append((np.full(kept.size, number, np.int64), kept, lengths[kept], trained[kept]))
    if not sum(part[1].size for part in parts):
        raise UserError(
            f"no sample of at most --seq-length {length} tokens with a token to train is left of "
            f"{counts['samples']}"
        )
    of, number_in_set, kept_lengths, kept_trained = map(np.concatenate, zip(*parts, strict=True))
    return Pool(
        tuple(samples for _, samples in sets),
        tuple(name for name, _ in sets),
        of,
        number_in_set,
        kept_lengths,
        kept_trained,
        counts,
    )


# ------------------------------------------------------------------------------------------- epochs


@dataclass(frozen=True)
class Shape:
    """What decides the rows of an epoch beside the samples; must not change within a run.

    Attributes:
        length: Tokens of a row, S.
        alignment: Multiples of samples and rows.
        ranks: Data-parallel ranks that rows are balanced over.
        micro_batches: Rows of each in a step.
        seed: Of the order.
        packed: Several samples a row.
        unit: ``token`` or ``sample``: what weighs the same in the loss.
        varying: Rows without packing may be shorter than S.
    """

    length: int
    alignment: Alignment
    ranks: int
    micro_batches: int
    seed: int
    packed: bool = True
    unit: str = "token"
    varying: bool = True

    @property
    def rows(self) -> int:
        """Rows of a step over all ranks."""
        return self.ranks * self.micro_batches


@dataclass(frozen=True)
class Epoch:
    """The rows of one epoch.

    Attributes:
        samples: Number in the pool of each sample of the epoch, int64.
        schedule: Packs of positions in ``samples``, and their order.
        real: Real tokens of each step, int64.
        weight: Trained tokens of each step, or its samples: the loss unit, int64.
    """

    samples: IntArray
    schedule: Schedule
    real: IntArray
    weight: IntArray

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return int(self.schedule.order.shape[0])

    def members(self, row: int) -> IntArray:
        """Pool numbers of the samples of a row; none for a filler."""
        return self.samples[self.schedule.packs[int(self.schedule.order.ravel()[row])]]


@dataclass
class Rows:
    """The rows of a run, epoch after epoch.

    Attributes:
        pool: The samples.
        weights: How often an epoch reads each set.
        shape: What decides the rows.
        cache: Folder in which schedules are kept, or None.
    """

    pool: Pool
    weights: tuple[float, ...]
    shape: Shape
    cache: str | None = None
    _epochs: dict[int, Epoch] = field(default_factory=dict, repr=False)
    _starts: list[int] = field(default_factory=lambda: [0], repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without the epochs: a loader's process makes or reads its own."""
        return {**self.__dict__, "_epochs": {}, "_starts": [0]}

    @cached_property
    def digest(self) -> str:
        """Of everything that decides the rows."""
        shape = self.shape
        parts: list[Any] = [
            1,
            shape.length,
            shape.alignment.sample,
            shape.ranks,
            shape.micro_batches,
            shape.seed,
            shape.packed,
            self.weights,
        ]
        made = hashlib.sha256(json.dumps(parts).encode())
        for column in (self.pool.of, self.pool.number, self.pool.lengths, self.pool.trained):
            made.update(np.ascontiguousarray(column).tobytes())
        return made.hexdigest()[:24]

    def epoch(self, number: int) -> Epoch:
        """Epoch ``number``, from 0."""
        if number not in self._epochs:
            if len(self._epochs) > 2:
                self._epochs.pop(min(self._epochs))
            self._epochs[number] = self._make(number)
        return self._epochs[number]

    def _make(self, number: int) -> Epoch:
        sizes = np.bincount(self.pool.of, minlength=len(self.pool.sets))
        seed = self.shape.seed
        which, inside = packing.mix(sizes.tolist(), self.weights, seed=seed, epoch=number)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        samples = starts[which] + inside
        lengths = self.pool.lengths[samples]
        schedule = self._schedule(lengths, number)
        packs = schedule.packs
        unit = self.pool.trained[samples] if self.shape.unit == "token" else np.ones_like(samples)
        order = schedule.order.reshape(schedule.order.shape[0], -1)
        sums = []
        # A filler, -1, has no loss, and one token: statistics of experts over none are no number.
        for values, filler in ((lengths, 1), (unit, 0)):
            of_pack = np.append(packs.sums(values), filler)
            sums.append(of_pack[order].sum(axis=1))
        return Epoch(samples, schedule, sums[0], sums[1])

    def _schedule(self, lengths: IntArray, number: int) -> Schedule:
        if self.cache is None:
            return self._pack(lengths, number)
        path = Path(self.cache, f"packs-{self.digest}-{number}.npz")
        if not path.exists():
            with alone(self.cache):
                if not path.exists():
                    made = self._pack(lengths, number)
                    buffer = io.BytesIO()
                    np.savez(
                        buffer,
                        members=made.packs.members,
                        starts=made.packs.starts,
                        order=made.order,
                        report=np.array(list(made.report.__dict__.values()), np.float64),
                    )
                    atomic_write(path, buffer.getvalue())
        with np.load(path) as kept:
            report = packing.Report(
                *(
                    kind(value)
                    for kind, value in zip(
                        (int, int, int, int, int, float, float, int, float, float),
                        kept["report"].tolist(),
                        strict=True,
                    )
                )
            )
            packs = packing.Packs(kept["members"], kept["starts"])
            return Schedule(packs, kept["order"], report)

    def _pack(self, lengths: IntArray, number: int) -> Schedule:
        shape = self.shape
        deal = packing.schedule if shape.packed else packing.one_each
        return deal(
            lengths,
            shape.length,
            multiple=shape.alignment.sample,
            seed=shape.seed,
            epoch=number,
            ranks=shape.ranks,
            micro_batches=shape.micro_batches,
        )

    # --- length of a run: training/args.py: Epochs

    def _steps_before(self, number: int) -> int:
        """Steps of the epochs before epoch ``number``."""
        while len(self._starts) <= number:
            last = len(self._starts) - 1
            # Whole weights take the same samples each time, and packs of the same sizes.
            same = all(float(w).is_integer() for w in self.weights)
            steps = self.epoch(0 if same else last).steps
            self._starts.append(self._starts[-1] + steps)
        return self._starts[number]

    def steps(self, epochs: float) -> int:
        """Steps of so many epochs; a part of an epoch is rounded up."""
        whole = math.floor(epochs)
        rest = epochs - whole
        before = self._steps_before(whole)
        if rest < 1e-9:
            return before
        return before + math.ceil(rest * (self._steps_before(whole + 1) - before) - 1e-9)

    def epochs(self, steps: int) -> float:
        """Epochs of so many steps."""
        number = 0
        while self._steps_before(number + 1) <= steps:
            number += 1
        start, end = self._steps_before(number), self._steps_before(number + 1)
        return number + (steps - start) / (end - start)

    @property
    def tokens(self) -> int:
        """Real tokens of the first epoch."""
        return int(self.epoch(0).real.sum())

    # --- rows

    def place(self, row: int) -> tuple[Epoch, int, int]:
        """Of a row of the run: its epoch, its number in the epoch, and the epoch's number."""
        step, number = row // self.shape.rows, 0
        while self._steps_before(number + 1) <= step:
            number += 1
        return self.epoch(number), row - self._steps_before(number) * self.shape.rows, number

    def describe(self, step: int) -> dict[str, Any]:
        """Figures of a step (from 0) for its record."""
        epoch, row, number = self.place(step * self.shape.rows)
        inside = row // self.shape.rows
        figures = {"tokens": int(epoch.real[inside])}
        name = "trained_tokens" if self.shape.unit == "token" else "samples"
        return {
            **figures,
            name: int(epoch.weight[inside]),
            "epoch": round(number + (inside + 1) / epoch.steps, 6),
        }

    def row(self, number: int, *, natural: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Row ``number`` of the run as the arrays of a batch.

        Args:
            number: From 0.
            natural: Weights that are not scaled to the tokens of the step, for evaluation.

        Returns:
            What ``packing.item`` returns, the loss mask holding weights, and ``samples`` int64[n]
            (pool numbers), ``scale`` float64 scalar (weight of one unit).
        """
        epoch, inside, _ = self.place(number)
        members = epoch.members(inside)
        step = inside // self.shape.rows
        scale = 1.0 if natural else float(epoch.real[step]) / float(max(1, epoch.weight[step]))
        parts = []
        for member in members.tolist():
            sample = self.pool[member]
            weight = scale
            if self.shape.unit == "sample":
                weight /= float(self.pool.trained[member])
            parts.append((sample.ids, sample.mask.astype(np.float32) * np.float32(weight)))
        item = packing.item(parts, self._size(members), multiple=self.shape.alignment.sample)
        item["samples"] = members
        item["scale"] = np.array(scale, np.float64)
        return item

    def _size(self, members: IntArray) -> int:
        """Tokens of a row: S, or without packing what its sample needs."""
        shape = self.shape
        if shape.packed or not shape.varying:
            return shape.length
        multiple = shape.alignment.pack
        longest = int(self.pool.lengths[members].max()) if members.size else 1
        return min(shape.length, -(-longest // multiple) * multiple)

    def lines(self) -> list[str]:
        """For the log: what an epoch is."""
        counts, shape = self.pool.counts, self.shape
        first = self.epoch(0)
        report = first.schedule.report
        trained = int(self.pool.trained[first.samples].sum())
        over = counts["overlong"]
        lines = [
            f"samples    {counts['samples']}, {over} of them longer than --seq-length "
            f"{shape.length}; {len(self.pool)} are used"
            + (
                f", {report.samples} an epoch by weight" if report.samples != len(self.pool) else ""
            ),
            f"tokens     {report.tokens} an epoch ({human_count(report.tokens)}), {trained} of "
            f"them trained ({100 * trained / max(1, report.tokens):.1f} %)",
        ]
        if shape.packed:
            lines += report.lines()
        else:
            lines.append(f"rows       one sample each; {report.steps} steps an epoch")
        unit = "trained token" if shape.unit == "token" else "sample"
        lines.append(f"loss       every {unit} of a step weighs the same")
        return lines


# ---------------------------------------------------------------------------------------- the sets


def open_sets(
    blend: Sequence[tuple[float | None, str]], make: Any, folder: str
) -> tuple[list[tuple[str, Samples]], tuple[float, ...]]:
    """Sample sets of a data path: prepared ones, and chats that are tokenized once into ``folder``.

    Args:
        blend: Weight (None is 1) and path of each.
        make: Path of chats -> the job that turns them into samples.
        folder: Where those are kept.

    Raises:
        UserError: Nothing there, or records that cannot be used.
    """
    sets, weights = [], []
    for weight, path in blend:
        if os.path.exists(f"{path.removesuffix('.json')}_ids.idx"):
            samples = sft_store.open_samples(path)
        elif not (os.path.exists(path) or glob.has_magic(path)):
            raise UserError(
                f"--data-path {path} is neither chats (.jsonl, .json, .parquet, a folder) nor the "
                f"prefix of a prepared set, seen from {os.getcwd()}"
            )
        else:
            with alone(folder):
                samples = sft_store.cached(make(path), folder)
        sets.append((path, samples))
        weights.append(1.0 if weight is None else float(weight))
    return sets, tuple(weights)


def split(whole: Pool, share: float, seed: int) -> tuple[Pool, Pool]:
    """A pool in two, the second with ``share`` of the samples, drawn at random.

    Raises:
        UserError: One of both would be empty.
    """
    held = round(len(whole) * share)
    if not 0 < held < len(whole):
        raise UserError(
            f"--split holds out {held} of {len(whole)} samples; both parts need at least one"
        )
    out = np.zeros(len(whole), bool)
    out[np.random.default_rng([seed, 2]).permutation(len(whole))[:held]] = True
    return whole.part(~out), whole.part(out)


class TrainRows:
    """The rows of a run, for a data loader."""

    def __init__(self, rows: Rows, total: int) -> None:
        self.rows, self.total = rows, total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Arrays of a row; see `Rows.row`."""
        return self.rows.row(number)


class ValidationRows:
    """The rows of the evaluation set, again and again, for a data loader."""

    def __init__(self, rows: Rows) -> None:
        from megatron.core.datasets.utils import Split

        self.rows = rows
        self.count = rows.epoch(0).steps * rows.shape.rows
        #: Upstream's loader takes the evaluation's batch sizes by it.
        self.split = Split.valid

    def __len__(self) -> int:
        return self.count * _EVALUATIONS

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Arrays of a row; see `Rows.row`."""
        return self.rows.row(number % self.count, natural=True)
