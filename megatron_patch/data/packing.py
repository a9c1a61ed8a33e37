"""Samples into packs, packs onto data-parallel ranks, packs into training items. Only numpy.

A pack holds whole samples up to a capacity. Each sample has a *room*: its length rounded up to the
alignment that context parallelism asks for. Packs are made by best-fit decreasing on rooms: rooms
are taken from the largest, each goes where it leaves the least. Rooms of one size and packs with
one amount of space left are handled together, so the work grows with the number of distinct sizes.

Samples of one size are dealt in an order that depends on (seed, epoch); so are the packs.
Boundaries come from recorded lengths only.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_patch.util import UserError, human_count

IntArray = npt.NDArray[np.int64]

#: Rows of a schedule that are balanced among each other. Larger: more even, less mixed.
_WINDOW = 256


# --------------------------------------------------------------------------------------- alignment

#: Rows that a matrix product of the recipe has to come in multiples of (Transformer Engine's
#: ``get_fp8_align_size``; the blockwise recipe quantizes in blocks of 128).
RECIPE_ROWS: Mapping[str, int] = {
    "delayed": 16,
    "tensorwise": 16,
    "blockwise": 128,
    "mxfp8": 32,
    "nvfp4": 32,
}


@dataclass(frozen=True)
class Alignment:
    """Multiples in tokens.

    Attributes:
        sample: Of each sample's room.
        pack: Of a pack's total.
    """

    sample: int
    pack: int


def alignment(
    *, tp: int = 1, cp: int = 1, sequence_parallel: bool = False, recipe: str | None = None
) -> Alignment:
    """What a layout asks for: the part of each rank counts, and multiples meet at their lcm.

    A sample is cut into 2*CP pieces. What a rank computes on, ``pack / CP`` tokens, or
    ``pack / CP / TP`` with sequence parallelism, must be a multiple of the recipe's rows.

    Raises:
        UserError: The recipe is not known.
    """
    if recipe is not None and recipe not in RECIPE_ROWS:
        raise UserError(f"--fp8 {recipe}: known are {', '.join(RECIPE_ROWS)}.")
    rows = RECIPE_ROWS[recipe] if recipe is not None else 1
    sample = 2 * cp if cp > 1 else 1
    ranks = cp * (tp if sequence_parallel else 1)
    return Alignment(sample, math.lcm(sample, ranks * rows))


# ----------------------------------------------------------------------------------------- packing


@dataclass(frozen=True)
class Packs:
    """Which samples are together.

    Attributes:
        members: Sample numbers, pack after pack, int64.
        starts: Where each pack begins in ``members``, int64; one entry more than packs.
    """

    members: IntArray
    starts: IntArray

    def __len__(self) -> int:
        return int(self.starts.size) - 1

    def __getitem__(self, pack: int) -> IntArray:
        """Samples of a pack; -1 gives none (a filler)."""
        if pack < 0:
            return self.members[:0]
        return self.members[self.starts[pack] : self.starts[pack + 1]]

    def sums(self, values: npt.NDArray[np.int64]) -> IntArray:
        """Sum of a value per sample over each pack."""
        totals = np.concatenate([[0], np.cumsum(values[self.members], dtype=np.int64)])
        return np.diff(totals[self.starts])


def rooms_of(lengths: npt.ArrayLike, multiple: int) -> IntArray:
    """Lengths rounded up to a multiple."""
    wide = np.asarray(lengths, dtype=np.int64)
    return -(-wide // multiple) * multiple


def pack(
    lengths: npt.ArrayLike, capacity: int, *, multiple: int = 1, seed: int = 0, epoch: int = 0
) -> Packs:
    """Pack samples best-fit decreasing.

    Args:
        lengths: Tokens of each sample, all at least 1.
        capacity: Tokens of a pack, a multiple of ``multiple``.
        multiple: Of each sample's room.
        seed: With ``epoch`` decides which of several samples of one size goes where.
        epoch: Of the training.

    Raises:
        UserError: A sample does not fit, or the capacity is no multiple.
    """
    if capacity < 1 or multiple < 1 or capacity % multiple:
        raise UserError(
            f"packs of {capacity} tokens cannot hold rooms that are multiples of {multiple}: "
            f"choose --seq-length as a multiple of {multiple}."
        )
    rooms = rooms_of(lengths, multiple) // multiple
    space = capacity // multiple
    if rooms.size == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    if int(rooms.min()) < 1:
        raise UserError(f"sample {int(rooms.argmin())} has no token; it cannot be packed.")
    if int(rooms.max()) > space:
        worst = int(rooms.argmax())
        raise UserError(
            f"sample {worst} has {int(np.asarray(lengths)[worst])} tokens, a pack holds "
            f"{capacity}: drop or cut long samples (--on-overlong), or raise --seq-length."
        )
    rng = np.random.default_rng([seed, epoch, 0])
    order = rng.permutation(rooms.size)
    order = order[np.argsort(-rooms[order], kind="stable")]
    bins = _best_fit(rooms[order], space)
    count = int(bins.max()) + 1
    shuffled = rng.permutation(count)[bins]
    by_pack = np.argsort(shuffled, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(shuffled, minlength=count))])
    return Packs(order[by_pack], starts.astype(np.int64))


def _best_fit(rooms: IntArray, space: int) -> IntArray:
    """The bin of each room; ``rooms`` descend."""
    bins = np.empty(rooms.size, np.int64)
    sizes, first = np.unique(-rooms, return_index=True)
    ends = np.append(first[1:], rooms.size)
    free: list[int] = []  # amounts of space that some bin has left, ascending
    holders: dict[int, list[IntArray]] = {}  # amount -> the bins that have it
    opened = 0

    def put(left: int, which: IntArray) -> None:
        if left and which.size:
            if left in holders:
                holders[left].append(which)
            else:
                bisect.insort(free, left)
                holders[left] = [which]

    for size, at, end in zip((-sizes).tolist(), first.tolist(), ends.tolist(), strict=True):
        while at < end:
            place = bisect.bisect_left(free, size)
            if place < len(free):
                left = free[place]
                chunks = holders[left]
                which = chunks.pop()
                if not chunks:
                    del free[place], holders[left]
            else:
                # No bin has the space: open as many as the rest of this size needs.
                left = space
                need = -((at - end) // (space // size))
                which = np.arange(opened, opened + need)
                opened += need
            # A bin that takes one stays the tightest as long as it takes another.
            each = left // size
            need = -(-(end - at) // each)
            used, rest = which[:need], which[need:]
            put(left, rest)
            full = min(end - at, used.size * each)
            bins[at : at + full] = np.repeat(used, each)[:full]
            taken = full - (used.size - 1) * each
            at += full
            put(left - each * size, used if taken == each else used[:-1])
            if taken != each:
                put(left - taken * size, used[-1:])
    return bins


# ---------------------------------------------------------------------------------------- schedule


@dataclass(frozen=True)
class Schedule:
    """Which rank takes which pack when.

    Attributes:
        packs: The packs.
        order: Pack of [step, micro-batch, data-parallel rank], int64; -1 is a filler without loss.
        report: Figures of it.
    """

    packs: Packs
    order: IntArray
    report: Report


@dataclass(frozen=True)
class Report:
    """What an epoch looks like.

    Attributes:
        samples: Number of samples.
        packs: Number of packs, fillers left out.
        fillers: Packs without a sample, where there are fewer samples than places.
        steps: Optimizer steps.
        tokens: Real tokens.
        fill: Real tokens over the capacity of all packs.
        best_fill: The same before packs were split to make the last step whole.
        padding: Tokens spent on alignment inside packs.
        balance: Attention cost of the slowest rank over the mean, summed over micro-batches: the
            time spent over the time needed.
        worst: The same of the most uneven step.
    """

    samples: int
    packs: int
    fillers: int
    steps: int
    tokens: int
    fill: float
    best_fill: float
    padding: int
    balance: float
    worst: float

    def lines(self) -> list[str]:
        """For the log."""
        return [
            f"packs      {self.packs} of {human_count(self.samples)} samples, "
            f"{human_count(self.tokens)} tokens; {self.steps} steps an epoch",
            f"fill       {100 * self.fill:.2f} % (best fit alone {100 * self.best_fill:.2f} %), "
            f"{human_count(self.padding)} tokens of alignment, {self.fillers} fillers",
            f"balance    {self.balance:.3f} attention cost of the slowest rank over the mean, "
            f"{self.worst:.3f} in the worst step",
        ]


def schedule(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    multiple: int = 1,
    seed: int = 0,
    epoch: int = 0,
    ranks: int = 1,
    micro_batches: int = 1,
) -> Schedule:
    """Pack an epoch and deal it out; the same on every node, for it depends on arguments only.

    Every sample is in it once. Packs are split where that makes the last step whole, so that no
    rank idles and no sample is left for later; only where there are fewer samples than places are
    there fillers. The packs that ranks work on at the same time are close in cost.

    Args:
        lengths: Tokens of each sample.
        capacity: Tokens of a pack.
        multiple: Of each sample's room.
        seed: Of the order.
        epoch: Of the training.
        ranks: Data-parallel ranks.
        micro_batches: Packs a rank takes in a step.

    Raises:
        UserError: As ``pack``.
    """
    wide = np.asarray(lengths, dtype=np.int64)
    packed = pack(wide, capacity, multiple=multiple, seed=seed, epoch=epoch)
    best = len(packed)
    places = ranks * micro_batches
    steps = -(-best // places)
    packed = _split(packed, wide, min(steps * places, wide.size))
    cost = packed.sums(wide * wide)
    rng = np.random.default_rng([seed, epoch, 1])
    order = _deal(cost, ranks, steps * micro_batches, rng)
    order = order.reshape(steps, micro_batches, ranks)
    return Schedule(packed, order, _report(packed, wide, order, capacity, multiple, best))


def _report(
    packed: Packs, lengths: IntArray, order: IntArray, capacity: int, multiple: int, best: int
) -> Report:
    """Figures of a schedule; ``best`` packs would have been enough."""
    steps, tokens = order.shape[0], int(lengths.sum())
    cost = packed.sums(lengths * lengths)
    padded = np.where(order >= 0, cost[order], 0) if cost.size else np.zeros(order.shape)
    slowest, mean = padded.max(axis=2), padded.mean(axis=2)
    per_step = slowest.sum(axis=1) / np.maximum(1, mean.sum(axis=1)) if steps else np.ones(1)
    return Report(
        samples=int(lengths.size),
        packs=len(packed),
        fillers=int((order < 0).sum()),
        steps=steps,
        tokens=tokens,
        fill=tokens / max(1, order.size * capacity),
        best_fill=tokens / max(1, best * capacity),
        padding=int(rooms_of(lengths, multiple).sum()) - tokens,
        balance=float(slowest.sum() / max(1.0, mean.sum())) if steps else 1.0,
        worst=float(per_step.max()),
    )


def one_each(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    multiple: int = 1,
    seed: int = 0,
    epoch: int = 0,
    ranks: int = 1,
    micro_batches: int = 1,
) -> Schedule:
    """The schedule of an epoch without packing: every sample is a pack of its own, in random order.

    Arguments and errors are those of ``schedule``. The last step is filled up with fillers.
    """
    wide = np.asarray(lengths, dtype=np.int64)
    if wide.size and int(rooms_of(wide, multiple).max()) > capacity:
        pack(wide, capacity, multiple=multiple)  # says which
    places = ranks * micro_batches
    steps = -(-wide.size // places)
    order = np.full(steps * places, -1, np.int64)
    order[: wide.size] = np.random.default_rng([seed, epoch, 0]).permutation(wide.size)
    dealt = order.reshape(steps, micro_batches, ranks)
    packs = Packs(np.arange(wide.size), np.arange(wide.size + 1))
    return Schedule(packs, dealt, _report(packs, wide, dealt, capacity, multiple, wide.size))


def cp_index(starts: npt.ArrayLike, size: int, rank: int) -> IntArray:
    """Positions of a pack that a context-parallel rank holds, in its order.

    A room of L tokens is cut into 2*size chunks; rank r holds chunks r and 2*size-1-r of each.

    Args:
        starts: Where rooms begin, and the end of the last.
        size: Context-parallel ranks.
        rank: Of them.
    """
    edges = np.asarray(starts, dtype=np.int64)
    if size == 1:
        return np.arange(edges[-1])
    rooms = np.diff(edges)
    chunk = np.repeat(rooms // (2 * size), rooms)
    inside = np.arange(edges[-1]) - np.repeat(edges[:-1], rooms)
    number = inside // np.maximum(1, chunk)
    return np.flatnonzero((number == rank) | (number == 2 * size - 1 - rank))


def _split(packed: Packs, lengths: IntArray, wanted: int) -> Packs:
    """Cut packs of several samples in two until there are ``wanted``: the ones of most samples."""
    missing = wanted - len(packed)
    if missing <= 0:
        return packed
    groups = [packed[number] for number in range(len(packed))] if len(packed) < 4096 else None
    if groups is None:
        counts = np.diff(packed.starts)
        picks = set(np.argsort(-counts, kind="stable")[:missing].tolist())
        cuts = [
            int(packed.starts[pick]) + _middle(lengths[packed[pick]])
            for pick in picks
            if counts[pick] > 1
        ]
        starts = np.sort(np.concatenate([packed.starts, np.array(cuts, np.int64)]))
        return Packs(packed.members, starts)
    while missing > 0:
        pick = max(range(len(groups)), key=lambda number: groups[number].size)
        if groups[pick].size < 2:
            break
        at = _middle(lengths[groups[pick]])
        groups.append(groups[pick][at:])
        groups[pick] = groups[pick][:at]
        missing -= 1
    starts = np.concatenate([[0], np.cumsum([group.size for group in groups])])
    return Packs(np.concatenate(groups), starts.astype(np.int64))


def _middle(lengths: IntArray) -> int:
    """Where to cut so that both halves cost about the same; both hold something."""
    cost = np.cumsum(lengths * lengths)
    return min(int(np.searchsorted(cost, cost[-1] / 2)) + 1, lengths.size - 1)


def _deal(cost: IntArray, ranks: int, rows: int, rng: np.random.Generator) -> IntArray:
    """Rows of ``ranks`` packs close in cost, in random order; -1 where packs run out.

    Packs are shuffled, cut into windows, and sorted by cost inside each: neighbours form a row. A
    step is made of rows from all over, so it sees cheap and dear ones alike.
    """
    count = int(cost.size)
    shuffled = rng.permutation(count)
    filled = np.full(rows * ranks, -1, np.int64)
    window = _WINDOW * ranks
    for start in range(0, count, window):
        part = shuffled[start : start + window]
        filled[start : start + part.size] = part[np.argsort(-cost[part], kind="stable")]
    table = filled.reshape(rows, ranks)
    # Within a row the dearest must not always meet the same rank.
    table = rng.permuted(table, axis=1)
    return table[rng.permutation(rows)]


# ------------------------------------------------------------------------------------------- items


def item(
    samples: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
    capacity: int,
    *,
    multiple: int = 1,
    pad_id: int = 0,
) -> dict[str, npt.NDArray[np.generic]]:
    """One pack as the arrays of a training batch of one.

    Args:
        samples: (ids, mask) of each sample: ``mask`` is 1 where the id is a target with loss.
        capacity: Tokens of the item, S.
        multiple: Of each sample's room.
        pad_id: Id at padded positions, any of the vocabulary: it never has loss.

    Returns:
        ``tokens`` int64[S]; ``labels`` int64[S], the next token of the same sample, ``pad_id``
        behind the last; ``loss_mask`` float32[S], by position; ``position_ids`` int64[S], from 0 in
        each room; ``cu_seqlens`` int32[n+1], ends of the real tokens counted without padding;
        ``cu_seqlens_padded`` int32[n+1], where rooms begin, the last being S (the rest of the pack
        belongs to the last room); ``max_seqlen`` int32 scalar, the largest room. Without samples
        (a filler) one room of padding with one token counted, which has no loss.

    Raises:
        ValueError: Samples do not fit, are empty, or differ in ids and mask.
    """
    if capacity % multiple:
        raise ValueError(f"a pack of {capacity} tokens is no multiple of {multiple}")
    tokens = np.full(capacity, pad_id, np.int64)
    labels = np.full(capacity, pad_id, np.int64)
    loss_mask = np.zeros(capacity, np.float32)
    position_ids = np.empty(capacity, np.int64)
    real, padded = [0], [0]
    at = 0
    for number, (given, mask) in enumerate(samples):
        ids, wanted = np.asarray(given), np.asarray(mask)
        size = ids.size
        if size == 0 or ids.shape != wanted.shape:
            raise ValueError(f"sample {number}: {size} ids with {wanted.size} mask entries")
        room = -(-size // multiple) * multiple
        if at + room > capacity:
            raise ValueError(f"sample {number} ends at {at + room}, the pack at {capacity}")
        tokens[at : at + size] = ids
        labels[at : at + size - 1] = ids[1:]
        loss_mask[at : at + size - 1] = wanted[1:]
        position_ids[at : at + room] = np.arange(room)
        at += room
        real.append(real[-1] + size)
        padded.append(at)
    if len(real) == 1:
        real.append(1)
        padded.append(0)
    position_ids[padded[-2] :] = np.arange(capacity - padded[-2])
    padded[-1] = capacity
    cu_padded = np.array(padded, np.int32)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "cu_seqlens": np.array(real, np.int32),
        "cu_seqlens_padded": cu_padded,
        "max_seqlen": np.diff(cu_padded).max().astype(np.int32),
    }


# ------------------------------------------------------------------------------------------ mixing


def mix(
    sizes: Sequence[int], weights: Sequence[float], *, seed: int = 0, epoch: int = 0
) -> tuple[IntArray, IntArray]:
    """Samples of an epoch over several data sets, each repeated ``weight`` times.

    Weight 1 is every sample once. 2.5 is every sample twice and half of them a third time; the
    halves of following epochs complete each other, so over epochs each sample counts alike.

    Args:
        sizes: Samples of each set.
        weights: Of each set, at least 0.
        seed: Of the order.
        epoch: Of the training.

    Returns:
        Set number and sample number, int64 each.

    Raises:
        UserError: Another number of weights than sets, or a negative one.
    """
    if len(sizes) != len(weights):
        raise UserError(f"{len(sizes)} data sets with {len(weights)} weights: give one for each.")
    sets, samples = [], []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        if not weight >= 0 or math.isinf(weight):
            raise UserError(
                f"the weight of data set {number + 1} is {weight}; it may be 0 or more."
            )
        # One endless row of permutations, of which each epoch takes the next part.
        begin, end = round(size * weight * epoch), round(size * weight * (epoch + 1))
        picked = [
            np.random.default_rng([seed, number, turn]).permutation(size)[
                max(0, begin - turn * size) : min(size, end - turn * size)
            ]
            for turn in (range(begin // size, -(-end // size)) if size else ())
        ]
        part = np.concatenate(picked) if picked else np.empty(0, np.int64)
        sets.append(np.full(part.size, number, np.int64))
        samples.append(part)
    if not sets:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(sets), np.concatenate(samples)
