"""Pretraining data: documents in, an idxmap (``PREFIX_text_document.bin/.idx``) out.

The same bytes as Megatron-LM's ``tools/preprocess_data.py`` for every document that both accept,
in the order of the input. Worker processes read, tokenize and write their own part of the ``.bin``;
this process hands out tasks and places in the file, in order, and keeps the index.

Nothing here imports torch, megatron or transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_patch.data import idxmap, sources, tokenizers
from megatron_patch.data.sources import NOUNS, Batch, Reading, Source, Task
from megatron_patch.data.tokenizers import Proof, TextTokenizer, TokenizerRequest
from megatron_patch.util import Once, UserError, after_closed_pipe, human_bytes, human_count

_SAMPLE_SMALL = 400_000
_SAMPLE_LARGE = 2_000_000
_AUDIT_CHARACTERS = 2_000
_BAD_SHOWN = 10
_IN_FLIGHT = 2  # tasks a worker may hold: one that waits for its place, one being encoded


@dataclass(frozen=True)
class Encoding:
    """What workers need to turn a task into bytes.

    Attributes:
        tokenizer: With the engine to use.
        reading: How records are read.
        files: All input files; tasks point into it.
        dtype: Type of the ids on disk.
        eod: Id put after each document, or None.
        targets: The file of each key that ids are written to.
        audit: Compare a snippet of each task with the reference engine.
    """

    tokenizer: TextTokenizer
    reading: Reading
    files: tuple[Source, ...]
    dtype: np.dtype[Any]
    eod: int | None
    targets: tuple[str, ...]
    audit: bool

    def encode(self, task: Task) -> tuple[Result, list[memoryview]]:
        """See :func:`encode_task`."""
        return encode_task(task, self)


class TaskEncoding(Protocol):
    """What a :class:`Pool` needs: :class:`Encoding` for text, others for other records."""

    @property
    def files(self) -> tuple[Source, ...]:
        """All input files; tasks point into it."""
        ...

    @property
    def reading(self) -> Reading:
        """How records are read."""
        ...

    @property
    def targets(self) -> tuple[str, ...]:
        """The file of each stream that bytes are written to."""
        ...

    def encode(self, task: Task) -> tuple[Result, list[memoryview]]:
        """What is to be told about a task, and the bytes of each stream; raises TaskFailure."""
        ...


@dataclass
class Result:
    """What a worker tells about a finished task; the ids stay with it until it may write.

    Attributes:
        items: Lines, items or rows seen.
        blank: Blank lines among them.
        bad: Number within the task and reason of each unusable record.
        rerouted: Texts that went to the reference engine for a character in them.
        empty: Per key, documents without a token.
        sizes: Per key, bytes to write.
        lengths: Per key, tokens of each sequence.
        per_document: Per key, sequences of each document.
        noted: Further counts, by name.
    """

    items: int
    blank: int
    bad: list[tuple[int, str]]
    rerouted: int = 0
    empty: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    lengths: list[npt.NDArray[np.int32]] = field(default_factory=list)
    per_document: list[npt.NDArray[np.int32]] = field(default_factory=list)
    noted: Counter[str] = field(default_factory=Counter)


class TaskFailure(Exception):
    """A worker cannot go on: the record's number within the task (or None), and why."""

    def __init__(self, number: int | None, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


# ------------------------------------------------------------------------------------- one worker


def encode_task(task: Task, encoding: Encoding) -> tuple[Result, list[memoryview]]:
    """Read and tokenize a task.

    Returns:
        What is to be told, and per key the bytes for the ``.bin``.

    Raises:
        TaskFailure: The tokenizer raised, or gigatoken disagreed with the reference.
    """
    batch = sources.read_task(task, encoding.files[task.source], encoding.reading)
    result = Result(batch.items, batch.blank, batch.bad)
    buffers = []
    for values in batch.values:
        ids, lengths, per_document = encode_values(values, batch, encoding)
        result.lengths.append(lengths)
        result.per_document.append(per_document)
        result.empty.append(int((per_document == 0).sum()))
        result.sizes.append(ids.nbytes)
        buffers.append(memoryview(ids).cast("B") if ids.size else memoryview(b""))
    engine = encoding.tokenizer.engine
    if isinstance(engine, tokenizers.GuardedEngine):
        result.rerouted, engine.rerouted = engine.rerouted, 0
    if encoding.audit:
        _audit(task, batch, encoding.tokenizer)
    return result, buffers


def encode_values(
    values: Sequence[str | list[str]], batch: Batch, encoding: Encoding
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Ids of all documents end to end, tokens per sequence, sequences per document.

    As upstream does it: a sequence without tokens is left out; the EOD goes after the last sequence
    of a document and counts in its length; a document without any sequence stays, without EOD.
    """
    tokenizer = encoding.tokenizer
    texts: list[str] = []
    for value in values:
        if type(value) is str:
            texts.append(value)
        else:
            texts.extend(value)
    arrays = iter(_encode(texts, values, batch, tokenizer))
    prefix = np.array(tokenizer.prefix, dtype=np.uint32)
    suffix = np.array(tokenizer.suffix, dtype=np.uint32)
    around = prefix.size + suffix.size
    eod = None if encoding.eod is None else np.array([encoding.eod], dtype=np.uint32)
    pieces: list[npt.NDArray[Any]] = []
    lengths: list[int] = []
    per_document: list[int] = []
    for value in values:
        before = len(lengths)
        for _ in range(1 if type(value) is str else len(value)):
            ids = next(arrays)
            if around:
                pieces += (prefix, ids, suffix)
                lengths.append(ids.size + around)
            elif ids.size:
                pieces.append(ids)
                lengths.append(ids.size)
        count = len(lengths) - before
        if count and eod is not None:
            pieces.append(eod)
            lengths[-1] += 1
        per_document.append(count)
    flat = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
    if flat.size and int(flat.max()) > tokenizer.largest_id:
        raise TaskFailure(
            None, f"id {flat.max()} is beyond the vocabulary's {tokenizer.largest_id}"
        )
    # Ids stay below 2**31, so the 32-bit types share their bytes.
    ids = flat.view(np.int32) if encoding.dtype == np.int32 else flat.astype(encoding.dtype)
    return ids, np.array(lengths, np.int32), np.array(per_document, np.int32)


def _encode(
    texts: list[str], values: Sequence[str | list[str]], batch: Batch, tokenizer: TextTokenizer
) -> list[npt.NDArray[Any]]:
    try:
        return tokenizer.engine.encode_many(texts)
    except BaseException as error:  # Rust panics are no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        for value, number in zip(values, batch.numbers, strict=True):
            try:
                tokenizer.engine.encode_many([value] if isinstance(value, str) else value)
            except BaseException as single:
                raise TaskFailure(
                    number, f"{tokenizer.engine.name} cannot encode it: {_say(single)}"
                ) from single
        raise TaskFailure(None, f"{tokenizer.engine.name} failed: {_say(error)}") from error


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _audit(task: Task, batch: Batch, tokenizer: TextTokenizer) -> None:
    """Compare one snippet of the task with the reference: the proof goes on while data flows."""
    values = batch.values[0]
    if not values:
        return
    rng = random.Random(f"{task.source}-{task.start}-{batch.items}")
    pick = rng.randrange(len(values))
    value = values[pick]
    text = value if isinstance(value, str) else "".join(value)
    start = rng.randrange(max(1, len(text) - _AUDIT_CHARACTERS))
    snippet = text[start : start + _AUDIT_CHARACTERS]
    if tokenizers.first_difference(tokenizer.engine, tokenizer.reference, [snippet]) is not None:
        raise TaskFailure(
            batch.numbers[pick],
            f"{tokenizer.engine.name} gives other ids than {tokenizer.reference.name} for a part "
            "of it. Please report that, and run again with --engine reference",
        )


def _worker(connection: Connection, others: list[Connection], encoding: TaskEncoding) -> None:
    """Serve tasks until the other end closes."""
    for other in others:
        other.close()  # or this process would keep its siblings' pipes open after the parent died
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    held: dict[int, list[memoryview]] = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, number, content = connection.recv()
            try:
                if kind == "task":
                    result, held[number] = encoding.encode(content)
                    connection.send(("done", number, result))
                else:
                    buffers = held.pop(number)
                    for target, data, offset in zip(
                        encoding.targets, buffers, content, strict=True
                    ):
                        idxmap.write_at(target, data, offset)
                    connection.send(("written", number, None))
            except TaskFailure as failure:
                connection.send(("failed", number, (failure.number, failure.reason)))
            except (EOFError, BrokenPipeError):
                raise
            except BaseException as error:
                connection.send(("failed", number, (None, _say(error))))


# ------------------------------------------------------------------------------------ all workers


@dataclass
class _Member:
    process: Any
    connection: Connection
    tasks: set[int] = field(default_factory=set)


@dataclass
class Totals:
    """Counts of a run; printed at its end, so that nothing is dropped in silence."""

    items: int = 0
    blank: int = 0
    bad: int = 0
    empty: int = 0
    rerouted: int = 0
    weight: int = 0
    shown: list[str] = field(default_factory=list)
    noted: Counter[str] = field(default_factory=Counter)


class Pool:
    """Worker processes that encode tasks; results are placed in task order.

    Args:
        encoding: What workers need.
        writers: One per key.
        workers: Number of processes.
        skip_bad: Count unusable records instead of ending the run at the first.
        progress: Called after each task with the totals so far.
    """

    def __init__(
        self,
        encoding: TaskEncoding,
        writers: Sequence[idxmap.Writer],
        *,
        workers: int,
        skip_bad: bool,
        progress: Callable[[Totals], None],
    ) -> None:
        self.encoding = encoding
        self.writers = writers
        self.skip_bad = skip_bad
        self.progress = progress
        self.totals = Totals()
        self._items: dict[int, int] = {}  # items of each source in the tasks placed so far
        self._members: list[_Member] = []
        # Forked, so that the loaded tokenizer is shared and nothing is imported again.
        context = multiprocessing.get_context("fork")
        for _ in range(workers):
            mine, theirs = context.Pipe()
            others = [member.connection for member in self._members] + [mine]
            process = context.Process(
                target=_worker, args=(theirs, others, encoding), daemon=True, name="preprocess"
            )
            process.start()
            theirs.close()
            self._members.append(_Member(process, mine))

    def run(self, tasks: Iterator[Task]) -> Totals:
        """Encode and write all tasks.

        Raises:
            UserError: An unusable record, a tokenizer that raised, a full disk, a killed worker.
        """
        issued: dict[int, Task] = {}
        ready: dict[int, tuple[_Member, Result | tuple[int | None, str]]] = {}
        following = 0  # next task to hand out
        place = 0  # next task to place in the file
        exhausted = stopping = False
        while True:
            for depth in range(_IN_FLIGHT):
                for member in self._members:
                    if exhausted or stopping or len(member.tasks) != depth:
                        continue
                    task = next(tasks, None)
                    if task is None:
                        exhausted = True
                        break
                    issued[following] = task
                    member.tasks.add(following)
                    self._send(member, ("task", following, task), issued)
                    following += 1
            busy = [member for member in self._members if member.tasks]
            if not busy:
                return self.totals
            for connection in wait([member.connection for member in busy]):
                member = next(m for m in busy if m.connection is connection)
                try:
                    kind, number, content = member.connection.recv()
                except (EOFError, OSError):
                    raise self._died(member, issued) from None
                if kind == "written":
                    member.tasks.discard(number)
                    continue
                if number not in issued:  # its place was given already: writing failed
                    raise UserError(f"writing {self.writers[0].prefix}.bin failed: {content[1]}.")
                ready[number] = (member, content)
                stopping = stopping or kind == "failed"
            while place in ready:
                member, content = ready.pop(place)
                task = issued.pop(place)
                if isinstance(content, tuple):
                    raise self._failure(task, *content)
                offsets = self._place(task, content)
                self._send(member, ("write", place, offsets), issued)
                place += 1

    def _send(self, member: _Member, message: Any, issued: dict[int, Task]) -> None:
        try:
            member.connection.send(message)
        except OSError:
            raise self._died(member, issued) from None

    def _place(self, task: Task, result: Result) -> list[int]:
        totals = self.totals
        for number, reason in result.bad:
            totals.bad += 1
            if not self.skip_bad:
                raise UserError(
                    f"{self._where(task, number)} {reason}. Mend it, or pass --on-bad-line skip to "
                    "leave such records out and count them."
                )
            if len(totals.shown) < _BAD_SHOWN:
                totals.shown.append(f"{self._where(task, number)} {reason}")
        totals.items += result.items
        totals.blank += result.blank
        totals.empty += sum(result.empty)
        totals.rerouted += result.rerouted
        totals.weight += task.weight
        totals.noted.update(result.noted)
        self._items[task.source] = self._items.get(task.source, 0) + result.items
        offsets = []
        for writer, size, lengths, per_document in zip(
            self.writers, result.sizes, result.lengths, result.per_document, strict=True
        ):
            offsets.append(writer.reserve(size))
            writer.add(lengths, per_document)
        self.progress(totals)
        return offsets

    def _where(self, task: Task, number: int) -> str:
        """File and line (item, row, document) of a record, counted from 1."""
        if task.kind == "files":
            return str(task.payload[number].path)
        source = self.encoding.files[task.source]
        if task.kind == "range":
            before = sources.lines_before(source, task.start)
        else:
            before = self._items.get(task.source, 0)
        noun = NOUNS[source.form]
        if source.form == "txt" and self.encoding.reading.txt == "line":
            noun = "line"
        return f"{source.path} {noun} {before + number + 1}"

    def _failure(self, task: Task, number: int | None, reason: str) -> UserError:
        where = self._span(task) if number is None else self._where(task, number)
        return UserError(f"{where}: {reason}.")

    def _span(self, task: Task) -> str:
        source = self.encoding.files[task.source]
        if task.kind == "range":
            return f"{source.path}, bytes {task.start} to {task.stop}"
        noun = NOUNS[source.form]
        return f"{source.path}, near {noun} {self._items.get(task.source, 0) + 1}"

    def _died(self, member: _Member, issued: dict[int, Task]) -> UserError:
        member.process.join(5)
        code = member.process.exitcode
        why = f"was killed by signal {-code}" if code and code < 0 else f"ended with status {code}"
        at = min((n for n in member.tasks if n in issued), default=None)
        where = f" at {self._span(issued[at])}" if at is not None else ""
        hint = " Out of memory is the usual reason: use fewer --workers." if code == -9 else ""
        return UserError(f"a worker process {why}{where}.{hint}")

    def close(self) -> None:
        """End the worker processes; those that are still busy are killed."""
        for member in self._members:
            busy = bool(member.tasks)
            member.connection.close()
            if busy:
                member.process.kill()
        for member in self._members:
            member.process.join()


# --------------------------------------------------------------------------------------- progress


class Progress:
    """A line on stderr with rate and time left; on a terminal it is rewritten in place.

    Args:
        total: Bytes to read.
        writers: To count documents and tokens.
        every: Print a line whenever so many more documents are done; None prints by time.
    """

    def __init__(
        self, total: int, writers: Sequence[idxmap.Writer], *, every: int | None = None
    ) -> None:
        self.total = total
        self.writers = writers
        self.every = every
        self.start = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self._next_time = self.start + (0.5 if self.terminal else 10.0)
        self._next_count = every or 0
        self._shown = False

    def __call__(self, totals: Totals) -> None:
        """Print if it is time."""
        now = time.monotonic()
        documents = self.writers[0].documents
        if self.every is not None:
            if documents < self._next_count:
                return
            self._next_count = documents - documents % self.every + self.every
        elif now < self._next_time:
            return
        self._next_time = now + (0.5 if self.terminal else 30.0)
        rate = totals.weight / max(1e-9, now - self.start)
        left = max(0, self.total - totals.weight) / max(1.0, rate)
        share = 100 * totals.weight / max(1, self.total)
        text = (
            f"{share:5.1f} %  {human_count(documents)} documents, "
            f"{human_count(sum(w.tokens for w in self.writers))} tokens, {rate / 1e6:.1f} MB/s, "
            f"{_clock(left)} left"
        )
        if self.terminal and self.every is None:
            sys.stderr.write(f"\r\x1b[K{text}")
            self._shown = True
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def finish(self) -> float:
        """End the line; returns the seconds since the start."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        return time.monotonic() - self.start


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


# ---------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class Job:
    """A run of the preprocessor, as resolved from the command line.

    Attributes:
        inputs: Files, folders, patterns; for a merge, idxmap prefixes.
        output: Prefix, or a folder.
        request: The tokenizer.
        reading: How records are read.
        append_eod: Put the tokenizer's EOD after each document.
        workers: Processes; None takes one per usable core.
        engine: ``auto``, ``gigatoken``, ``pieces`` or ``reference``.
        skip_bad: Count unusable records instead of ending the run.
        overwrite: Replace existing files.
        padded_vocab_size: Rows of the model's embedding, if larger than the vocabulary.
        shard: Index of this shard.
        shards: Number of shards.
        log_interval: Documents between progress lines.
    """

    inputs: tuple[str, ...]
    output: str
    request: TokenizerRequest
    reading: Reading = field(default_factory=Reading)
    append_eod: bool = False
    workers: int | None = None
    engine: str = "auto"
    skip_bad: bool = False
    overwrite: bool = False
    padded_vocab_size: int | None = None
    shard: int = 0
    shards: int = 1
    log_interval: int | None = None


def output_prefix(output: str, inputs: Sequence[str]) -> str:
    """The prefix P of ``P_text_document``: ``output`` itself, or a name in it if it is a folder.

    A folder is what exists as one or ends in ``/``; the name is then the first input's, without
    suffixes.
    """
    path = os.path.expanduser(output)
    if not (path.endswith("/") or os.path.isdir(path)):
        return path
    first = inputs[0].rstrip("/") if inputs else "data"
    name = os.path.basename(os.path.abspath(first)) if not glob.has_magic(first) else "data"
    name = name.split(".")[0] if not os.path.isdir(first) else name
    return os.path.join(path, name or "data")


def shard_prefix(prefix: str, shard: int, shards: int) -> str:
    """Prefix of one shard's files; the plain prefix where there is one shard."""
    return prefix if shards == 1 else f"{prefix}_shard-{shard:05d}-of-{shards:05d}"


def _pair(prefix: str, key: str) -> str:
    return f"{prefix}_{key}_document"


def preprocess(job: Job) -> list[idxmap.Index]:
    """Run the job; prints its course and its result.

    Returns:
        The index of each key's idxmap.

    Raises:
        UserError: Anything the user can mend; nothing is left behind then.
    """
    began = time.monotonic()
    prefix = shard_prefix(output_prefix(job.output, job.inputs), job.shard, job.shards)
    keys = job.reading.keys
    for key in keys:
        idxmap.check_free(_pair(prefix, key), overwrite=job.overwrite)
    files, skipped = sources.expand(job.inputs)
    total = sum(source.size for source in files)
    if skipped:
        print(
            f"left out {len(skipped)} files with an unknown suffix, for one {skipped[0]}",
            file=sys.stderr,
        )
    if any(source.form == "txt" for source in files) and len(keys) > 1:
        raise UserError(
            f"--json-keys {' '.join(keys)}: text files have one text. Run them on their own."
        )
    # No thread may live when workers are forked; inside them one thread each is right anyway.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizers.load(job.request)
    if job.append_eod and tokenizer.eod is None:
        raise UserError(
            f"--append-eod: {tokenizer.source} names no EOS token, so there is nothing to append. "
            f"Name one with --eod-token, one of: {', '.join(tokenizer.special_texts[:12]) or '-'}."
        )
    budget = _SAMPLE_LARGE if total > 500_000_000 else _SAMPLE_SMALL
    tokenizer, proof = choose_engine(
        tokenizer, job.engine, lambda: sources.sample(files, job.reading, budget)
    )
    dtype = idxmap.dtype_for(
        max(tokenizer.vocab_size, job.padded_vocab_size or 0), largest_id=tokenizer.largest_id
    )
    workers = job.workers or len(os.sched_getaffinity(0))
    share = total // job.shards
    workers = max(1, min(workers, -(-share // sources.BLOCK) if share else 1))
    _announce(job, tokenizer, proof, files, total, workers)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(idxmap.Writer(_pair(prefix, key), dtype, overwrite=job.overwrite))
            for key in keys
        ]
        encoding = Encoding(
            tokenizer=tokenizer,
            reading=job.reading,
            files=tuple(files),
            dtype=dtype,
            eod=tokenizer.eod.id if job.append_eod and tokenizer.eod else None,
            targets=tuple(writer.partial_bin for writer in writers),
            audit=tokenizer.engine is not tokenizer.reference,
        )
        progress = Progress(max(1, share), writers, every=job.log_interval)
        pool = Pool(encoding, writers, workers=workers, skip_bad=job.skip_bad, progress=progress)
        stack.callback(pool.close)
        totals = pool.run(sources.tasks(files, job.reading, shard=job.shard, shards=job.shards))
        progress.finish()
        report_losses(totals)
        if not any(writer.tokens for writer in writers) and job.shards == 1:
            raise UserError(
                f"no token in {totals.items} records of {len(files)} files; nothing was written."
            )
        indexes = [writer.commit() for writer in writers]
    _report(job, tokenizer, indexes, totals, time.monotonic() - began, share)
    return indexes


def choose_engine(
    tokenizer: TextTokenizer, engine: str, sample: Callable[[], list[str]]
) -> tuple[TextTokenizer, Proof | None]:
    """Apply ``--engine``: gigatoken where its ids are equal, or as demanded.

    Raises:
        UserError: gigatoken was demanded and does not give the same ids.
    """
    if engine == "reference":
        return tokenizer, None
    texts = sample()
    if engine == "pieces":
        return tokenizers.remember_pieces(tokenizer, texts), None
    chosen, proof = tokenizers.accelerate(tokenizer, texts)
    if engine == "gigatoken" and not proof.equal:
        raise UserError(f"--engine gigatoken: {proof.reason}. Use --engine auto.")
    return (chosen if proof.equal else tokenizers.remember_pieces(tokenizer, texts)), proof


def _announce(
    job: Job,
    tokenizer: TextTokenizer,
    proof: Proof | None,
    files: Sequence[Source],
    total: int,
    workers: int,
) -> None:
    part = f", shard {job.shard} of {job.shards}" if job.shards > 1 else ""
    print(f"input      {len(files)} files, {human_bytes(total)}{part}, {workers} workers")
    print(f"tokenizer  {tokenizer.source} ({tokenizer.kind}, {tokenizer.vocab_size} ids)")
    if proof is None:
        print(f"engine     {tokenizer.engine.name}, as asked for")
    elif proof.equal:
        print(
            f"engine     gigatoken: same ids as {tokenizer.reference.name} on {proof.texts} texts "
            f"({human_count(proof.characters)} characters of this corpus and of hard cases)"
        )
    else:
        print(f"engine     {tokenizer.engine.name}; not gigatoken: {proof.reason}")
    sys.stdout.flush()


def report_losses(totals: Totals) -> None:
    """Print how many records were left out, and the first of them."""
    if totals.bad:
        print(
            f"warning: {totals.bad} of {totals.items} records were left out (--on-bad-line skip):",
            file=sys.stderr,
        )
        for line in totals.shown:
            print(f"  {line}", file=sys.stderr)
        if totals.bad > len(totals.shown):
            print(f"  and {totals.bad - len(totals.shown)} more", file=sys.stderr)


def _report(
    job: Job,
    tokenizer: TextTokenizer,
    indexes: Sequence[idxmap.Index],
    totals: Totals,
    seconds: float,
    size: int,
) -> None:
    for index in indexes:
        tokens = index.token_count()
        print(
            f"output     {index.bin_path} ({human_bytes(os.path.getsize(index.bin_path))}, "
            f"{index.dtype}) and .idx"
        )
        print(
            f"tokens     {tokens} ({human_count(tokens)}) in {index.documents} documents, "
            f"{index.sequences} sequences"
        )
    notes = []
    if totals.blank:
        notes.append(f"{totals.blank} blank lines passed over")
    if totals.empty:
        notes.append(f"{totals.empty} documents without a token kept (no sequence, no EOD)")
    if totals.rerouted:
        notes.append(
            f"{totals.rerouted} texts with a character that gigatoken treats otherwise encoded by "
            f"{tokenizer.reference.name}"
        )
    if totals.bad:
        notes.append(f"{totals.bad} bad records left out")
    if notes:
        print(f"noted      {', '.join(notes)}")
    if tokenizer.eod is None:
        print("EOD        the tokenizer has none")
    else:
        what = "after each document" if job.append_eod else "NOT appended"
        print(f"EOD        {tokenizer.eod.id} {tokenizer.eod.text!r}, {what}")
    if tokenizer.bos is None:
        print("BOS        the tokenizer has none")
    else:
        first = tokenizer.prefix and tokenizer.bos.id in tokenizer.prefix
        what = "before each document, by the tokenizer" if first else "not added"
        print(f"BOS        {tokenizer.bos.id} {tokenizer.bos.text!r}, {what}")
    print(f"time       {seconds:.1f} s, {size / max(seconds, 1e-9) / 1e6:.1f} MB/s of input")
    if not job.append_eod:
        print(
            "\nWARNING: no EOD was appended. Documents run into each other: the model trains "
            "across their borders\nand never learns to stop, and --reset-position-ids, "
            "--reset-attention-mask and --eod-mask-loss\nfind nothing. For pretraining run again "
            "with --append-eod.",
            file=sys.stderr,
        )
    if job.shards > 1:
        print(
            f"\nshard {job.shard} of {job.shards} is done. When all are, put them together with\n"
            f"  preprocess_data.py --merge --num-shards {job.shards} --output-path "
            f"{output_prefix(job.output, job.inputs)}"
            + (
                f" --json-keys {' '.join(job.reading.keys)}"
                if job.reading.keys != ("text",)
                else ""
            )
        )
        return
    print("\npaste into the training command:")
    for index in indexes:
        print(f"  --data-path {index.prefix}")


def merge(job: Job) -> list[idxmap.Index]:
    """Put shards, or any idxmaps, together into one.

    Raises:
        UserError: A shard is missing, or the parts do not fit together.
    """
    if not job.inputs and os.path.isdir(os.path.expanduser(job.output)):
        raise UserError(
            f"--output-path {job.output} is a folder; give the shards' prefix in it, without "
            "_shard-..."
        )
    prefix = output_prefix(job.output, job.inputs)
    indexes = []
    for key in job.reading.keys:
        if job.shards > 1:
            parts = [
                _pair(shard_prefix(prefix, shard, job.shards), key) for shard in range(job.shards)
            ]
            missing = [part for part in parts if not os.path.exists(part + ".idx")]
            if missing:
                raise UserError(
                    f"{len(missing)} of {job.shards} shards are not there, the first is "
                    f"{missing[0]}.idx. Run --shard-index for each of them first."
                )
        else:
            parts = _merge_inputs(job.inputs)
        index = idxmap.merge(parts, _pair(prefix, key), overwrite=job.overwrite)
        tokens = index.token_count()
        print(f"merged     {len(parts)} parts into {index.bin_path} and .idx")
        print(f"tokens     {tokens} ({human_count(tokens)}) in {index.documents} documents")
        print(f"\npaste into the training command:\n  --data-path {index.prefix}")
        indexes.append(index)
        if job.inputs:
            break
    return indexes


def _merge_inputs(inputs: Sequence[str]) -> list[str]:
    parts: list[str] = []
    for text in inputs:
        path = os.path.expanduser(text)
        if os.path.isdir(path):
            found = sorted(idxmap.prefix_of(str(p)) for p in Path(path).glob("*.idx"))
        elif glob.has_magic(path):
            found = sorted({idxmap.prefix_of(p) for p in glob.glob(path)})
        else:
            found = [idxmap.prefix_of(path)]
        if not found:
            raise UserError(f"--input-path {text} holds no idxmap to merge.")
        parts += found
    return parts


# ----------------------------------------------------------------------------------- command line


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The command line; ``_`` equals ``-`` in every flag."""
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description="Turn text into the .bin/.idx pair that Megatron-Core trains on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog=(
            "example:\n  preprocess_data.py --input-path corpus/ --output-path data/corpus \\\n"
            "    --hf-model /models/Qwen3-8B --append-eod\n\n"
            "many nodes: the same command with --num-shards N --shard-index I on each, then once\n"
            "  preprocess_data.py --merge --num-shards N --output-path data/corpus"
        ),
    )
    add = parser.add_argument
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input-path", "--input", "--input-dir", "--data", nargs="+", default=[], action=Once,
        metavar="X", dest="input_path",
        help="files, folders or glob patterns: .jsonl .json .txt .parquet, also .gz and .zst",
    )  # fmt: skip
    group.add_argument(
        "--output-path", "--output-prefix", "--output", action=Once, metavar="P",
        dest="output_path",
        help="prefix (writes P_text_document.bin/.idx), or a folder that gets the input's name",
    )  # fmt: skip
    group.add_argument(
        "--json-keys", "--jsonl-keys", "--json-key", nargs="+", default=["text"], action=Once,
        metavar="KEY", dest="json_keys",
        help="JSON keys (Parquet columns) that hold text; one pair of files each (default: text)",
    )  # fmt: skip
    group.add_argument(
        "--txt-documents", choices=("file", "line", "blank-line"), default=None,
        help="what a document is in .txt files: the whole file (default), a line, or what stands "
        "between blank lines",
    )  # fmt: skip
    group.add_argument(
        "--txt-separator", metavar="TEXT",
        help="what stands between documents in .txt files, for example '<|endoftext|>'",
    )  # fmt: skip
    group.add_argument(
        "--on-bad-line", choices=("error", "skip"), default="error",
        help="a record that is no JSON, lacks the key, holds no text or no valid UTF-8: end the "
        "run (default), or leave it out and count it",
    )  # fmt: skip
    group.add_argument("--overwrite", action="store_true", help="replace existing output files")
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type", "--patch-tokenizer-type", action=Once, metavar="T",
        dest="tokenizer_type", default="HuggingFaceTokenizer",
        help="HuggingFaceTokenizer (default), LlamaTokenizer and the other SentencePiece types, "
        "TikTokenizer, GPT2BPETokenizer, or a Pai name such as Qwen3Tokenizer",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer-model", "--hf-model", "--model", "--load", "--tokenizer-name-or-path",
        action=Once, metavar="PATH", dest="tokenizer_model",
        help="the model's directory, or its tokenizer.json, tokenizer.model or tiktoken file",
    )  # fmt: skip
    group.add_argument(
        "--vocab-file", metavar="F", help="GPT2BPETokenizer's vocab.json, or a vocabulary file"
    )
    group.add_argument("--merge-file", metavar="F", help="GPT2BPETokenizer's merges.txt")
    group.add_argument("--append-eod", action="store_true", help="end each document with the EOD")
    group.add_argument(
        "--eod-token", metavar="TEXT", help="the EOD, if it is not the tokenizer's EOS"
    )
    special = group.add_mutually_exclusive_group()
    special.add_argument(
        "--no-special-tokens", "--tokenizer-hf-no-include-special-tokens",
        dest="special_tokens", action="store_false", default=None,
        help="leave out the BOS/EOS that the tokenizer itself puts around each document",
    )  # fmt: skip
    special.add_argument(
        "--special-tokens-around", dest="special_tokens", action="store_true", default=None,
        help="keep them for a Pai type name, which leaves them out",
    )  # fmt: skip
    group.add_argument(
        "--padded-vocab-size", type=_positive, metavar="N",
        help="rows of the model's embedding: decides two or four bytes a token if larger",
    )  # fmt: skip
    group.add_argument(
        "--extra-vocab-size", type=int, default=0, metavar="N",
        help="Pai: ids beyond the tokenizer's, counted like --padded-vocab-size",
    )  # fmt: skip
    group.add_argument(
        "--vocab-size", type=_positive, metavar="N",
        help="TikTokenizer with upstream's JSON vocabulary: its size, specials included",
    )  # fmt: skip
    group.add_argument(
        "--tiktoken-pattern", metavar="NAME",
        help=f"how TikTokenizer splits text: {', '.join(tokenizers.PATTERNS)}, or a regex",
    )  # fmt: skip
    group.add_argument(
        "--tiktoken-num-special-tokens", type=int, default=1000, metavar="N",
        help="special ids before the ranks in upstream's JSON vocabulary (default: 1000)",
    )  # fmt: skip
    group.add_argument(
        "--tiktoken-special-tokens", "--special-tokens", nargs="+", default=[], metavar="TOKEN",
        dest="tiktoken_special_tokens", help="their names",
    )  # fmt: skip
    group = parser.add_argument_group("running")
    group.add_argument(
        "--workers", type=_positive, metavar="N", help="processes (default: one per usable core)"
    )
    group.add_argument(
        "--engine", choices=("auto", "gigatoken", "pieces", "reference"), default="auto",
        help="auto: gigatoken where its ids are proven equal on this corpus' sample and on hard "
        "cases, else the library that defines them, remembering pieces of text where that is "
        "proven in the same way (pieces), else that library alone (reference)",
    )  # fmt: skip
    group.add_argument("--num-shards", type=_positive, default=1, metavar="N", help="many nodes")
    group.add_argument("--shard-index", type=int, default=None, metavar="I", help="0 to N-1")
    group.add_argument(
        "--merge", action="store_true",
        help="put --num-shards shards of --output-path together, or the idxmaps of --input-path",
    )  # fmt: skip
    group.add_argument(
        "--log-interval", type=_positive, metavar="N",
        help="print progress every N documents (default: by time)",
    )  # fmt: skip
    for flag in ("--partitions", "--seq-length", "--dataset-impl"):
        add(flag, help=argparse.SUPPRESS)
    for flag in ("--keep-sequential-samples",):
        add(flag, action="store_true", help=argparse.SUPPRESS)
    return parser


#: Flags of the older tools that change nothing here, and why.
WITHOUT_EFFECT = {
    "partitions": "the input is cut at byte ranges, without partition files",
    "seq_length": "documents are stored whole; --seq-length belongs to training",
    "dataset_impl": "the format is always mmap",
    "keep_sequential_samples": "documents always keep their order",
}


def parse(argv: Sequence[str]) -> tuple[Job, bool]:
    """The job, and whether it is a merge.

    Raises:
        UserError: Flags that contradict each other or miss something.
    """
    dashed = [
        arg.split("=")[0].replace("_", "-") + arg[len(arg.split("=")[0]) :]
        if arg.startswith("--")
        else arg
        for arg in argv
    ]
    args = build_parser().parse_args(dashed)
    for name, reason in WITHOUT_EFFECT.items():
        if getattr(args, name):
            print(f"note: --{name.replace('_', '-')} has no effect: {reason}", file=sys.stderr)
    if not args.output_path:
        raise UserError("--output-path is needed: a prefix, or a folder.")
    if args.txt_separator is not None and args.txt_documents is not None:
        raise UserError("--txt-separator and --txt-documents exclude each other; give one.")
    if args.txt_separator == "":
        raise UserError("--txt-separator is empty; give the text between documents.")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise UserError(f"--json-keys {' '.join(args.json_keys)} names a key twice.")
    if args.merge:
        if bool(args.input_path) == (args.num_shards > 1):
            raise UserError(
                "--merge takes either --num-shards N (the shards of --output-path) or --input-path "
                "(idxmap prefixes)."
            )
    else:
        if not args.input_path:
            raise UserError("--input-path is needed: files, folders or glob patterns.")
        if (args.shard_index is None) != (args.num_shards == 1):
            raise UserError("--num-shards N and --shard-index I go together, I from 0 to N-1.")
        if args.shard_index is not None and not 0 <= args.shard_index < args.num_shards:
            raise UserError(
                f"--shard-index {args.shard_index} is outside 0 to {args.num_shards - 1}."
            )
    reading = Reading(
        keys=tuple(args.json_keys),
        txt="separator" if args.txt_separator is not None else args.txt_documents or "file",
        separator=args.txt_separator or "",
    )
    request = TokenizerRequest(
        type=args.tokenizer_type,
        model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        add_special_tokens=args.special_tokens,
        eod_token=args.eod_token,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        tiktoken_special_tokens=tuple(args.tiktoken_special_tokens),
        vocab_size=args.vocab_size,
    )
    job = Job(
        inputs=tuple(args.input_path),
        output=args.output_path,
        request=request,
        reading=reading,
        append_eod=args.append_eod,
        workers=args.workers,
        engine=args.engine,
        skip_bad=args.on_bad_line == "skip",
        overwrite=args.overwrite,
        padded_vocab_size=args.padded_vocab_size,
        shard=args.shard_index or 0,
        shards=args.num_shards,
        log_interval=args.log_interval,
    )
    return job, args.merge


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def guarded(run: Callable[[], object]) -> int:
    """Exit status of ``run``: 0, 2 for an error (printed in a sentence), 130 when interrupted."""
    in_main_thread = True
    try:
        before = signal.signal(signal.SIGTERM, _terminated)
    except ValueError:
        in_main_thread = False
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return after_closed_pipe()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
    return 0


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status: 0, 2 for an error, 130 when interrupted."""

    def run() -> None:
        job, merging = parse(argv)
        (merge if merging else preprocess)(job)

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
