"""Megatron's ``torch_dist`` checkpoints, read and written tensor by tensor.

The format is torch's distributed checkpoint as Megatron-Core writes it
(``megatron/core/dist_checkpointing/strategies/torch.py``,
``torch/distributed/checkpoint/filesystem.py``):

- ``.metadata``: a pickle that says, for every key, shape, dtype and chunks, and for every chunk the
  file, first byte and length of its record. It is read without importing what it names.
- ``*.distcp``: records one after the other. A tensor's record is what ``torch.save`` writes: a zip
  archive, stored uncompressed, with a pickle of sizes and strides and the raw data.
- ``metadata.json``: names the format.

Data moves between files in blocks, see `rows`. Written records carry no checksum over the data
(torch reads none), which makes writing as fast as copying.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_patch.convert.rows import (
    ITEM_SIZE,
    Copy,
    Extent,
    FileRows,
    Files,
    row_bytes,
    rows_of,
    tensor_bytes,
    write_all,
    write_rows,
)
from megatron_patch.patches.strict_load import is_extra_state
from megatron_patch.patches.tracker_file import TRACKER
from megatron_patch.util import UserError, atomic_write

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
COMMON = "common_state"
COMMON_FILE = "common.pt"

#: A chunk larger than this is written as several, so that a rank that needs a slice reads no more
#: than the chunks that it touches.
CHUNK = 256 << 20

#: Records start a new file when one has reached this size.
FILE = 16 << 30


# --- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of one file: path, first byte, length."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it starts, its sizes, and its record."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    record: Record


@dataclass
class Entry:
    """One key of a checkpoint."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: list[Chunk]
    _by_lead: dict[tuple[int, ...], list[Chunk]] | None = field(default=None, repr=False)
    _depth: int = field(default=0, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of data of the whole tensor."""
        return tensor_bytes(self.shape, self.dtype)

    def near(self, offset: Sequence[int], sizes: Sequence[int]) -> list[Chunk]:
        """Chunks that may touch a box.

        Where layers, and experts of layers, share a key, all chunks are one wide on its first
        axes, and those of one layer and expert are found by number.

        Args:
            offset: Where the box starts.
            sizes: Its sizes.
        """
        if self._by_lead is None:
            wide = (
                next((axis for axis, size in enumerate(chunk.sizes) if size != 1), len(chunk.sizes))
                for chunk in self.chunks
            )
            self._depth = min(wide, default=0)
            self._by_lead = {}
            for chunk in self.chunks:
                self._by_lead.setdefault(chunk.offset[: self._depth], []).append(chunk)
        if any(size != 1 for size in sizes[: self._depth]):
            return self.chunks
        return self._by_lead.get(tuple(offset[: self._depth]), [])


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint directory holds.

    Attributes:
        folder: The directory with ``.metadata``.
        tensors: Key -> entry.
        objects: Keys of everything that is no tensor -> record.
    """

    folder: Path
    tensors: Mapping[str, Entry]
    objects: Mapping[str, Record]


def find_checkpoint(directory: str | os.PathLike[str]) -> Path:
    """The directory of one step: the given one, or the one that its tracker file names.

    Accepts ``iter_N`` or ``release``, its parent, or a run directory with ``checkpoints``.

    Raises:
        UserError: None is there, or one of another format; says what was found.
    """
    path = Path(directory)
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    for folder in (path, path / "checkpoints"):
        tracker = folder / TRACKER
        if (folder / METADATA).exists() or not tracker.exists():
            continue
        step = tracker.read_text(encoding="utf-8").strip()
        name = f"iter_{int(step):07d}" if step.isdecimal() else step
        if not step or not (folder / name).is_dir():
            raise UserError(
                f"{tracker} names {step or 'nothing'!r}, but there is no {folder / name}. Name "
                f"the directory of a step itself."
            )
        path = folder / name
        break
    _refuse_other_formats(path)
    return path


def _refuse_other_formats(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    old = [name for name in names if name.startswith("mp_rank_")]
    if old:
        raise UserError(
            f"{path}: {old[0]} and others: Megatron's old `torch` format, which holds one layout's "
            f"shards. Load it once in Megatron-LM with --ckpt-convert-format torch_dist "
            f"--ckpt-convert-save DIR, at the layout that it was saved with, and convert DIR."
        )
    if (path / FORMAT_FILE).exists():
        try:
            found = json.loads((path / FORMAT_FILE).read_text(encoding="utf-8"))
            backend = found["sharded_backend"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path / FORMAT_FILE}: names no sharded_backend.") from None
        if backend != "torch_dist":
            raise UserError(
                f"{path}: saved as {backend!r}; only torch_dist is read. Save it again with "
                f"--ckpt-format torch_dist."
            )
        if (path / METADATA).exists():
            return
        raise UserError(
            f"{path}: {METADATA} is missing. It is a hidden file: copy the directory with it "
            f"(`cp -r DIR`, not `cp DIR/*`), or the save was cut off."
        )
    if (path / METADATA).exists():
        raise UserError(
            f"{path}: {METADATA} without {FORMAT_FILE}: an interrupted save, or a torch_dcp or "
            f"fsdp_dtensor checkpoint. Save it again with --ckpt-format torch_dist."
        )
    steps = [name for name in names if re.fullmatch(r"iter_\d+|release", name)]
    hint = (
        f"it holds {', '.join(steps[-3:])} but no {TRACKER}: name one of them"
        if steps
        else f"it holds {', '.join(names[:5]) or 'nothing'}"
    )
    raise UserError(f"{path}: no Megatron checkpoint ({hint}).")


class _Inert:
    """Stands for any class that a pickle names; it can be made and filled, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def append(self, _value: Any) -> None:
        """Lists and sets of unknown classes are filled this way."""

    extend = append

    def __setitem__(self, _key: Any, _value: Any) -> None: ...


class _MetadataReader(pickle.Unpickler):
    """Reads ``.metadata``: nothing that it names is imported or run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in ITEM_SIZE:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return type(name, (_Inert,), {})


def read_checkpoint(folder: Path, *, whole: bool = True) -> Checkpoint:
    """Read ``.metadata`` and check that every file it names is as long as it says.

    Args:
        folder: Directory of the step.
        whole: False: leave the check to :func:`incomplete`.

    Raises:
        UserError: The metadata cannot be read, or a file is missing or cut off.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as handle:
            found = _MetadataReader(handle).load()
        places = {
            (index.fqn, getattr(index, "offset", None)): Record(
                folder / info.relative_path, info.offset, info.length
            )
            for index, info in found.storage_data.items()
            if not _transformed(path, info)
        }
        tensors, objects = {}, {}
        for key, entry in found.state_dict_metadata.items():
            if is_extra_state(key) and (key, None) not in places and not _found(key, entry, places):
                continue  # an empty tensor may have no record
            if not hasattr(entry, "chunks"):
                objects[key] = places[key, None]
                continue
            chunks = [
                Chunk(
                    tuple(chunk.offsets),
                    tuple(chunk.sizes),
                    places[key, chunk.offsets] if (key, chunk.offsets) in places
                    else places[key, None],
                )
                for chunk in entry.chunks
            ]  # fmt: skip
            dtype = entry.properties.state[0]
            if dtype not in ITEM_SIZE and is_extra_state(key):
                objects[key] = chunks[0].record
                continue
            if dtype not in ITEM_SIZE:
                raise UserError(f"{path}: {key} has a dtype that is not supported.")
            tensors[key] = Entry(key, tuple(entry.size), dtype, chunks)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: cannot be read ({error!r}). Copy the directory again.") from None
    checkpoint = Checkpoint(folder, tensors, objects)
    for problem in incomplete(checkpoint) if whole else ():
        raise UserError(f"{problem}; {path} lists it. Copy the checkpoint again.")
    return checkpoint


def _found(key: str, entry: Any, places: Mapping[Any, Record]) -> bool:
    """Whether every chunk of an entry has a record."""
    chunks = getattr(entry, "chunks", ())
    return bool(chunks) and all((key, chunk.offsets) in places for chunk in chunks)


def _transformed(path: Path, info: Any) -> bool:
    if getattr(info, "transform_descriptors", None):
        raise UserError(f"{path}: {info.relative_path} is compressed, which is not supported.")
    return False


def incomplete(checkpoint: Checkpoint) -> list[str]:
    """Files that are missing or cut off, in words."""
    records = [c.record for e in checkpoint.tensors.values() for c in e.chunks]
    ends: dict[Path, int] = {}
    for record in [*records, *checkpoint.objects.values()]:
        end = record.offset + record.length
        ends[record.path] = max(end, ends.get(record.path, 0))
    problems = []
    for file, end in sorted(ends.items()):
        size = file.stat().st_size if file.exists() else None
        if size is None:
            problems.append(f"{file} is missing")
        elif size < end:
            problems.append(f"{file} has {size} bytes, {end} are needed")
    return problems


class _Part(io.RawIOBase):
    """A record as a file of its own."""

    def __init__(self, files: Files, record: Record) -> None:
        self._files, self._record, self._at = files, record, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = (0, self._at, self._record.length)[whence]
        self._at = base + offset
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        count = max(0, min(len(view), self._record.length - self._at))
        self._files.read(self._record.path, self._record.offset + self._at, view[:count])
        self._at += count
        return count


def archive_of(files: Files, record: Record) -> zipfile.ZipFile:
    """The archive that a record is, as `torch.save` writes it."""
    return zipfile.ZipFile(io.BufferedReader(_Part(files, record), 4096))


class _ObjectReader(_MetadataReader):
    """Reads what is no tensor; tensors in it are stand-ins."""

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def read_common(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says about its run: arguments, counters; plain data of it only.

    It is an entry, or the file ``common.pt`` in checkpoints of older versions.

    Raises:
        UserError: There is neither, or the record is damaged.
    """
    records = [r for key, r in checkpoint.objects.items() if key.partition("/")[0] == COMMON]
    old = checkpoint.folder / COMMON_FILE
    if not records and not old.exists():
        raise UserError(
            f"{old} is missing, and {checkpoint.folder / METADATA} lists no {COMMON}: the "
            "arguments and counters of the run are gone. Copy the checkpoint again."
        )
    place = records[0] if records else Record(old, 0, old.stat().st_size)
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (name,) = (n for n in archive.namelist() if n.partition("/")[2] == "data.pkl")
            found = _ObjectReader(io.BytesIO(archive.read(name))).load()
        found = found[0] if isinstance(found, list) else found
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
        return found
    except Exception as error:
        raise UserError(
            f"{place.path}: the arguments and counters of the run at byte {place.offset} cannot be "
            f"read ({type(error).__name__}: {error}). The file is damaged: copy the checkpoint "
            "again."
        ) from None


class _TensorReader(pickle.Unpickler):
    """Reads a tensor's pickle into (dtype, first element, sizes, strides)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"{module}.{name} in a tensor's record")

    def persistent_load(self, pid: Any) -> Any:
        return pid[1], pid[2]  # dtype, name of the data's entry


#: How torch names a storage -> torch dtype name.
_STORAGES = MappingProxyType(
    {
        "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
        "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
        "BoolStorage": "bool",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Data:
    """Where a record's numbers are: first byte, sizes, strides, dtype."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def _find_data(files: Files, record: Record, key: str) -> _Data:
    """Look into a tensor's record.

    Raises:
        UserError: It is no plain tensor as ``torch.save`` writes it.
    """
    try:
        with archive_of(files, record) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        order = entries.get("byteorder")
        written = _content(files, record, order) if order is not None else b"little"
        if written == b"big":
            raise UserError(f"{record.path}: {key} was written by a big-endian machine.")
        if written != b"little":
            raise ValueError(f"byte order {written!r}")
        pickled = _content(files, record, entries["data.pkl"])
        (dtype, name), first, sizes, strides = _TensorReader(io.BytesIO(pickled)).load()
        start = start_of(files, record, entries[f"data/{name}"])
    except (KeyError, ValueError, TypeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{record.path}: the record of {key} at byte {record.offset} is no tensor ({error}). "
            f"The file is damaged: copy the checkpoint again."
        ) from None
    return _Data(start + first * ITEM_SIZE[dtype], tuple(sizes), tuple(strides), dtype)


def damaged(checkpoint: Checkpoint) -> str | None:
    """The first tensor whose record is no longer one, in words; None where all look whole.

    Looks at the head of each record, not at its numbers.
    """
    files = Files()
    for entry in checkpoint.tensors.values():
        for chunk in entry.chunks:
            try:
                _find_data(files, chunk.record, entry.key)
            except UserError as problem:
                return str(problem)
    return None


def start_of(files: Files, record: Record, entry: zipfile.ZipInfo) -> int:
    """First byte of an archive entry's data in the record's file."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("compressed")
    header = bytearray(30)
    at = record.offset + entry.header_offset
    files.read(record.path, at, memoryview(header))
    names, extra = struct.unpack("<HH", header[26:30])
    return at + 30 + int(names) + int(extra)


def _content(files: Files, record: Record, entry: zipfile.ZipInfo) -> bytes:
    data = bytearray(entry.file_size)
    files.read(record.path, start_of(files, record, entry), memoryview(data))
    return bytes(data)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a region that stand together in one chunk.

    Attributes:
        start: First row in the region.
        rows: All rows of the chunk from the first needed one on, as wide as the chunk.
        count: How many of them are needed.
        inside: Slices of the chunk's other axes; None where the chunk is as wide as the region.
        outside: Slices of the region's other axes that they fill.
    """

    start: int
    rows: FileRows
    count: int
    inside: tuple[slice, ...] | None
    outside: tuple[slice, ...]


class RegionRows:
    """A tensor that stands in one or several chunks of a checkpoint; see `rows.Rows`."""

    def __init__(
        self,
        files: Files,
        entry: Entry,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> None:
        """Find the chunks.

        Args:
            files: Open files.
            entry: The key.
            offset: Where the tensor starts under the key.
            shape: The tensor's shape; its axes are the last ones of the key's.

        Raises:
            UserError: The chunks do not cover the tensor exactly once.
        """
        self.shape, self.dtype = shape, entry.dtype
        self._files, self._entry, self._offset = files, entry, offset
        self._pieces: list[_Piece] | None = None
        covered = sum(prod(box[1]) for _, box in self._boxes())
        if covered != prod(shape):
            raise UserError(
                f"{entry.key}: its chunks hold {covered} of the {prod(shape)} numbers at "
                f"{list(offset)}. The checkpoint is incomplete or two saves are mixed in it."
            )

    def _axes(self) -> tuple[int, ...]:
        """The region's sizes over all axes of the key."""
        return (1,) * (len(self._offset) - len(self.shape)) + self.shape

    def _boxes(self) -> Iterable[tuple[Chunk, tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Chunks that touch the region, with start and sizes of what they share."""
        sizes = self._axes()
        for chunk in self._entry.near(self._offset, sizes):
            low = tuple(map(max, self._offset, chunk.offset))
            high = tuple(
                min(a + b, c + d)
                for a, b, c, d in zip(self._offset, sizes, chunk.offset, chunk.sizes, strict=True)
            )
            if all(a < b for a, b in zip(low, high, strict=True)):
                yield chunk, (low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def _find(self) -> list[_Piece]:
        lead = max(0, len(self._offset) - max(1, len(self.shape)))
        pieces = []
        for chunk, (low, sizes) in self._boxes():
            data = _find_data(self._files, chunk.record, self._entry.key)
            if data.dtype != self.dtype or prod(data.sizes) != prod(chunk.sizes):
                raise UserError(
                    f"{chunk.record.path}: {self._entry.key} is {data.dtype} {list(data.sizes)} "
                    f"there, {self.dtype} {list(chunk.sizes)} in {METADATA}. Two saves are mixed."
                )
            strides = _row_major(data.sizes)
            if any(n > 1 and a != b for n, a, b in zip(data.sizes, data.strides, strides,
                                                        strict=True)):  # fmt: skip
                raise UserError(f"{chunk.record.path}: {self._entry.key} is stored transposed.")
            inner = tuple(a - b for a, b in zip(low, chunk.offset, strict=True))
            steps = _row_major(chunk.sizes)
            first = sum(a * b for a, b in zip(inner[: lead + 1], steps[: lead + 1], strict=True))
            width = chunk.sizes[lead + 1 :]
            inside = tuple(
                slice(a, a + b) for a, b in zip(inner[lead + 1 :], sizes[lead + 1 :], strict=True)
            )
            relative = tuple(a - b for a, b in zip(low, self._offset, strict=True))
            outside = tuple(
                slice(a, a + b)
                for a, b in zip(relative[lead + 1 :], sizes[lead + 1 :], strict=True)
            )
            count = sizes[lead] if sizes else 1
            rows = FileRows(
                self._files,
                chunk.record.path,
                data.offset + first * ITEM_SIZE[self.dtype],
                (count, *width),
                self.dtype,
            )
            full = width == self.shape[1:]
            start = relative[lead] if relative else 0
            pieces.append(_Piece(start, rows, count, None if full else inside, outside))
        return pieces

    def extents(self, start: int, stop: int) -> Sequence[Extent] | None:
        """See `rows.Rows`."""
        if self._pieces is None:
            self._pieces = self._find()
        found: list[Extent] = []
        for piece in sorted(self._pieces, key=lambda piece: piece.start):
            low, high = max(start, piece.start), min(stop, piece.start + piece.count)
            if low >= high:
                continue
            if piece.inside is not None:
                return None
            found += piece.rows.extents(low - piece.start, high - piece.start) or ()
        return found

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """See `rows.Rows`."""
        if self._pieces is None:
            self._pieces = self._find()
        size = row_bytes(self.shape, self.dtype)
        for piece in self._pieces:
            low, high = max(start, piece.start), min(stop, piece.start + piece.count)
            if low >= high:
                continue
            if piece.inside is None:
                part = into[(low - start) * size : (high - start) * size]
                piece.rows.read(low - piece.start, high - piece.start, part)
                continue
            self._read_columns(piece, low, high, into, start)

    def _read_columns(
        self, piece: _Piece, low: int, high: int, into: memoryview, start: int
    ) -> None:
        """Part of every row: read the chunk's rows and put their columns in place."""
        import torch

        assert piece.inside is not None
        dtype = getattr(torch, self.dtype)
        data = bytearray((high - low) * row_bytes(piece.rows.shape, self.dtype))
        piece.rows.read(low - piece.start, high - piece.start, memoryview(data))
        found = torch.frombuffer(data, dtype=dtype).view(high - low, *piece.rows.shape[1:])
        target = torch.frombuffer(into, dtype=dtype).view(-1, *self.shape[1:])
        where = (slice(low - start, high - start), *piece.outside)
        target[where] = found[(slice(None), *piece.inside)]


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    return tuple(strides)


# --- writing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """A record that was written.

    Attributes:
        key: Checkpoint key.
        offset: Where the chunk starts under the key; None for an object.
        sizes: The chunk's sizes over all axes of the key; empty for an object.
        file: File name.
        start: First byte.
        length: Bytes.
    """

    key: str
    offset: tuple[int, ...] | None
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@lru_cache(maxsize=1024)
def _pickled(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """The pickle that ``torch.save`` would write for a contiguous tensor; needs no torch."""
    (kind,) = (name for name, value in _STORAGES.items() if value == dtype)

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def number(value: int) -> bytes:
        if value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        return b"\x8a\x08" + struct.pack("<q", value)

    def numbers(values: Iterable[int]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = text("storage") + f"ctorch\n{kind}\n".encode() + text("0") + text("cpu")
    arguments = (
        b"(" + storage + number(prod(sizes)) + b"tQ",  # a persistent id: the data's entry
        number(0),
        numbers(sizes),
        numbers(_row_major(sizes)),
        b"\x89",  # requires no gradient
        b"ccollections\nOrderedDict\n)R",  # no hooks
    )
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + b"".join(arguments) + b"tR."


def record_frame(dtype: str, sizes: tuple[int, ...], start: int) -> tuple[bytes, bytes]:
    """What stands before and after a tensor's data in its record.

    Args:
        dtype: torch dtype name.
        sizes: Sizes of the chunk over all axes of its key.
        start: The record's first byte in its file; the data is aligned to 64 bytes.

    Returns:
        Head and tail; ``torch.load`` reads head + data + tail.
    """
    length = prod(sizes) * ITEM_SIZE[dtype]
    small = (
        ("archive/data.pkl", _pickled(dtype, sizes)),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    )
    head = io.BytesIO()
    central = io.BytesIO()

    def add(name: str, size: int, crc: int, extra: bytes = b"") -> None:
        at, raw = head.tell(), name.encode()
        fields = (20, 0, 0, 0, 0x21, crc, size, size, len(raw))
        head.write(struct.pack("<I5H3I2H", 0x04034B50, *fields, len(extra)) + raw + extra)
        central.write(struct.pack("<I6H3I5H2I", 0x02014B50, 20, *fields, 0, 0, 0, 0, 0, at) + raw)

    for name, content in small:
        add(name, len(content), zlib.crc32(content))
        head.write(content)
    name = "archive/data/0"
    unpadded = start + head.tell() + 30 + len(name) + 4
    padding = -unpadded % 64
    add(name, length, 0, struct.pack("<2sH", b"FB", padding) + b"Z" * padding)
    directory = central.getvalue()
    end = struct.pack(
        "<I4H2IH", 0x06054B50, 0, 0, len(small) + 1, len(small) + 1,
        len(directory), head.tell() + length, 0,
    )  # fmt: skip
    return head.getvalue(), directory + end


def chunk_rows(shape: Sequence[int], dtype: str, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Rows of each chunk: split at ``cuts``, and where a chunk would exceed `CHUNK` bytes."""
    most = max(1, CHUNK // max(1, row_bytes(shape, dtype)))
    found = []
    for low, high in zip(cuts, (*cuts[1:], rows_of(shape)), strict=True):
        pieces = -(-(high - low) // most)
        each = -(-(high - low) // max(1, pieces))
        found += [(at, min(at + each, high)) for at in range(low, high, max(1, each))]
    return found


class DistWriter:
    """Writes one process's files of a checkpoint."""

    def __init__(self, folder: Path, part: int) -> None:
        self._folder, self._part = folder, part
        self._number, self._fd, self._at, self._file = 0, -1, 0, ""
        self.written: list[Written] = []

    def _open(self) -> None:
        if self._fd >= 0 and self._at < FILE:
            return
        self._close()
        self._file = f"__{self._part}_{self._number}.distcp"
        self._number += 1
        self._at = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._fd = os.open(self._folder / self._file, flags, 0o666)

    def _append(self, block: bytes) -> None:
        self._at += write_all(self._fd, block, self._at)

    def write(
        self,
        key: str,
        offset: tuple[int, ...],
        cuts: Sequence[int],
        copy: Copy,
        files: Files,
        buffer: bytearray,
    ) -> int:
        """Write one tensor; returns its bytes.

        Args:
            key: Checkpoint key.
            offset: Where the tensor starts under the key, over all its axes.
            cuts: First rows of chunks.
            copy: The tensor.
            files: Open files, to read from.
            buffer: Scratch.
        """
        axis = len(offset) - len(copy.shape)
        for low, high in chunk_rows(copy.shape, copy.dtype, cuts):
            self._open()
            place, sizes = list(offset), (1,) * axis + copy.shape
            if copy.shape:
                place[axis] += low
                sizes = (1,) * axis + (high - low, *copy.shape[1:])
            start = self._at
            head, tail = record_frame(copy.dtype, sizes, start)
            self._append(head)
            expected = tensor_bytes(sizes, copy.dtype)
            written = write_rows(copy, low, high, (self._fd, self._at), files, buffer)
            assert written == expected, (key, written, expected)
            self._at += written
            self._append(tail)
            self.written.append(
                Written(key, tuple(place), sizes, self._file, start, self._at - start)
            )
        return tensor_bytes(copy.shape, copy.dtype)

    def write_object(self, key: str, content: bytes) -> None:
        """Write an entry that is no tensor, already in ``torch.save``'s form."""
        self._open()
        self.written.append(Written(key, None, (), self._file, self._at, len(content)))
        self._append(content)

    def _close(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Bring everything to the disk."""
        self._close()


def pickled_object(value: Any) -> bytes:
    """An object in the form that Megatron-Core gives entries that are no tensors."""
    import torch

    file = io.BytesIO()
    torch.save([value], file)
    return file.getvalue()


def check_written(folder: Path, written: Iterable[Written]) -> None:
    """Refuse to make a whole of files that lack what was written to them.

    Raises:
        UserError: Names the file.
    """
    ends: dict[str, int] = {}
    for record in written:
        ends[record.file] = max(ends.get(record.file, 0), record.start + record.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        size = file.stat().st_size if file.exists() else 0
        if size < end:
            raise UserError(
                f"{file} has {size} bytes, but {end} were written to it. Does every machine see "
                f"the same disk? Write that part again."
            )


def write_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    written: Iterable[Written],
) -> None:
    """Write ``.metadata`` and, last, ``metadata.json``, which make a checkpoint of the files.

    Args:
        folder: The checkpoint directory.
        tensors: Key -> shape and torch dtype name.
        written: Every record, in any order.

    Raises:
        ValueError: The records do not cover every tensor exactly once.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), []
        )
        for key, (shape, dtype) in tensors.items()
    }
    storage = {}
    covered = dict.fromkeys(tensors, 0)
    for record in sorted(written, key=lambda record: (record.key, record.offset or ())):
        info = _StorageInfo(record.file, record.start, record.length)
        if record.offset is None:
            entries[record.key] = BytesStorageMetadata()
            storage[MetadataIndex(record.key)] = info
            continue
        offset = torch.Size(record.offset)
        chunks = entries[record.key].chunks
        chunks.append(ChunkStorageMetadata(offset, torch.Size(record.sizes)))
        storage[MetadataIndex(record.key, offset, len(chunks) - 1)] = info
        covered[record.key] += prod(record.sizes)
    wrong = [key for key, (shape, _) in tensors.items() if covered[key] != prod(shape)]
    if wrong or len(storage) != sum(len(getattr(e, "chunks", ".")) for e in entries.values()):
        raise ValueError(f"not every tensor was written exactly once: {wrong[:5]}")
    content = pickle.dumps(Metadata(entries, storage_data=storage, version="1.0.0"))
    atomic_write(folder / METADATA, content)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    atomic_write(folder / FORMAT_FILE, json.dumps(backend))
