"""Corpus files for preprocessing: what they are, how they are cut into tasks, how records are read.

A *task* is a piece of work for one process, about four megabytes of text: a byte range of a file
that can be entered anywhere (plain JSON lines, plain text by lines), or a block that the feeding
process has read (compressed files, JSON arrays, Parquet). Tasks come in document order, and so do
their results. Memory does not depend on the size of the corpus, only on its longest document.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

import orjson

from megatron_patch.util import UserError, human_bytes

BLOCK = 4 << 20
#: A text file that is one document has to fit into memory several times over.
LARGEST_TXT_DOCUMENT = 256 << 20

_FORMS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".txt": "txt",
    ".text": "txt",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
_BOM = b"\xef\xbb\xbf"
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")

#: What an item of each form is called in messages.
NOUNS = {"jsonl": "line", "json": "item", "txt": "document", "parquet": "row"}


@dataclass(frozen=True)
class Reading:
    """How records are read.

    Attributes:
        keys: JSON keys or Parquet columns that hold text; none where whole records are read.
        txt: Document rule of text files: ``file``, ``line``, ``blank-line`` or ``separator``.
        separator: The text between documents where ``txt`` is ``separator``.
    """

    keys: tuple[str, ...] = ("text",)
    txt: str = "file"
    separator: str = ""


@dataclass(frozen=True)
class Source:
    """One input file.

    Attributes:
        path: The file.
        form: ``jsonl``, ``json`` (array, or objects over several lines), ``txt`` or ``parquet``.
        compression: ``gz``, ``zst`` or None.
        size: Bytes on disk.
    """

    path: str
    form: str
    compression: str | None
    size: int

    def by_range(self, reading: Reading) -> bool:
        """Whether the file can be entered at any byte."""
        lines = self.form == "jsonl" or (self.form == "txt" and reading.txt == "line")
        return lines and self.compression is None


@dataclass(frozen=True)
class Task:
    """A piece of work.

    Attributes:
        source: Index of the first source it is from.
        kind: ``range``, ``lines``, ``items``, ``arrow``, ``documents`` or ``files``.
        start: First byte of a range.
        stop: The byte after it.
        payload: What the feeding process has read; paths where the kind is ``files``.
        weight: Bytes on disk that are done with it, for progress.
    """

    source: int
    kind: str
    start: int = 0
    stop: int = 0
    payload: Any = None
    weight: int = 0


@dataclass
class Batch:
    """The records of one task.

    Attributes:
        items: Lines, items or rows seen, the blank and bad ones included.
        blank: Of these, blank lines.
        bad: Number within the task (from 0) and reason of each record that cannot be used.
        numbers: Number within the task of each good record.
        values: Per key, the text of each good record: a string, or a list of strings that are the
            sequences of one document.
    """

    items: int = 0
    blank: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    values: list[list[str | list[str]]] = field(default_factory=list)


# ------------------------------------------------------------------------------------ finding files


def expand(inputs: Sequence[str]) -> tuple[list[Source], list[str]]:
    """Files of ``inputs`` (files, folders, glob patterns), and those in folders that were left out.

    Folders are walked recursively in sorted order; hidden files, and files whose suffix is not
    known, are left out. A file that is reached twice is an error: its text would be trained twice.

    Raises:
        UserError: Nothing there, a suffix that is not known, or a file reached twice.
    """
    paths: list[str] = []
    skipped: list[str] = []
    for text in inputs:
        given = os.path.expanduser(text)
        if os.path.isdir(given):
            found, left_out = _walk(given)
            skipped += left_out
            if not found:
                raise UserError(
                    f"--input-path {given} holds no file with a known suffix "
                    f"({', '.join(_FORMS)}, each also with .gz or .zst)."
                )
            paths += found
        elif os.path.isfile(given):
            paths.append(given)
        else:
            matches = sorted(p for p in glob.glob(given, recursive=True) if os.path.isfile(p))
            if not matches:
                what = "matches no file" if glob.has_magic(given) else "does not exist"
                raise UserError(f"--input-path {given} {what}.")
            paths += matches
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise UserError(
                f"{path} is given twice (also as {seen[real]}): its text would be there twice. "
                "Weight data sets in --data-path instead."
            )
        seen[real] = path
    return [_source(path) for path in paths], skipped


def _walk(folder: str) -> tuple[list[str], list[str]]:
    found: list[str] = []
    skipped: list[str] = []
    for base, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                (found if _form(name)[0] else skipped).append(os.path.join(base, name))
    return sorted(found), skipped


def _form(name: str) -> tuple[str | None, str | None]:
    stem, suffix = os.path.splitext(name.lower())
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
        # c4-train.00000.gz and the like: compressed JSON lines are what such names hold.
        return _FORMS.get(suffix, "jsonl"), compression
    return _FORMS.get(suffix), None


def _source(path: str) -> Source:
    form, compression = _form(os.path.basename(path))
    if form is None:
        raise UserError(
            f"{path} has a suffix that is not known. Known: {', '.join(_FORMS)}, each also with "
            ".gz or .zst. Rename it, or link to it under a name that says what it is."
        )
    try:
        source = Source(path, form, compression, os.path.getsize(path))
        if form == "json" and _is_lines(source):
            source = Source(path, "jsonl", compression, source.size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    return source


def _is_lines(source: Source) -> bool:
    """Whether a ``.json`` file is JSON lines: its first line is a whole object."""
    with _Stream(source) as stream:
        while True:
            line = stream.readline(64 << 20)
            if not line:
                return False
            if line.removeprefix(_BOM).strip():
                break
    try:
        return isinstance(orjson.loads(line.removeprefix(_BOM)), dict)
    except ValueError:
        # A broken first line of JSON lines ends in "}"; a pretty-printed object's does not.
        return line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}")


def open_source(source: Source) -> tuple[IO[bytes], IO[bytes]]:
    """The file's content, decompressed, and the file as it is on disk. Close both."""
    raw = open(source.path, "rb")  # noqa: SIM115 - the caller closes it
    if source.compression == "gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb")), raw
    if source.compression == "zst":
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{source.path} needs a package: pip install zstandard.") from error
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(
            raw, read_across_frames=True, closefd=False
        )
        return io.BufferedReader(reader, buffer_size=1 << 20), raw
    return raw, raw


# --------------------------------------------------------------------------------- cutting to tasks


def tasks(
    sources: Sequence[Source],
    reading: Reading,
    *,
    block: int = BLOCK,
    shard: int = 0,
    shards: int = 1,
) -> Iterator[Task]:
    """Tasks of the given shard, in document order.

    The bytes of all files, end to end, are cut into ``shards`` equal parts. Files that can be
    entered anywhere are cut there (at the next line); others belong to the shard their first byte
    is in. The shards one after the other are all documents once, in order.

    Raises:
        UserError: A file is damaged, or holds no such column.
    """
    total = sum(source.size for source in sources)
    low, high = total * shard // shards, total * (shard + 1) // shards
    start = 0
    small: list[tuple[int, Source]] = []
    for number, source in enumerate(sources):
        first, start = start, start + source.size
        whole_file = source.form == "txt" and reading.txt == "file"
        if small and (not whole_file or sum(s.size for _, s in small) + source.size > block):
            yield _files(small)
            small = []
        if source.by_range(reading):
            begin, end = max(low - first, 0), min(high - first, source.size)
            for at in range(begin, end, block):
                stop = min(at + block, end)
                yield Task(number, "range", at, stop, weight=stop - at)
            continue
        inside = low <= first < high or (source.size == 0 and first == high == total)
        if not inside:
            continue
        if whole_file:
            small.append((number, source))
        else:
            yield from _fed(number, source, reading, block)
    if small:
        yield _files(small)


def _files(small: list[tuple[int, Source]]) -> Task:
    return Task(
        small[0][0],
        "files",
        payload=[source for _, source in small],
        weight=sum(source.size for _, source in small),
    )


def _fed(number: int, source: Source, reading: Reading, block: int) -> Iterator[Task]:
    """Tasks of a file that one process has to read from its beginning."""
    if source.form == "parquet":
        pieces = _parquet(source, reading, block)
    elif source.form == "json":
        pieces = _json_items(source, block)
    elif source.form == "txt" and reading.txt in ("blank-line", "separator"):
        pieces = _separated(source, reading, block)
    else:
        pieces = _blocks(source, block)
    done = 0
    for kind, payload, position in pieces:
        yield Task(number, kind, payload=payload, weight=position - done)
        done = position
    if done < source.size:
        yield Task(number, "lines", payload=b"", weight=source.size - done)


class _Stream:
    """Reads a possibly compressed file in pieces, naming it when it is damaged."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.handle, self.raw = open_source(source)
        self.taken = 0

    def read(self, size: int) -> bytes:
        return self._checked(self.handle.read, size)

    def readline(self, size: int) -> bytes:
        return self._checked(self.handle.readline, size)

    def _checked(self, method: Callable[[int], bytes], size: int) -> bytes:
        try:
            data = method(size)
        except Exception as error:
            known = isinstance(error, (EOFError, OSError, zlib.error))
            if not known and type(error).__name__ != "ZstdError":
                raise
            raise UserError(
                f"{self.source.path} is damaged or cut short: {error}, after "
                f"{human_bytes(self.taken)} of text. Fetch it again."
            ) from error
        self.taken += len(data)
        return data

    def position(self) -> int:
        """Bytes of the file on disk that have been taken."""
        return self.raw.tell()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.handle.close()
        self.raw.close()


_Piece = tuple[str, Any, int]


def _blocks(source: Source, block: int) -> Iterator[_Piece]:
    """Blocks that end at a line's end."""
    rest = b""
    with _Stream(source) as stream:
        while data := stream.read(block):
            cut = data.rfind(b"\n") + 1
            if not cut:
                rest += data
                continue
            yield "lines", rest + data[:cut], stream.position()
            rest = data[cut:]
        if rest:
            yield "lines", rest, source.size


def _separated(source: Source, reading: Reading, block: int) -> Iterator[_Piece]:
    """Blocks that end at a document's end."""
    separator = reading.separator.encode()
    rest = b""
    with _Stream(source) as stream:
        while data := stream.read(block):
            rest += data
            if reading.txt == "separator":
                at = rest.rfind(separator)
                cut = -1 if at < 0 else at + len(separator)
            else:
                # The last run of blank lines may go on in the next block: cut before the last one.
                found = [match.end() for match in _BLANK_LINES.finditer(rest)]
                found = [end for end in found if end < len(rest)]
                cut = found[-1] if found else -1
            if cut > 0:
                yield "documents", rest[:cut], stream.position()
                rest = rest[cut:]
            elif len(rest) > LARGEST_TXT_DOCUMENT:
                raise UserError(
                    f"{source.path} holds more than {human_bytes(LARGEST_TXT_DOCUMENT)} without "
                    "a document's end. Look at --txt-documents and --txt-separator."
                )
        if rest:
            yield "documents", rest, source.size


def _json_items(source: Source, block: int) -> Iterator[_Piece]:
    """Objects of a JSON array, or objects one after the other, as their JSON text."""
    scan = json.JSONDecoder().raw_decode
    space = re.compile(r"[ \t\r\n]*")
    items: list[str] = []
    size = 0
    number = 0
    with _Stream(source) as stream:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        buffer, at, ended, grow = "", 0, False, block

        def fill() -> None:
            nonlocal buffer, at, ended, grow
            data = stream.read(grow)
            ended = not data
            try:
                more = decoder.decode(data, final=ended)
            except UnicodeDecodeError as error:
                raise UserError(f"{source.path} is not UTF-8: {error}.") from error
            buffer, at = buffer[at:] + more, 0

        def skip() -> str:
            nonlocal at
            while True:
                match = space.match(buffer, at)
                at = match.end() if match else at
                if at < len(buffer) or ended:
                    return buffer[at : at + 1]
                fill()

        def broken(error: object) -> UserError:
            return UserError(
                f"{source.path} item {number + 1} is not valid JSON: {error}. What follows cannot "
                "be told apart; mend the file, or turn it into JSON lines to skip single records."
            )

        array = skip() == "["
        at += array
        while True:
            mark = skip()
            if array and mark == "]":
                at += 1
                if skip():
                    raise broken("there is text after the array's end")
                break
            if not mark:
                if array:
                    raise broken("the file ends inside the array")
                break
            try:
                _, end = scan(buffer, at)
                if end == len(buffer) and not ended:
                    raise ValueError("may go on")  # a number cut in two would parse
            except ValueError as error:
                if ended:
                    raise broken(error) from error
                grow = max(block, len(buffer))  # double, so that one long item is not quadratic
                fill()
                continue
            items.append(buffer[at:end])
            size += end - at
            number += 1
            at, grow = end, block
            if array:
                mark = skip()
                if mark == ",":
                    at += 1
                elif mark != "]":
                    raise broken("a comma is missing after it")
            if size >= block:
                yield "items", items, stream.position()
                items, size = [], 0
        if items:
            yield "items", items, source.size


def _parquet(source: Source, reading: Reading, block: int) -> Iterator[_Piece]:
    if source.compression:
        raise UserError(
            f"{source.path}: Parquet is compressed inside; unpack the {source.compression} around "
            "it."
        )
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{source.path} needs a package: pip install pyarrow.") from error
    try:
        # Without buffering the column of a whole row group would be held.
        file = pq.ParquetFile(source.path, buffer_size=1 << 20, pre_buffer=False)
        missing = [key for key in reading.keys if key not in file.schema_arrow.names]
        if missing:
            raise UserError(
                f"{source.path} has no column {missing[0]!r}; it has "
                f"{', '.join(file.schema_arrow.names)}. Choose with --json-keys."
            )
        rows = max(1, file.metadata.num_rows)
        seen = 0
        step = max(1, min(4096, rows * block // max(1, 4 * source.size)))
        for batch in file.iter_batches(batch_size=step, columns=list(reading.keys) or None):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            seen += batch.num_rows
            yield "arrow", sink.getvalue().to_pybytes(), source.size * seen // rows
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise UserError(f"{source.path} cannot be read as Parquet: {error}.") from error


# ------------------------------------------------------------------------------------ reading tasks


def read_task(task: Task, source: Source, reading: Reading) -> Batch:
    """The records of ``task``; the same in whichever process it runs."""
    batch = Batch(values=[[] for _ in reading.keys])
    if task.kind == "range":
        _lines(read_range(source, task.start, task.stop), source, reading, batch)
    elif task.kind == "lines":
        _lines(task.payload, source, reading, batch)
    elif task.kind == "items":
        _json(task.payload, reading, batch)
    elif task.kind == "arrow":
        _arrow(task.payload, reading, batch)
    elif task.kind == "documents":
        _documents(task.payload, reading, batch)
    else:
        for entry in task.payload:
            _text_file(entry, reading, batch)
    return batch


def read_records(task: Task, source: Source) -> tuple[Batch, list[dict[str, Any]]]:
    """The whole records of ``task``, for readers of more than text.

    Returns:
        Counts, bad records and the numbers of the good ones (no ``values``); the good ones.
    """
    batch = Batch()
    found: list[dict[str, Any]] = []

    def take(record: Any, number: int) -> None:
        if type(record) is dict:
            found.append(record)
            batch.numbers.append(number)
        else:
            batch.bad.append((number, f"is a JSON {_kind(record)}, not an object"))

    if task.kind == "arrow":
        import pyarrow as pa

        with pa.ipc.open_stream(task.payload) as reader:
            for table in reader:
                names = table.schema.names
                columns = [_pylist(table.column(name)) for name in names]
                for number, row in enumerate(zip(*columns, strict=True), start=batch.items):
                    take(dict(zip(names, row, strict=True)), number)
                batch.items += table.num_rows
        return batch, found
    if task.kind == "items":
        raws = task.payload
    elif task.kind in ("range", "lines"):
        ranged = task.kind == "range"
        data = read_range(source, task.start, task.stop) if ranged else task.payload
        raws = _split(data)
    else:
        raise ValueError(f"a task of kind {task.kind!r} holds no records")
    for number, raw in enumerate(raws):
        try:
            record = orjson.loads(raw)
        except ValueError:
            record = _hard(raw, number, batch)
            if record is _NOTHING:
                continue
        take(record, number)
    batch.items += len(raws)
    return batch, found


def read_range(source: Source, start: int, stop: int) -> bytes:
    """The lines that begin in bytes ``start:stop`` of a plain file, each in full."""
    with open(source.path, "rb") as handle:
        if start:
            handle.seek(start - 1)
            # A line that began earlier belongs to the range it began in.
            begin = start - 1 + len(handle.readline())
            if begin >= stop:
                return b""
            data = handle.read(stop - begin)
        else:
            data = handle.read(stop)
        if not data.endswith(b"\n"):
            data += handle.readline()
    return data.removeprefix(_BOM) if start == 0 else data


def lines_before(source: Source, offset: int) -> int:
    """Number of lines that begin before the first line of the range that starts at ``offset``."""
    if offset <= 0:
        return 0
    count = 0
    with open(source.path, "rb") as handle:
        left = offset - 1
        while left > 0 and (data := handle.read(min(left, 16 << 20))):
            count += data.count(b"\n")
            left -= len(data)
        # The line that holds byte offset-1 is the last one of the ranges before.
        return count + 1 if handle.read(1) else count


def _split(data: bytes) -> list[bytes]:
    lines = data.removeprefix(_BOM).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


#: What stands for a record that is blank or bad; None is JSON's null.
_NOTHING = object()


def _hard(raw: bytes | str, number: int, batch: Batch) -> Any:
    """A record that orjson refuses, or ``_NOTHING`` after counting it as blank or bad."""
    if not raw.strip():
        batch.blank += 1
        return _NOTHING
    record = _slow_json(raw, number, batch)
    return _NOTHING if record is None else record


def _lines(data: bytes, source: Source, reading: Reading, batch: Batch) -> None:
    lines = _split(data)
    if source.form == "txt":
        _text_lines(lines, reading, batch)
    else:
        _json(lines, reading, batch)


def _json(records: Sequence[bytes | str], reading: Reading, batch: Batch) -> None:
    loads = orjson.loads
    keys = reading.keys
    only = keys[0] if len(keys) == 1 else None
    numbers, first = batch.numbers, batch.values[0]
    for number, raw in enumerate(records, start=batch.items):
        try:
            record = loads(raw)
        except ValueError:
            record = _hard(raw, number, batch)
            if record is _NOTHING:
                continue
        else:
            # orjson lets no lone surrogate through, so its strings need no closer look.
            if only is not None and type(record) is dict:
                value = record.get(only)
                if type(value) is str:
                    first.append(value)
                    numbers.append(number)
                    continue
        reason = _take(record, reading, batch)
        if reason:
            batch.bad.append((number, reason))
        else:
            numbers.append(number)
    batch.items += len(records)


def _slow_json(raw: bytes | str, number: int, batch: Batch) -> Any:
    """A record that orjson refuses: Python's ``json``, which upstream uses, accepts NaN."""
    try:
        record = json.loads(raw if isinstance(raw, str) else raw.decode())
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (byte {error.start} of the line)"
    except RecursionError:
        reason = "is nested too deeply"
    except json.JSONDecodeError as error:
        reason = f"is not valid JSON ({error.msg} at character {error.pos + 1})"
    else:
        if record is not None:
            return record
        reason = "is null, not a JSON object"
    batch.bad.append((number, reason))
    return None


def _take(record: Any, reading: Reading, batch: Batch) -> str:
    """Append the record's texts; returns why it cannot be used, or an empty string."""
    if type(record) is not dict:
        return f"is a JSON {_kind(record)}, not an object with the key {reading.keys[0]!r}"
    values = []
    for key in reading.keys:
        if key not in record:
            there = ", ".join(map(repr, list(record)[:8])) or "none"
            return f"has no key {key!r} (keys: {there}; choose with --json-keys)"
        value = record[key]
        if type(value) is list and all(type(part) is str for part in value):
            pass  # as upstream: the sequences of one document
        elif type(value) is not str:
            return f"has {_kind(value)} under {key!r}, not text"
        try:
            "".join(value).encode()
        except UnicodeEncodeError as error:
            return f"has a lone surrogate \\u{ord(error.object[error.start]):04x} under {key!r}"
        values.append(value)
    for column, value in zip(batch.values, values, strict=True):
        column.append(value)
    return ""


def _kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(value), type(value).__name__)


def _arrow(payload: bytes, reading: Reading, batch: Batch) -> None:
    import pyarrow as pa

    with pa.ipc.open_stream(payload) as reader:
        for table in reader:
            columns = [_pylist(table.column(key)) for key in reading.keys]
            for number, row in enumerate(zip(*columns, strict=True), start=batch.items):
                reason = _take(dict(zip(reading.keys, row, strict=True)), reading, batch)
                if reason:
                    batch.bad.append((number, reason))
                else:
                    batch.numbers.append(number)
            batch.items += table.num_rows


def _pylist(column: Any) -> list[Any]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_utf8(value) for value in column.cast("binary").to_pylist()]
    return [_utf8(value) if isinstance(value, bytes) else value for value in values]


def _utf8(value: bytes | None) -> str | bytes | None:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value  # "has bytes under ..., not text"


def _text(data: bytes, number: int, batch: Batch) -> None:
    """One document of a text file, for every key (of which there is one)."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        batch.bad.append((number, f"is not UTF-8 (byte {error.start})"))
        return
    batch.values[0].append(text)
    batch.numbers.append(number)


def _text_lines(lines: Sequence[bytes], reading: Reading, batch: Batch) -> None:
    for number, line in enumerate(lines, start=batch.items):
        if line.strip():
            _text(line.removesuffix(b"\r"), number, batch)
        else:
            batch.blank += 1
    batch.items += len(lines)


def _documents(data: bytes, reading: Reading, batch: Batch) -> None:
    data = data.removeprefix(_BOM)
    if reading.txt == "separator":
        pieces = data.split(reading.separator.encode())
    else:
        pieces = _BLANK_LINES.split(data)
    for piece in pieces:
        document = piece.strip(b"\r\n")
        if document.strip():
            _text(document, batch.items, batch)
            batch.items += 1


def _text_file(source: Source, reading: Reading, batch: Batch) -> None:
    with _Stream(source) as stream:
        data = stream.read(LARGEST_TXT_DOCUMENT + 1)
    if len(data) > LARGEST_TXT_DOCUMENT:
        raise UserError(
            f"{source.path} is larger than {human_bytes(LARGEST_TXT_DOCUMENT)}, too much for one "
            "document. Say where documents end: --txt-documents line or blank-line, or "
            "--txt-separator TEXT."
        )
    _text(data.removeprefix(_BOM), batch.items, batch)
    batch.items += 1


# ---------------------------------------------------------------------------------------- sampling


def sample(sources: Sequence[Source], reading: Reading, budget: int) -> list[str]:
    """Texts from all over the corpus, about ``budget`` bytes; the same ones every time.

    Plain line files are entered at spread-out places; of others the beginning is taken. Records
    that cannot be used are left out here: they are reported when their turn comes.
    """
    texts: list[str] = []
    picks = sources if len(sources) <= 16 else [sources[i * len(sources) // 16] for i in range(16)]
    share = max(1 << 14, budget // max(1, len(picks)))
    for number, source in enumerate(picks):
        spots: Iterator[Task] | list[Task]
        if source.by_range(reading):
            places = 8 if source.size > share else 1
            size = share // places + 1
            spots = [
                Task(number, "range", at, min(at + size, source.size))
                for at in (source.size * i // places for i in range(places))
            ]
        else:
            spots = tasks([source], reading, block=1 << 16)
        taken = 0
        for spot in spots:
            batch = read_task(spot, source, reading)
            for column in batch.values:
                for value in column:
                    parts = value if isinstance(value, list) else [value]
                    for part in parts:
                        # The beginning of a long document is as good a witness as the whole.
                        texts.append(part[: 1 << 14])
                        taken += len(texts[-1])
            if taken >= share:
                break
    return texts
