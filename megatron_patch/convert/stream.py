"""Carrying out a plan: parts in processes of their own, one merge, one rename.

Everything is written to ``OUT.partial`` beside the result; the last act is its rename to ``OUT``,
so what stands there is whole. A part's process writes its own record files (Megatron) or its own
tensors of files that are laid out beforehand (HF) and leaves a small JSON file; the merge checks
that every part of the same plan is there. So parts may also be run by hand on several machines
that share a disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_patch.convert import dist_io, hf_io
from megatron_patch.convert.dist_io import DistWriter, Written
from megatron_patch.convert.hf_io import ShardWriter, Stored
from megatron_patch.convert.meta_model import CONTENT_METADATA
from megatron_patch.convert.plan import RECORD, ExportPlan, ImportPlan, split
from megatron_patch.convert.rows import BUFFER, Files, row_bytes, tensor_bytes
from megatron_patch.convert.rules import copies, copy_differs
from megatron_patch.patches.tracker_file import TRACKER
from megatron_patch.util import UserError, atomic_write, human_bytes

#: The folder of a converted model's weights beside its tracker file.
RELEASE = "release"

_MARKER = ".conversion"


class Job(Protocol):
    """A planned conversion."""

    def nbytes(self) -> int:
        """Bytes of tensors to write."""

    def fingerprint(self) -> str:
        """Of the plan."""

    def prepare(self, folder: Path) -> None:
        """What has to stand before any part is written; may be done twice."""

    def warm_up(self) -> None:
        """Import what `finish` needs, beside the parts that are being written."""

    def write(
        self, folder: Path, part: int, parts: int, done: Callable[[int], None]
    ) -> dict[str, Any]:
        """Write one part; returns what the merge needs, JSON-able."""

    def finish(self, folder: Path, results: list[dict[str, Any]]) -> list[str]:
        """Make a whole of the parts; returns notes for the user."""


@dataclass(frozen=True)
class Import:
    """HF -> Megatron: ``release/``, the tracker file and ``hf/``.

    Attributes:
        plan: The plan.
    """

    plan: ImportPlan

    def nbytes(self) -> int:
        """See `Job`."""
        return self.plan.nbytes

    def fingerprint(self) -> str:
        """See `Job`."""
        return "import-" + self.plan.fingerprint()

    def prepare(self, folder: Path) -> None:
        """See `Job`."""
        (folder / RELEASE).mkdir(exist_ok=True)

    def warm_up(self) -> None:
        """See `Job`."""
        importlib.import_module("torch.distributed.checkpoint")

    def write(
        self, folder: Path, part: int, parts: int, done: Callable[[int], None]
    ) -> dict[str, Any]:
        """See `Job`."""
        steps = self.plan.steps
        writer = DistWriter(folder / RELEASE, part)
        buffer = bytearray(BUFFER)
        with Files() as files:
            for index in split([step.nbytes for step in steps], parts)[part]:
                place = steps[index].place
                copy = self.plan.copy(steps[index], files)
                done(writer.write(place.key, place.offset, place.cuts, copy, files, buffer))
        writer.close()
        return {"written": [dataclasses.astuple(record) for record in writer.written]}

    def finish(self, folder: Path, results: list[dict[str, Any]]) -> list[str]:
        """See `Job`."""
        written = [
            Written(key, tuple(offset), tuple(sizes), *rest)
            for result in results
            for key, offset, sizes, *rest in result["written"]
        ]
        written += self._write_objects(folder / RELEASE, len(results))
        dist_io.check_written(folder / RELEASE, written)
        dist_io.write_metadata(folder / RELEASE, self.plan.tensors(), written)
        (folder / "hf").mkdir()
        left = hf_io.copy_companions(self.plan.hf_dir, folder / "hf", leave=(RECORD,))
        stored = self.plan.stored
        record = {
            "copies": self.plan.copies,
            "dtype": hf_io.dtype_of(stored),
            "fp8": [n for n, tensor in stored.items() if tensor.scale and not tensor.packed],
            "stacks": self.plan.stacks,
            "left_out": self.plan.left_out,
        }
        atomic_write(folder / "hf" / RECORD, json.dumps(record) + "\n")
        atomic_write(folder / TRACKER, RELEASE)
        return [f"not copied along: {', '.join(left)}"] if left else []

    def _write_objects(self, folder: Path, part: int) -> list[Written]:
        """What is no tensor: the bookkeeping of every module, empty, and the run's arguments."""
        from argparse import Namespace

        import torch

        nothing = dist_io.pickled_object(torch.empty(0, dtype=torch.uint8))
        # Layers are stored once for all layouts; sizes 1 say so to who asks.
        args = Namespace(
            **self.plan.spec.args,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            no_save_optim=True,
            no_save_rng=True,
            ckpt_format="torch_dist",
        )
        common = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": dict(CONTENT_METADATA),
        }
        writer = DistWriter(folder, part)
        for key in self.plan.objects:
            writer.write_object(key, nothing)
        writer.write_object(f"{dist_io.COMMON}/shard_0_1", dist_io.pickled_object(common))
        writer.close()
        return writer.written


@dataclass(frozen=True)
class ExportJob:
    """Megatron -> HF."""

    plan: ExportPlan

    def nbytes(self) -> int:
        """See `Job`."""
        return self.plan.nbytes

    def fingerprint(self) -> str:
        """See `Job`."""
        return "export-" + self.plan.fingerprint()

    def prepare(self, folder: Path) -> None:
        """See `Job`."""
        if not (folder / self.plan.shards[-1].name).exists():
            hf_io.create_shards(folder, self.plan.shards)

    def warm_up(self) -> None:
        """See `Job`: nothing is."""

    def write(
        self, folder: Path, part: int, parts: int, done: Callable[[int], None]
    ) -> dict[str, Any]:
        """See `Job`."""
        exports = self.plan.exports
        sizes = [tensor_bytes(e.target.shape, e.target.dtype) for e in exports]
        writer = ShardWriter(folder)
        buffer = bytearray(BUFFER)
        with Files() as files:
            for index in split(sizes, parts)[part]:
                copy = self.plan.copy(exports[index], files)
                done(writer.write(exports[index].target, copy, files, buffer))
        writer.close()
        return {"tensors": len(split(sizes, parts)[part])}

    def finish(self, folder: Path, results: list[dict[str, Any]]) -> list[str]:
        """See `Job`."""
        assert sum(result["tensors"] for result in results) == len(self.plan.exports)
        left = hf_io.copy_companions(self.plan.hf_dir, folder, leave=(RECORD,))
        notes = [f"not copied along: {', '.join(left)}"] if left else []
        sizes: dict[str, int] = {}
        for export in self.plan.exports:
            if export.step is None:
                continue
            # A quantised weight counts as what it was.
            dtype = export.step.dtype
            size = tensor_bytes(export.target.shape, dtype)
            sizes[dtype] = sizes.get(dtype, 0) + size
        quantised = any(export.target.dtype == hf_io.FP8 for export in self.plan.exports)
        common = max(sizes, key=lambda dtype: sizes[dtype])
        notes += hf_io.write_dtype(folder, common, quantised)
        hf_io.write_index(folder, [export.target for export in self.plan.exports])
        return notes


def check_copies(plan: ImportPlan) -> None:
    """Refuse files with two versions of a tensor that the model has once (`rules.copies`).

    Raises:
        UserError: A repeated tensor differs from its original.
    """
    originals = copies(plan.spec)
    with Files() as files:
        for name in plan.copies:
            if not _same(plan.stored[name], plan.stored[originals[name]], files):
                raise UserError(copy_differs(name, originals[name]))


def _same(one: Stored, other: Stored, files: Files) -> bool:
    """Whether two tensors of HF files are equal bit for bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    size = row_bytes(one.shape, one.dtype)
    step = max(1, BUFFER // size)
    for start in range(0, one.shape[0], step):
        stop = min(start + step, one.shape[0])
        both = [bytearray((stop - start) * size) for _ in range(2)]
        for tensor, data in zip((one, other), both, strict=True):
            tensor.rows(files).read(start, stop, memoryview(data))
        if both[0] != both[1]:
            return False
    return True


def convert(job: Job, output: Path, workers: int) -> list[str]:
    """Run a whole conversion on this machine.

    Args:
        job: What to do.
        output: Folder to make; absent or empty.
        workers: Processes.

    Returns:
        Notes for the user.

    Raises:
        UserError: The folder is in use, the disk too small, or a source file fails while read.
    """
    refuse_output(output)
    hf_io.check_room(output.parent, needed(job))
    with _partial(output, job) as folder:
        job.prepare(folder)
        results = _write_parts(job, folder, workers)
        notes = job.finish(folder, results)
        _rename(folder, output)
    return notes


def needed(job: Job) -> int:
    """Bytes on disk, with room for headers and small files."""
    return job.nbytes() + (64 << 20)


def write_part(job: Job, output: Path, part: int, parts: int) -> None:
    """Write one of ``parts`` parts (counted from 0) into the folder that all of them share."""
    refuse_output(output)
    if part == 0:
        hf_io.check_room(output.parent, needed(job))
    folder = partial_of(output)
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _MARKER
    if marker.exists() and marker.read_text() not in ("", job.fingerprint()):
        raise UserError(f"{folder} is of another conversion; remove it first")
    # Another machine may be starting, too: its marker has another name until it is whole.
    others = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    if not marker.exists() and any(others):
        raise UserError(f"{folder} holds files of something else; remove it first")
    atomic_write(marker, job.fingerprint())
    # What an earlier try of this part left counts no longer, should this one be interrupted.
    _record_of(folder, part).unlink(missing_ok=True)
    job.prepare(folder)
    progress = Progress(job.nbytes() // parts)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress.show(done)

    result = job.write(folder, part, parts, count)
    _store(folder, job, part, parts, result)


def merge_parts(job: Job, output: Path) -> list[str]:
    """Make a whole of the parts that `write_part` left.

    Raises:
        UserError: A part is missing or belongs to another plan; names it.
    """
    refuse_output(output)
    folder = partial_of(output)
    records = sorted(folder.glob(".part-*.json")) if folder.is_dir() else []
    if not records:
        raise UserError(f"{folder}: no parts there; run --part 1/N to --part N/N first")
    results: dict[int, dict[str, Any]] = {}
    counts = set()
    for record in records:
        found = json.loads(record.read_text())
        if found["fingerprint"] != job.fingerprint():
            raise UserError(f"{record} is of another conversion; remove {folder} and start anew")
        counts.add(found["parts"])
        results[found["part"]] = found["result"]
    if len(counts) > 1:
        raise UserError(f"{folder}: parts of {sorted(counts)} in all are mixed; start anew")
    lacking = [str(n + 1) for n in range(counts.pop()) if n not in results]
    if lacking:
        raise UserError(f"{folder}: part {', '.join(lacking)} is not written yet")
    notes = job.finish(folder, [results[n] for n in sorted(results)])
    _rename(folder, output)
    return notes


def partial_of(output: Path) -> Path:
    """Where a result grows."""
    return output.parent / f"{output.name}.partial"


def refuse_output(output: Path) -> None:
    """Refuse a result that exists.

    Raises:
        UserError: It is no empty folder.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError(
            f"--output-dir {output}: is not empty. Nothing is overwritten: name another folder or "
            f"remove this one."
        )


@contextlib.contextmanager
def _partial(output: Path, job: Job) -> Iterator[Path]:
    """A fresh ``OUT.partial``, locked while it is used and gone if the work fails."""
    folder = partial_of(output)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARKER).exists():
        raise UserError(f"{folder} holds files of something else; remove it first")
    folder.mkdir(exist_ok=True)
    with (folder / _MARKER).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is writing there; wait for it") from None
        for entry in folder.iterdir():
            if entry.name != _MARKER:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        before = signal.signal(signal.SIGTERM, _interrupted)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def _rename(folder: Path, output: Path) -> None:
    for entry in (folder / _MARKER, *folder.glob(".part-*.json")):
        entry.unlink(missing_ok=True)
    os.replace(folder, output)
    fd = os.open(output.parent, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _store(folder: Path, job: Job, part: int, parts: int, result: dict[str, Any]) -> None:
    record = {"fingerprint": job.fingerprint(), "part": part, "parts": parts, "result": result}
    atomic_write(_record_of(folder, part), json.dumps(record))


def _record_of(folder: Path, part: int) -> Path:
    return folder / f".part-{part:05d}.json"


def _write_parts(job: Job, folder: Path, workers: int) -> list[dict[str, Any]]:
    progress = Progress(job.nbytes())
    threading.Thread(target=job.warm_up, daemon=True).start()
    if workers == 1:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress.show(done)

        result = job.write(folder, 0, 1, count)
        progress.end(done)
        return [result]
    # Not forked: whoever calls this may run threads of torch's.
    context = multiprocessing.get_context("spawn")
    counts = context.RawArray("q", workers)
    processes = [
        context.Process(target=_part_process, args=(job, folder, part, workers, counts))
        for part in range(workers)
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            failed = [n for n, process in enumerate(processes) if process.exitcode]
            if failed:
                break
            time.sleep(0.05)
            progress.show(sum(counts))
        for number, process in enumerate(processes):
            if process.exitcode:
                raise _failure(folder, number, process.exitcode)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()
    progress.end(sum(counts))
    return [json.loads(_record_of(folder, part).read_text())["result"] for part in range(workers)]


def _part_process(job: Job, folder: Path, part: int, parts: int, counts: Any) -> None:
    """One part; ends with its parent, also where that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Copying needs no torch, and rounding no more than one thread of it.
    os.environ["OMP_NUM_THREADS"] = "1"
    parent = os.getppid()

    def count(size: int) -> None:
        counts[part] += size
        if os.getppid() != parent:
            os._exit(1)

    try:
        _store(folder, job, part, parts, job.write(folder, part, parts, count))
    except (UserError, OSError) as error:
        (folder / f".error-{part:05d}").write_text(str(error))
        os._exit(2)


def _failure(folder: Path, part: int, status: int) -> Exception:
    message = folder / f".error-{part:05d}"
    if message.exists():
        return UserError(message.read_text())
    return UserError(f"part {part + 1} ended with status {status}; its output says why")


class Progress:
    """Bytes, speed and time left on standard error: rewritten on a terminal, else now and then."""

    def __init__(self, total: int) -> None:
        self._total, self._start = total, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._start + (0.5 if self._terminal else 10)

    def show(self, done: int) -> None:
        """Say where things are, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.5 if self._terminal else 10)
        self._print(done, now, "\r" if self._terminal else "\n")

    def end(self, done: int) -> None:
        """The last word."""
        self._print(done, time.monotonic(), "\n")

    def _print(self, done: int, now: float, end: str) -> None:
        seconds = max(now - self._start, 1e-9)
        speed = done / seconds
        left = (self._total - done) / speed if speed else 0
        tail = f"{left:4.0f} s left" if done < self._total else f"in {seconds:.1f} s"
        share = 100 * done / self._total if self._total else 100
        print(
            f"  {human_bytes(done)} of {human_bytes(self._total)} ({share:3.0f} %)  "
            f"{speed / 1e9:.2f} GB/s  {tail}   ",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def describe(plan: ImportPlan | ExportPlan) -> Iterator[str]:
    """What a plan skips and what a user should know."""
    for skipped in plan.skipped:
        yield f"skipped: {skipped.what}, {human_bytes(skipped.nbytes)}: {skipped.why}"
    for note in plan.notes:
        yield f"note: {note}"
