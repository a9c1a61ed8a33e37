r"""The ``.bin``/``.idx`` pair of Megatron-Core: a streaming writer, a reader, a merger.

Only numpy: no torch, no megatron. The bytes are those of upstream's ``IndexedDatasetBuilder``
(``megatron/core/datasets/indexed_dataset.py``), and a test compares them.

Layout of ``PREFIX.idx`` (little endian)::

    9 bytes    MMIDIDX\0\0
    uint64     version, 1
    uint8      dtype code of the token ids in PREFIX.bin
    uint64     S, number of sequences
    uint64     D, number of documents + 1
    int32[S]   tokens of each sequence, the EOD included
    int64[S]   byte offset of each sequence in PREFIX.bin
    int64[D]   for each document the index of its first sequence; the last entry is S

``PREFIX.bin`` is the token ids of all sequences, end to end.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from megatron_patch.util import UserError, human_bytes

IntArray = npt.NDArray[Any]

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
_FIXED = struct.Struct("<9sQBQQ")

#: dtype code in the index -> numpy type name, as upstream numbers them.
DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_CODES = {name: code for code, name in DTYPES.items()}

#: Below this many ids upstream stores two bytes a token (``DType.optimal_dtype``). Not 65,536: a
#: vocabulary of 65,500 to 65,536 takes four bytes although its ids would fit into two.
UINT16_BELOW = 65500

_BLOCK = 1 << 20  # entries handled at a time when an index is written or read


def dtype_for(vocab_size: int, *, largest_id: int | None = None) -> np.dtype[Any]:
    """The type upstream stores ids of a vocabulary in: uint16 below 65,500 ids, else int32.

    Args:
        vocab_size: Number of ids of the tokenizer, or the padded size, whichever is larger.
        largest_id: Largest id that can occur. A sparse vocabulary may hold fewer ids than its
            largest one says; then four bytes are taken where upstream would overflow.
    """
    if vocab_size < UINT16_BELOW and (largest_id is None or largest_id <= 0xFFFF):
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def prefix_of(path: str | os.PathLike[str]) -> str:
    """``path`` without a trailing ``.bin`` or ``.idx``: the form that ``--data-path`` takes."""
    text = os.fspath(path)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


# ------------------------------------------------------------------------------------------ reader


@dataclass(frozen=True)
class Index:
    """The header of an idxmap; the arrays are read on demand and are copies, safe to keep.

    Attributes:
        prefix: Path without suffix.
        dtype: Type of the token ids in ``PREFIX.bin``.
        sequences: Number of sequences.
        documents: Number of documents (upstream's ``document_indices`` has one entry more).
    """

    prefix: str
    dtype: np.dtype[Any]
    sequences: int
    documents: int

    @property
    def bin_path(self) -> str:
        """Path of the token ids."""
        return self.prefix + ".bin"

    @property
    def idx_path(self) -> str:
        """Path of the index."""
        return self.prefix + ".idx"

    def _array(self, dtype: Any, offset: int, start: int, stop: int) -> IntArray:
        size = np.dtype(dtype).itemsize
        with open(self.idx_path, "rb") as handle:
            handle.seek(offset + start * size)
            return np.fromfile(handle, dtype=dtype, count=stop - start)

    def lengths(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Tokens of sequences ``start:stop``, int32."""
        stop = self.sequences if stop is None else stop
        return self._array(np.int32, _FIXED.size, start, stop)

    def pointers(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Byte offsets of sequences ``start:stop`` in the ``.bin``, int64."""
        stop = self.sequences if stop is None else stop
        return self._array(np.int64, _FIXED.size + 4 * self.sequences, start, stop)

    def document_starts(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Index of the first sequence of documents ``start:stop``, int64; entry D is S."""
        stop = self.documents + 1 if stop is None else stop
        return self._array(np.int64, _FIXED.size + 12 * self.sequences, start, stop)

    def token_count(self) -> int:
        """Tokens of all sequences, EODs included: the sum of the lengths, in bounded memory."""
        return sum(
            int(self.lengths(i, min(i + _BLOCK, self.sequences)).sum(dtype=np.int64))
            for i in range(0, self.sequences, _BLOCK)
        )

    def tokens(self, sequence: int) -> IntArray:
        """Token ids of one sequence."""
        length = int(self.lengths(sequence, sequence + 1)[0])
        pointer = int(self.pointers(sequence, sequence + 1)[0])
        with open(self.bin_path, "rb") as handle:
            handle.seek(pointer)
            ids = np.fromfile(handle, dtype=self.dtype, count=length)
        if ids.size != length:
            raise UserError(
                f"{self.bin_path} ends inside sequence {sequence}: {length} tokens announced, "
                f"{ids.size} found. The file was cut short; write it again."
            )
        return ids


def read_index(path: str | os.PathLike[str]) -> Index:
    """Read the header of ``path`` (a prefix, or its ``.idx``/``.bin``) and check the file sizes.

    Raises:
        UserError: A file is missing, is no idxmap, or its size does not match what it announces.
    """
    prefix = prefix_of(path)
    idx, binary = Path(prefix + ".idx"), Path(prefix + ".bin")
    for part in (idx, binary):
        if not part.is_file():
            raise UserError(
                f"{part} does not exist. An idxmap is two files, PREFIX.bin and PREFIX.idx, and is "
                f"named by its prefix; make it with toolkits/pretrain_data_preprocessing/"
                "preprocess_data.py."
            )
    size = idx.stat().st_size
    with idx.open("rb") as handle:
        raw = handle.read(_FIXED.size)
    if len(raw) < _FIXED.size or raw[:9] != HEADER:
        raise UserError(f"{idx} is no Megatron index: it does not begin with {HEADER!r}.")
    _, version, code, sequences, entries = _FIXED.unpack(raw)
    if version != VERSION or code not in DTYPES:
        raise UserError(
            f"{idx} announces version {version} and dtype code {code}; known are version "
            f"{VERSION} and the codes {sorted(DTYPES)}. Write it again with a current tool."
        )
    expected = _FIXED.size + 12 * sequences + 8 * entries
    # Multimodal sets carry one more byte a sequence.
    if size not in (expected, expected + sequences) or entries < 1:
        raise UserError(
            f"{idx} holds {size} bytes, but {sequences} sequences and {entries} document entries "
            f"take {expected}. The file was cut short; write it again."
        )
    index = Index(prefix, np.dtype(DTYPES[code]), sequences, entries - 1)
    end = 0
    if sequences:
        last = sequences - 1
        end = int(index.pointers(last)[0]) + int(index.lengths(last)[0]) * index.dtype.itemsize
    if binary.stat().st_size != end:
        raise UserError(
            f"{binary} holds {binary.stat().st_size} bytes, its index announces {end}. The two "
            "files do not belong together, or one was cut short; write the pair again."
        )
    return index


def token_count(path: str | os.PathLike[str]) -> int:
    """Tokens of the idxmap at ``path``, EODs included."""
    return read_index(path).token_count()


def _last_token(index: Index, document: int) -> int | None:
    """The last id of a document; None where it has no tokens."""
    first, last = index.document_starts(document, document + 2)
    if first == last:
        return None
    pointer = int(index.pointers(int(last) - 1, int(last))[0])
    length = int(index.lengths(int(last) - 1, int(last))[0])
    if not length:
        return None
    with open(index.bin_path, "rb") as handle:
        handle.seek(pointer + (length - 1) * index.dtype.itemsize)
        return int(np.fromfile(handle, dtype=index.dtype, count=1)[0])


def eod_share(path: str | os.PathLike[str], eod: int, *, sample: int = 256) -> float:
    """Share of documents whose last token is ``eod``, from up to ``sample`` spread over the file.

    0.0 means that documents run into each other in training; warn. Documents without a sequence
    are left out. Without any document the share is 1.0: nothing runs into anything.

    Raises:
        UserError: The index points to where nothing is.
    """
    index = read_index(path)
    picks = np.unique(np.linspace(0, index.documents - 1, min(sample, index.documents), dtype=int))
    seen = hits = 0
    try:
        for pick in picks:
            last = _last_token(index, int(pick))
            seen += last is not None
            hits += last == eod
    except (IndexError, OSError, ValueError) as problem:
        raise UserError(
            f"{index.idx_path} points outside of itself or of {index.bin_path} ({problem}); one of "
            "the two is damaged: write the pair again."
        ) from None
    return hits / seen if seen else 1.0


# ------------------------------------------------------------------------------------------ writer


def write_index(
    handle: IO[bytes],
    dtype: np.dtype[Any],
    lengths: Iterable[IntArray],
    per_document: Iterable[IntArray],
    *,
    sequences: int,
    documents: int,
) -> int:
    """Write an index from blocks; the memory taken does not depend on their number.

    Args:
        handle: Binary file, seekable (the pointers are written beside the lengths).
        dtype: Type of the token ids.
        lengths: Blocks of tokens per sequence; iterated once.
        per_document: Blocks of sequences per document; iterated once.
        sequences: Entries in ``lengths``.
        documents: Entries in ``per_document``.

    Returns:
        Number of tokens.

    Raises:
        ValueError: The blocks hold another number of entries than announced.
    """
    base = handle.tell()
    handle.write(
        _FIXED.pack(HEADER, VERSION, _CODES[dtype.name], sequences, documents + 1),
    )
    at_lengths = base + _FIXED.size
    at_pointers = at_lengths + 4 * sequences
    tokens = 0
    done = 0
    for block in lengths:
        wide = block.astype(np.int64)
        # Offsets in bytes, in 64 bits from the start: 32 bits overflow beyond 2 GiB.
        ends = np.cumsum(wide) + tokens
        handle.seek(at_lengths + 4 * done)
        handle.write(block.astype(np.int32).tobytes())
        handle.seek(at_pointers + 8 * done)
        handle.write(((ends - wide) * dtype.itemsize).tobytes())
        done += block.size
        tokens = int(ends[-1]) if block.size else tokens
    if done != sequences:
        raise ValueError(f"{done} sequence lengths given, {sequences} announced")
    handle.seek(at_pointers + 8 * sequences)
    handle.write(np.zeros(1, np.int64).tobytes())
    first = 0
    done = 0
    for block in per_document:
        starts = np.cumsum(block.astype(np.int64)) + first
        handle.write(starts.tobytes())
        first = int(starts[-1]) if block.size else first
        done += block.size
    if done != documents or first != sequences:
        raise ValueError(
            f"{done} documents with {first} sequences given, {documents} with {sequences} announced"
        )
    return tokens


def _blocks(path: Path, dtype: Any) -> Iterator[IntArray]:
    with path.open("rb") as handle:
        while (block := np.fromfile(handle, dtype=dtype, count=_BLOCK)).size:
            yield block


class Writer:
    """Write an idxmap so that the pair appears whole or not at all.

    Until ``commit`` everything lies in ``PREFIX.*.partial`` files in the same directory; leaving
    the ``with`` block without it removes them. Lengths are spilled to disk, so memory stays flat. A
    lock keeps a second writer away from the same prefix. Bytes may be written by other processes:
    ``reserve`` hands out places in the ``.bin`` in document order, ``partial_bin`` is the file.

    Args:
        prefix: Path without suffix; its directory is made.
        dtype: Type of the token ids.
        overwrite: Replace an existing pair at commit.

    Raises:
        UserError: The pair exists and may not be replaced, or another process is writing it.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any], *, overwrite: bool = False) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self._end = 0
        check_free(prefix, overwrite=overwrite)
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self.partial_bin, "ab")  # noqa: SIM115 - closed by commit or abort
        except OSError as error:
            raise UserError(f"cannot write {self.partial_bin}: {error.strerror}") from error
        try:
            fcntl.flock(self._bin, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._bin.close()
            raise UserError(
                f"another run is writing {prefix}.bin at this moment. Wait for it, or give another "
                "--output-path."
            ) from None
        except OSError:
            pass  # a file system without locks; the rename at the end is still atomic
        self._bin.truncate(0)  # what a killed run left
        self._spill_lengths = Path(prefix + ".lengths.partial")
        self._spill_documents = Path(prefix + ".documents.partial")
        self._lengths = self._spill_lengths.open("wb")
        self._documents = self._spill_documents.open("wb")

    @property
    def partial_bin(self) -> str:
        """The file that holds the ids until ``commit``."""
        return self.prefix + ".bin.partial"

    def reserve(self, size: int) -> int:
        """Take the next ``size`` bytes of the ``.bin``; returns their offset."""
        offset = self._end
        self._end += size
        return offset

    def add(self, lengths: IntArray, per_document: IntArray) -> None:
        """Append to the index: tokens of each sequence (int32), sequences of each document."""
        self._lengths.write(np.ascontiguousarray(lengths, dtype=np.int32).tobytes())
        self._documents.write(np.ascontiguousarray(per_document, dtype=np.int32).tobytes())
        self.sequences += int(lengths.size)
        self.documents += int(per_document.size)
        self.tokens += int(lengths.sum(dtype=np.int64))

    def write(self, ids: IntArray, lengths: IntArray, per_document: IntArray) -> None:
        """Append ids (converted to the writer's dtype) and their index entries."""
        data = np.ascontiguousarray(ids, dtype=self.dtype)
        write_at(self.partial_bin, memoryview(data).cast("B"), self.reserve(data.nbytes))
        self.add(lengths, per_document)

    def commit(self) -> Index:
        """Make the pair appear under its name; returns its index."""
        if self._end != self.tokens * self.dtype.itemsize:
            raise ValueError(f"{self._end} bytes reserved for {self.tokens} tokens")
        for handle in (self._lengths, self._documents):
            handle.close()
        partial_idx = self.prefix + ".idx.partial"
        with open(partial_idx, "wb") as handle:
            write_index(
                handle,
                self.dtype,
                _blocks(self._spill_lengths, np.int32),
                _blocks(self._spill_documents, np.int32),
                sequences=self.sequences,
                documents=self.documents,
            )
            handle.flush()
            os.fsync(handle.fileno())
        os.fsync(self._bin.fileno())
        # Never a new .bin beside an old .idx: without an index there is no data set to misread.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        os.replace(self.partial_bin, self.prefix + ".bin")
        os.replace(partial_idx, self.prefix + ".idx")
        self._bin.close()
        self._spill_lengths.unlink()
        self._spill_documents.unlink()
        return read_index(self.prefix)

    def abort(self) -> None:
        """Remove everything that was written; harmless after ``commit``."""
        for handle in (self._lengths, self._documents):
            handle.close()
        if not self._bin.closed:
            for suffix in (".bin", ".idx", ".lengths", ".documents"):
                Path(self.prefix + suffix + ".partial").unlink(missing_ok=True)
            self._bin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def check_free(prefix: str, *, overwrite: bool) -> None:
    """Refuse to replace an existing pair unless that was asked for.

    Raises:
        UserError: ``PREFIX.bin`` or ``PREFIX.idx`` exists.
    """
    for suffix in (".bin", ".idx"):
        if not overwrite and os.path.exists(prefix + suffix):
            raise UserError(
                f"{prefix + suffix} exists already. Give another --output-path, or --overwrite to "
                "replace the pair."
            )


def write_at(path: str, data: memoryview, offset: int) -> None:
    """Write ``data`` into the existing file ``path`` at ``offset``; for any process."""
    fd = os.open(path, os.O_WRONLY)
    try:
        _pwrite(fd, data, offset)
    finally:
        os.close(fd)


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``: one call may write less than it was given."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], offset + done)


def merge(prefixes: Sequence[str], output: str, *, overwrite: bool = False) -> Index:
    """Put idxmaps one after the other into one: the same bytes as one run over all documents.

    Args:
        prefixes: Inputs in order, each a prefix or one of its two files.
        output: Prefix of the result.
        overwrite: Replace an existing pair.

    Raises:
        UserError: No input, an input is missing or cut short, types differ, or too little space.
    """
    if not prefixes:
        raise UserError("nothing to merge: name at least one PREFIX (of PREFIX.bin/PREFIX.idx).")
    parts = [read_index(prefix) for prefix in prefixes]
    for part in parts:
        if os.path.abspath(part.prefix) == os.path.abspath(output):
            raise UserError(f"{output} is both an input and the output of the merge.")
        if part.dtype != parts[0].dtype:
            raise UserError(
                f"{part.bin_path} stores {part.dtype} ids, {parts[0].bin_path} {parts[0].dtype}: "
                "they were made with different tokenizers and cannot be merged."
            )
    need = sum(os.path.getsize(part.bin_path) for part in parts)
    directory = Path(output).parent
    directory.mkdir(parents=True, exist_ok=True)
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < need:
        raise UserError(
            f"merging takes {human_bytes(need)} in {directory}, which has "
            f"{human_bytes(free.f_bavail * free.f_frsize)} free."
        )
    with Writer(output, parts[0].dtype, overwrite=overwrite) as writer:
        for part in parts:
            size = os.path.getsize(part.bin_path)
            _append(part.bin_path, writer.partial_bin, writer.reserve(size), size)
            for start in range(0, max(part.sequences, part.documents), _BLOCK):
                writer.add(
                    part.lengths(min(start, part.sequences), min(start + _BLOCK, part.sequences)),
                    np.diff(
                        part.document_starts(
                            min(start, part.documents), min(start + _BLOCK, part.documents) + 1
                        )
                    ),
                )
        return writer.commit()


def _append(source: str, target: str, offset: int, size: int) -> None:
    """Copy ``size`` bytes of ``source`` to ``target`` at ``offset``, in the kernel where it can."""
    with open(source, "rb") as reader, open(target, "r+b") as writer:
        done = 0
        try:
            while done < size:
                count = os.copy_file_range(
                    reader.fileno(), writer.fileno(), min(size - done, 1 << 30), done, offset + done
                )
                if not count:
                    break
                done += count
        except OSError:
            pass  # other file systems at the two ends: copy the rest by hand
        while done < size:
            block = os.pread(reader.fileno(), min(size - done, 64 << 20), done)
            if not block:
                raise UserError(f"{source} ended after {done} of {size} bytes; write it again.")
            _pwrite(writer.fileno(), memoryview(block), offset + done)
            done += len(block)
