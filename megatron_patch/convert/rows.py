"""Moving rows of tensors from file to file, without holding a tensor.

A rule (`rules`) says how whole tensors become other whole tensors. All but a few only move rows:
they join, split or interleave them, or add rows of zeros. For those the operation is run once on
row numbers instead of rows, which gives the runs of rows to copy; `copy` then moves bytes through
one buffer of fixed size, whatever the tensor's. Other operations get whole tensors.

A row is everything under one index of the first axis; a scalar counts as one row.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megatron_patch.util import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_patch.convert.rules import Operation

#: Bytes a buffer holds: it stays in a core's cache (4 MiB measured several times slower), and takes
#: few system calls.
BUFFER = 1 << 20

#: Bytes that the kernel is asked to move at once: a call cannot be interrupted.
_MOVED = 8 << 20

#: Bytes up to which going through a buffer costs less than asking the kernel.
_SMALL = 64 << 10

#: What the kernel answers where it cannot move bytes between two files: other file systems, old
#: kernels, special files.
_NOT_MOVED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)

#: torch dtype name -> bytes an element.
ITEM_SIZE = MappingProxyType(
    {
        "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
        "float8_e4m3fn": 1, "float8_e5m2": 1,
        "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    }
)  # fmt: skip

#: Rows and columns that share a scale in files with FP8 weights (DeepSeek-V3, arXiv 2412.19437,
#: section 3.3.2).
FP8_BLOCK = 128

#: What ``--dtype`` takes.
DTYPE_NAMES = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows.

    Attributes:
        part: Which source they come from; None: rows of zeros.
        start: First row in the source.
        count: How many.
    """

    part: int | None
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of a file.

    Attributes:
        path: The file; None: zeros.
        offset: First byte.
        length: How many.
    """

    path: Path | None
    offset: int
    length: int


class Rows(Protocol):
    """A tensor somewhere in files, readable by rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    @property
    def dtype(self) -> str:
        """Its torch dtype name."""

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """Put rows ``start`` to ``stop`` into a buffer of exactly their size, in row-major order.

        Raises:
            UserError: The file ends before.
        """

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """Where rows ``start`` to ``stop`` stand, in order; None where they have to be computed."""


class Files:
    """Open files for reading, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._kernel_moves = hasattr(os, "copy_file_range")

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` on.

        Raises:
            UserError: The file is missing or ends before.
        """
        fd = self._descriptor(path)
        done = 0
        while done < len(into):
            got = os.preadv(fd, [into[done:]], offset + done)
            if not got:
                raise UserError(
                    f"{path} ends at byte {offset + done}, in the middle of a tensor. The file is "
                    f"cut off: copy or download it again."
                )
            done += got

    def _descriptor(self, path: Path) -> int:
        fd = self._open.get(path)
        if fd is None:
            try:
                fd = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}") from None
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._open[path] = fd
        return fd

    def copy(self, extent: Extent, fd: int, at: int, buffer: bytearray) -> int:
        """Put an extent at byte ``at`` of another file; returns its length.

        The kernel moves the bytes where it can, which is once instead of twice through memory.

        Raises:
            UserError: The file is missing or ends before.
        """
        done = 0
        while done < extent.length:
            left = extent.length - done
            moved = 0
            if extent.path is not None and self._kernel_moves:
                moved = self._move(extent.path, extent.offset + done, left, fd, at + done)
            if not moved:
                with memoryview(buffer)[: min(left, len(buffer))] as block:
                    if extent.path is None:
                        block[:] = bytes(len(block))
                    else:  # also says what is wrong where the file ends
                        self.read(extent.path, extent.offset + done, block)
                    moved = write_all(fd, block, at + done)
            done += moved
        return done

    def _move(self, path: Path, offset: int, length: int, fd: int, at: int) -> int:
        """Bytes that the kernel moved; 0 where it does not."""
        source = self._descriptor(path)
        try:
            return os.copy_file_range(source, fd, min(length, _MOVED), offset, at)
        except OSError as error:
            if error.errno not in _NOT_MOVED:
                raise
            self._kernel_moves = False
            return 0

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_all(fd: int, block: bytes | memoryview, at: int) -> int:
    """Write a whole block at a place of a file; returns its length."""
    done, view = 0, memoryview(block)
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
    return done


@dataclass(frozen=True, slots=True)
class FileRows:
    """A tensor that stands in one file in row-major order.

    Attributes:
        files: Open files.
        path: The file.
        offset: Its first byte.
        shape: Shape of the tensor.
        dtype: torch dtype name.
    """

    files: Files
    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """See `Rows`."""
        self.files.read(self.path, self.offset + start * row_bytes(self.shape, self.dtype), into)

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """See `Rows`."""
        size = row_bytes(self.shape, self.dtype)
        return (Extent(self.path, self.offset + start * size, (stop - start) * size),)

    def columns(self, start: int, stop: int) -> ColumnRows:
        """Columns ``start`` to ``stop`` (of the second axis) as a tensor of their own."""
        return ColumnRows(self, start, stop)


@dataclass(frozen=True, slots=True)
class ColumnRows:
    """Some columns of a tensor in one file; no byte of the others is read.

    Attributes:
        of: The tensor.
        first: First column, of the second axis.
        stop: Column after the last one.
    """

    of: FileRows
    first: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Rows`."""
        return (self.of.shape[0], self.stop - self.first, *self.of.shape[2:])

    @property
    def dtype(self) -> str:
        """See `Rows`."""
        return self.of.dtype

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """See `Rows`."""
        whole, size = row_bytes(self.of.shape, self.dtype), row_bytes(self.shape, self.dtype)
        skipped = self.first * (whole // self.of.shape[1])
        at = self.of.offset + start * whole + skipped
        for row in range(stop - start):
            self.of.files.read(self.of.path, at, into[row * size : (row + 1) * size])
            at += whole

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """See `Rows`; too small to be worth a call each."""
        return None


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """FP8 weights times their scales, as bfloat16.

    Attributes:
        weight: ``[rows, columns]`` in FP8.
        scale: ``[ceil(rows / 128), ceil(columns / 128)]``, one number a block.
        first: Which of the scale's columns of weights the first one of ``weight`` is.
    """

    weight: FileRows | ColumnRows
    scale: FileRows
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Rows`."""
        return self.weight.shape

    @property
    def dtype(self) -> str:
        """See `Rows`."""
        return "bfloat16"

    def columns(self, start: int, stop: int) -> ScaledRows:
        """As `FileRows.columns`."""
        assert isinstance(self.weight, FileRows)
        return ScaledRows(self.weight.columns(start, stop), self.scale, start)

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """See `Rows`."""
        import torch

        width = self.shape[1]
        data = bytearray((stop - start) * width)
        self.weight.read(start, stop, memoryview(data))
        weight = _numbers(data).view(-1, width)
        low, high = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
        numbers = bytearray((high - low) * row_bytes(self.scale.shape, self.scale.dtype))
        self.scale.read(low, high, memoryview(numbers))
        scale = torch.frombuffer(numbers, dtype=getattr(torch, self.scale.dtype))
        scale = scale.view(high - low, -1).float().repeat_interleave(FP8_BLOCK, dim=1)
        scale = scale[:, self.first : self.first + width]
        result = torch.frombuffer(into, dtype=torch.bfloat16).view(-1, width)
        for block in range(low, high):
            begin = max(start, block * FP8_BLOCK) - start
            end = min(stop, (block + 1) * FP8_BLOCK) - start
            result[begin:end] = weight[begin:end] * scale[block - low]

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """See `Rows`; they are products."""
        return None


class HeldRows:
    """A tensor that has to be made whole before its first row is known; kept as long as this."""

    def __init__(self, shape: tuple[int, ...], dtype: str, make: Callable[[], Tensor]) -> None:
        self._shape, self._dtype, self._make = shape, dtype, make
        self._data: memoryview | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Rows`."""
        return self._shape

    @property
    def dtype(self) -> str:
        """See `Rows`."""
        return self._dtype

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """See `Rows`."""
        if self._data is None:
            self._data = bytes_of(self._make(), None)
        size = row_bytes(self.shape, self.dtype)
        into[:] = self._data[start * size : stop * size]

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """See `Rows`; they are in memory."""
        return None


def transposed_rows(of: FileRows) -> HeldRows:
    """A matrix in a file, with its axes swapped."""
    return HeldRows(of.shape[::-1], of.dtype, lambda: whole(of).T)


#: Numbers that share a scale in MXFP4 (OCP Microscaling Formats 1.0, section 5.2), and the sixteen
#: numbers of its format (E2M1), of which a byte holds two, the first in its low bits.
MXFP4_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked_rows(blocks: FileRows, scales: FileRows) -> HeldRows:
    """Weights in MXFP4 as bfloat16, which holds each of their products with a scale exactly.

    Args:
        blocks: ``[rows, blocks, 16]`` bytes.
        scales: ``[rows, blocks]`` bytes: exponents of 2, plus 127.
    """
    rows, count, _ = blocks.shape

    def make() -> Tensor:
        import torch

        pairs = _mxfp4_pairs()[whole(blocks).int()].view(rows, count, MXFP4_BLOCK)
        powers = torch.tensor([2.0 ** (byte - 127) for byte in range(256)])[whole(scales).int()]
        return (pairs * powers[..., None]).bfloat16().view(rows, -1)

    return HeldRows((rows, count * MXFP4_BLOCK), "bfloat16", make)


@lru_cache(maxsize=1)
def _mxfp4_pairs() -> Tensor:
    """``[256, 2]``: the two numbers of every byte."""
    import torch

    signed = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    byte = torch.arange(256)
    return torch.stack((signed[byte & 15], signed[byte >> 4]), dim=1)


@lru_cache(maxsize=1)
def _fp8_table() -> Any:
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _numbers(data: bytearray) -> Tensor:
    """FP8 numbers in float32; a table is four times as fast as torch's own cast on a CPU."""
    import numpy as np
    import torch

    return torch.from_numpy(np.take(_fp8_table(), np.frombuffer(data, np.uint8)))


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Tensors of one row shape and dtype, one after another.

    Attributes:
        parts: The tensors.
    """

    parts: tuple[Rows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Rows`."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> str:
        """See `Rows`."""
        return self.parts[0].dtype

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """See `Rows`."""
        size, at = row_bytes(self.shape, self.dtype), 0
        for part in self.parts:
            low, high = max(start, at), min(stop, at + part.shape[0])
            if low < high:
                block = into[(low - start) * size : (high - start) * size]
                part.read(low - at, high - at, block)
            at += part.shape[0]

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """See `Rows`."""
        found: list[Extent] = []
        at = 0
        for part in self.parts:
            low, high = max(start, at), min(stop, at + part.shape[0])
            if low < high:
                more = part.extents(low - at, high - at)
                if more is None:
                    return None
                found += more
            at += part.shape[0]
        return found


def rows_of(shape: Sequence[int]) -> int:
    """Number of rows."""
    return shape[0] if shape else 1


def row_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of one row."""
    return prod(shape[1:]) * ITEM_SIZE[dtype]


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of the tensor."""
    return prod(shape) * ITEM_SIZE[dtype]


def moves_rows(operation: Operation) -> bool:
    """Whether the operation only moves rows, so that row numbers tell all."""
    return bool(getattr(operation, "rowwise", False))


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    """Runs that are known already, by `run_key`; finding them takes torch."""
    return {}


def run_key(operation: Operation, rows: int | tuple[int, ...]) -> str:
    """Name of an operation's runs: forward with the rows of each HF tensor, inverse with theirs."""
    return f"{operation!r} {rows}"


def know_runs(found: Mapping[str, Any]) -> None:
    """Take over what `known_runs` of another process told."""
    _known().update(found)


def known_runs(operations: Iterable[tuple[Operation, tuple[int, ...]]]) -> dict[str, Any]:
    """Runs of operations both ways, JSON-able, for `know_runs`.

    Args:
        operations: Each with the rows of its HF tensors.
    """
    found: dict[str, Any] = {}
    for operation, rows in operations:
        if moves_rows(operation) and run_key(operation, rows) not in found:
            runs = forward_runs(operation, rows)
            whole = sum(run.count for run in runs)
            found[run_key(operation, rows)] = [_plain(run) for run in runs]
            back = inverse_runs(operation, whole)
            found[run_key(operation, whole)] = [[_plain(run) for run in part] for part in back]
    return found


def _plain(run: Run) -> tuple[int | None, int, int]:
    return run.part, run.start, run.count


@lru_cache(maxsize=4096)
def forward_runs(operation: Operation, rows: tuple[int, ...]) -> tuple[Run, ...]:
    """The Megatron tensor's rows, in order, as runs of the HF tensors' rows.

    Args:
        operation: One for which `moves_rows` holds.
        rows: Number of rows of each HF tensor.
    """
    known = _known().get(run_key(operation, rows))
    if known is not None:
        return tuple(Run(*fields) for fields in known)
    import torch

    # 0 stays for rows that the operation adds.
    first = 1
    numbers = []
    for count in rows:
        numbers.append(torch.arange(first, first + count))
        first += count
    return _runs(operation.forward(tuple(numbers)).tolist(), rows)


@lru_cache(maxsize=4096)
def inverse_runs(operation: Operation, rows: int) -> tuple[tuple[Run, ...], ...]:
    """For each HF tensor its rows, in order, as runs of the Megatron tensor's rows."""
    known = _known().get(run_key(operation, rows))
    if known is not None:
        return tuple(tuple(Run(*fields) for fields in part) for part in known)
    import torch

    parts = operation.inverse(torch.arange(1, rows + 1))
    return tuple(_runs(part.tolist(), (rows,)) for part in parts)


def _runs(numbers: list[int], rows: tuple[int, ...]) -> tuple[Run, ...]:
    ends, total = [], 0
    for count in rows:
        total += count
        ends.append(total)
    found: list[Run] = []
    begin = 0
    while begin < len(numbers):
        end = begin + 1
        first = numbers[begin]
        if first == 0:
            while end < len(numbers) and numbers[end] == 0:
                end += 1
            found.append(Run(None, 0, end - begin))
        else:
            part = next(k for k, last in enumerate(ends) if first <= last)
            while end < len(numbers) and numbers[end] == first + end - begin <= ends[part]:
                end += 1
            before = ends[part] - rows[part]
            found.append(Run(part, first - before - 1, end - begin))
        begin = end
    return tuple(found)


def part_of(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """The runs of rows ``start`` to ``stop`` of what ``runs`` describe."""
    at = 0
    for run in runs:
        low, high = max(start, at), min(stop, at + run.count)
        if low < high:
            begin = run.start + low - at if run.part is not None else 0
            yield Run(run.part, begin, high - low)
        at += run.count


def blocks(
    runs: Sequence[Run],
    sources: Sequence[Rows],
    shape: Sequence[int],
    dtype: str | None,
    buffer: bytearray,
) -> Iterator[memoryview]:
    """The rows that ``runs`` describe, in order, in blocks that fit the buffer.

    Args:
        runs: Rows of ``sources``.
        sources: All of one dtype and one row shape.
        shape: Shape of the result; only its row shape counts.
        dtype: torch dtype name to round to; None keeps the sources'.
        buffer: Reused for every block; grown where a row is larger.

    Yields:
        Bytes that are valid until the next one is asked for.
    """
    given = sources[0].dtype
    size = row_bytes(shape, given)
    if len(buffer) < size:
        buffer.extend(bytes(size - len(buffer)))
    at = 0
    view = memoryview(buffer)
    try:
        for run in runs:
            begin = run.start
            left = run.count
            while left:
                count = min(left, (len(buffer) - at) // size) if size else left
                if not count:
                    yield _cast(view[:at], given, dtype)
                    at = 0
                    continue
                block = view[at : at + count * size]
                if run.part is None:
                    block[:] = bytes(len(block))
                else:
                    sources[run.part].read(begin, begin + count, block)
                at += count * size
                begin += count
                left -= count
        if at:
            yield _cast(view[:at], given, dtype)
    finally:
        view.release()


def whole(source: Rows) -> Tensor:
    """The tensor itself, for operations that need more than row numbers."""
    import torch

    data = bytearray(tensor_bytes(source.shape, source.dtype))
    if not data:
        return torch.empty(source.shape, dtype=getattr(torch, source.dtype))
    source.read(0, rows_of(source.shape), memoryview(data))
    return torch.frombuffer(data, dtype=getattr(torch, source.dtype)).reshape(source.shape)


def bytes_of(tensor: Tensor, dtype: str | None) -> memoryview:
    """A tensor's bytes in row-major order, rounded to ``dtype`` first where one is given."""
    import torch

    if dtype is not None:
        tensor = tensor.to(getattr(torch, dtype))
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _cast(block: memoryview, given: str, dtype: str | None) -> memoryview:
    if dtype is None or dtype == given or not len(block):
        return block
    import torch

    return bytes_of(torch.frombuffer(block, dtype=getattr(torch, given)), dtype)


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor to write: where its rows come from.

    Attributes:
        sources: What is read.
        runs: Rows of the result; empty where ``make`` gives it.
        make: Computes the whole result, for operations that do more than move rows.
        shape: The result's shape.
        dtype: The result's torch dtype name.
    """

    sources: tuple[Rows, ...]
    runs: tuple[Run, ...]
    make: Callable[[tuple[Tensor, ...]], Tensor] | None
    shape: tuple[int, ...]
    dtype: str

    def part(self, first: int, shape: tuple[int, ...]) -> Copy:
        """The result's rows from ``first`` on, as many as ``shape`` has."""
        if shape == self.shape:
            return self
        stop, make = first + rows_of(shape), self.make
        if make is None:
            runs = tuple(part_of(self.runs, first, stop))
            return Copy(self.sources, runs, None, shape, self.dtype)
        return Copy(self.sources, (), lambda parts: make(parts)[first:stop], shape, self.dtype)

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """Where the bytes of rows ``start`` to ``stop`` of the result stand, see `Rows`."""
        if self.make is not None or any(source.dtype != self.dtype for source in self.sources):
            return None
        found: list[Extent] = []
        size = row_bytes(self.shape, self.dtype)
        for run in part_of(self.runs, start, stop):
            more: Sequence[Extent] | None = (Extent(None, 0, run.count * size),)
            if run.part is not None:
                more = self.sources[run.part].extents(run.start, run.start + run.count)
            if more is None:
                return None
            found += more
        return found

    def blocks(self, start: int, stop: int, buffer: bytearray) -> Iterator[memoryview]:
        """Bytes of rows ``start`` to ``stop`` of the result, see `blocks`."""
        if self.make is None:
            yield from blocks(
                tuple(part_of(self.runs, start, stop)),
                self.sources,
                self.shape,
                self.dtype,
                buffer,
            )
        else:
            result = self.make(tuple(whole(source) for source in self.sources))
            yield bytes_of(result[start:stop] if result.ndim else result, self.dtype)


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix with its axes swapped, which is held while it is written.

    Attributes:
        of: The matrix.
    """

    of: Copy

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """As `Copy.extents`; no row stands anywhere in one piece."""
        return None

    def blocks(self, start: int, stop: int, buffer: bytearray) -> Iterator[memoryview]:
        """As `Copy.blocks`; rows are those of the result."""
        import torch

        data = bytearray(b"".join(self.of.blocks(0, rows_of(self.of.shape), buffer)))
        matrix = torch.frombuffer(data, dtype=getattr(torch, self.of.dtype)).view(self.of.shape)
        yield bytes_of(matrix.T[start:stop], None)


def write_rows(
    copy: Copy | Quantised | Transposed,
    start: int,
    stop: int,
    target: tuple[int, int],
    files: Files,
    buffer: bytearray,
) -> int:
    """Write rows of a tensor to a file; returns their bytes.

    Args:
        copy: The tensor.
        start: Its first row.
        stop: The row after its last one.
        target: The file and the byte where they go.
        files: Open files, to read from.
        buffer: Scratch.
    """
    (fd, begin), at = target, target[1]
    extents = copy.extents(start, stop)
    if extents and sum(extent.length for extent in extents) >= _SMALL * len(extents):
        for extent in extents:
            at += files.copy(extent, fd, at, buffer)
    else:
        for block in copy.blocks(start, stop, buffer):
            at += write_all(fd, block, at)
    return at - begin


#: The largest number of the format.
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor in FP8, or the scales of its blocks.

    A block's scale is its largest magnitude over 448, so that the format's range is used. Where
    every number of a block is one of the format times a power of two, that power is its scale, so
    that nothing is rounded.

    Attributes:
        of: The tensor.
        scales: Whether the scales are meant.
        powers: Only powers of two (``scale_fmt`` ue8m0).
    """

    of: Copy
    scales: bool
    powers: bool = False

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """As `Copy.extents`; every number is computed."""
        return None

    def blocks(self, start: int, stop: int, buffer: bytearray) -> Iterator[memoryview]:
        """As `Copy.blocks`; rows are those of the weight, or of the scales."""
        import torch

        rows, width = self.of.shape
        step = 1 if self.scales else FP8_BLOCK
        assert start % step == 0
        for at in range(start // step, -(-stop // step)):
            low, high = at * FP8_BLOCK, min((at + 1) * FP8_BLOCK, rows)
            data = bytearray(b"".join(self.of.blocks(low, high, buffer)))
            block = torch.frombuffer(data, dtype=getattr(torch, self.of.dtype))
            numbers, scale = quantise(block.view(-1, width).float(), self.powers)
            yield bytes_of(scale if self.scales else numbers, None)


def quantise(tensor: Tensor, powers: bool) -> tuple[Tensor, Tensor]:
    """A row of blocks in FP8.

    Args:
        tensor: ``[at most 128, columns]`` float32.
        powers: Scales are powers of two.

    Returns:
        ``[rows, columns]`` FP8 and ``[ceil(columns / 128)]`` float32.
    """
    import torch

    rows, width = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, -width % FP8_BLOCK))
    blocks = padded.view(rows, -1, FP8_BLOCK)
    largest = blocks.abs().amax((0, 2))
    if not largest.isfinite().all():
        raise UserError("a weight is not finite, and has no FP8 form; export it as bf16")
    scale = torch.where(largest > 0, largest / _FP8_MAX, torch.ones_like(largest))
    mantissa, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    numbers = (blocks / power[:, None]).to(torch.float8_e4m3fn)
    if not powers:
        exact = (numbers.float() * power[:, None] == blocks).all(2).all(0)
        best = (blocks / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        numbers = torch.where(exact[:, None], numbers.view(torch.uint8), best)
        power = torch.where(exact, power, scale)
        numbers = numbers.view(torch.float8_e4m3fn)
    return numbers.reshape(rows, -1)[:, :width].contiguous(), power


@dataclass(frozen=True)
class RunTable:
    """Runs found beforehand, so that who carries them out needs no torch.

    Attributes:
        forward: (operation, rows of each HF tensor) -> runs.
        inverse: (operation, rows of the Megatron tensor) -> runs of each HF tensor.
    """

    forward: Mapping[tuple[Operation, tuple[int, ...]], tuple[Run, ...]]
    inverse: Mapping[tuple[Operation, int], tuple[tuple[Run, ...], ...]]


#: Nothing is known beforehand.
NO_RUNS = RunTable({}, {})


def forward_copy(
    operation: Operation,
    sources: tuple[Rows, ...],
    shape: tuple[int, ...],
    dtype: str,
    table: RunTable = NO_RUNS,
) -> Copy:
    """The Megatron tensor of HF tensors."""
    if moves_rows(operation):
        rows = tuple(rows_of(source.shape) for source in sources)
        runs = table.forward.get((operation, rows)) or forward_runs(operation, rows)
        return Copy(sources, runs, None, shape, dtype)
    return Copy(sources, (), operation.forward, shape, dtype)


def inverse_copy(
    operation: Operation,
    source: Rows,
    part: int,
    shape: tuple[int, ...],
    dtype: str,
    table: RunTable = NO_RUNS,
) -> Copy:
    """HF tensor number ``part`` of a Megatron tensor."""
    if moves_rows(operation):
        rows = rows_of(source.shape)
        runs = table.inverse.get((operation, rows)) or inverse_runs(operation, rows)
        return Copy((source,), runs[part], None, shape, dtype)

    def make(parts: tuple[Tensor, ...]) -> Tensor:
        return operation.inverse(parts[0])[part]

    return Copy((source,), (), make, shape, dtype)
