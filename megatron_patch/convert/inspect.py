"""`megatron-patch ckpt`: what a checkpoint holds, and whether its bytes are what was written.

Each tensor stands in a checkpoint as an archive of its own, with a checksum that Megatron-Core
writes and never looks at: a flipped bit loads silently. `ckpt verify` reads and compares them all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.convert import dist_io
from megatron_patch.convert.dist_io import Checkpoint, Record
from megatron_patch.convert.rows import Files
from megatron_patch.util import UserError, human_bytes

#: Degrees of the layout that wrote a checkpoint: argument -> name in the report.
_LAYOUT = (
    ("world_size", "ranks"),
    ("tensor_model_parallel_size", "TP"),
    ("pipeline_model_parallel_size", "PP"),
    ("virtual_pipeline_model_parallel_size", "VPP"),
    ("context_parallel_size", "CP"),
    ("expert_model_parallel_size", "EP"),
    ("expert_tensor_parallel_size", "ETP"),
)
_READ = 16 << 20


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Step, layout, optimizer format and sizes, from the metadata and the run's own arguments.

    Args:
        checkpoint: as `dist_io.read_checkpoint` gives it, also where files are missing.
    """
    missing = dist_io.incomplete(checkpoint)
    common: dict[str, Any] = {}
    try:
        common = dist_io.read_common(checkpoint)
    except (UserError, OSError) as problem:
        if not missing:
            raise
        missing.append(f"the run's own arguments cannot be read ({problem})")
    args = getattr(common.get("args"), "__dict__", {})
    sizes: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for key, entry in checkpoint.tensors.items():
        kind = "optimizer" if key.startswith(("optimizer", "chained_")) else "weights"
        sizes[kind] += sum(chunk.record.length for chunk in entry.chunks)
        if kind == "weights":
            dtypes[entry.dtype] += entry.nbytes
    records = {chunk.record.path for e in checkpoint.tensors.values() for chunk in e.chunks}
    form = "none"
    if sizes["optimizer"]:
        resharded = args.get("dist_ckpt_optim_fully_reshardable")
        form = "fully reshardable" if resharded else "for the layout that wrote it"
    return {
        "folder": str(checkpoint.folder),
        "step": common.get("iteration", _step_of(checkpoint.folder)),
        "samples": args.get("consumed_train_samples"),
        "layout": {name: args[dest] for dest, name in _LAYOUT if args.get(dest)},
        # Of the weights that are there: the arguments of a conversion say nothing of them.
        "dtypes": dict(dtypes.most_common()),
        "optimizer": form,
        "tensors": len(checkpoint.tensors),
        "weights_bytes": sizes["weights"],
        "optimizer_bytes": sizes["optimizer"],
        "files": len(records),
        "missing": missing,
    }


def _step_of(folder: Path) -> int | None:
    """The step by the directory's name."""
    name = folder.resolve().name
    return int(name[5:]) if name.startswith("iter_") and name[5:].isdecimal() else None


@dataclass(frozen=True)
class Damage:
    """A record that is not what was written: file, tensor and what is wrong."""

    file: Path
    key: str
    words: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.words}"


def _records(checkpoint: Checkpoint) -> list[tuple[str, Record]]:
    found = [(key, c.record) for key, e in checkpoint.tensors.items() for c in e.chunks]
    found += list(checkpoint.objects.items())
    old = checkpoint.folder / dist_io.COMMON_FILE
    if old.exists():
        found.append((dist_io.COMMON_FILE, Record(old, 0, old.stat().st_size)))
    return sorted(found, key=lambda item: (item[1].path, item[1].offset))


def _check(files: Files, key: str, record: Record) -> tuple[int, int, Damage | None]:
    """Bytes with and without a checksum, and what is wrong with the record."""
    summed = bare = 0
    try:
        with dist_io.archive_of(files, record) as archive:
            for entry in archive.infolist():
                if not entry.CRC and entry.file_size:
                    bare += entry.file_size  # written by `megatron-patch convert`
                    continue
                crc, left = 0, entry.file_size
                at = dist_io.start_of(files, record, entry)
                while left:
                    piece = bytearray(min(left, _READ))
                    files.read(record.path, at, memoryview(piece))
                    crc = zlib.crc32(piece, crc)
                    at, left = at + len(piece), left - len(piece)
                if crc != entry.CRC:
                    words = f"bytes of {entry.filename} have changed since they were written"
                    return summed, bare, Damage(record.path, key, words)
                summed += entry.file_size
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        return summed, bare, Damage(record.path, key, f"cannot be read ({error})")
    return summed, bare, None


def verify(checkpoint: Checkpoint, workers: int = 2) -> Iterator[tuple[int, int, Damage | None]]:
    """Read every record: bytes with and without a checksum so far, and each damage as it is found.

    Args:
        checkpoint: what to read.
        workers: threads; reading and summing run beside each other.
    """
    files = Files()
    summed = bare = 0
    with ThreadPoolExecutor(workers) as pool:
        for more, without, damage in pool.map(
            lambda item: _check(files, *item), _records(checkpoint)
        ):
            summed, bare = summed + more, bare + without
            yield summed, bare, damage


def _steps(directory: Path) -> list[str]:
    """One line for every step beside the one that is shown, with what points to it."""
    from megatron_patch.training import keep, resume

    for place in (directory, directory / "checkpoints"):
        found = sorted(p for p in place.glob("iter_*") if p.is_dir())
        if not found:
            continue
        whole = set(resume.steps(place))
        names: dict[str, list[str]] = {}
        for link in (keep.LATEST, keep.BEST):
            if (place / link).is_symlink():
                names.setdefault((place / link).resolve().name, []).append(link)
        return [
            f"{p.name}  {human_bytes(sum(f.stat().st_size for f in p.iterdir())):>9}"
            + "".join(f"  {name}" for name in names.get(p.name, []))
            + ("" if p.name in whole else "  unfinished: its save was interrupted")
            for p in found
        ]
    return []


def _shares(dtypes: dict[str, int]) -> str:
    """``bfloat16``, or where there are several: ``bfloat16 13.4 MiB, float32 512 B``."""
    if len(dtypes) < 2:
        return "".join(dtypes)
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in dtypes.items())


def _show(directory: Path, as_json: bool) -> int:
    checkpoint = dist_io.read_checkpoint(dist_io.find_checkpoint(directory), whole=False)
    found = describe(checkpoint)
    status = 1 if found["missing"] else 0
    if as_json:
        print(json.dumps(found, indent=1))
        return status
    print(found["folder"])
    layout = ", ".join(f"{name} {value}" for name, value in found["layout"].items())
    rows = (
        ("step", "a converted model" if found["step"] is None else found["step"]),
        ("sequences read", found["samples"]),
        ("written by", layout),
        ("weights", f"{human_bytes(found['weights_bytes'])} in {found['files']} files"),
        ("of dtype", _shares(found["dtypes"])),
        ("optimizer", f"{human_bytes(found['optimizer_bytes'])}, {found['optimizer']}"),
        ("tensors", found["tensors"]),
    )
    for name, value in rows:
        if value not in (None, ""):
            print(f"  {name:<15} {value}")
    for line in found["missing"]:
        print(f"INCOMPLETE {line}")
    for line in _steps(directory):
        print(line)
    return status


def _verify(directory: Path, workers: int) -> int:
    checkpoint = dist_io.read_checkpoint(dist_io.find_checkpoint(directory))
    total = sum(record.length for _, record in _records(checkpoint))
    started = told = time.monotonic()
    summed = bare = bad = 0
    every = 0.5 if sys.stderr.isatty() else 30.0
    for summed, bare, damage in verify(checkpoint, workers):
        if damage is not None:
            bad += 1
            print(f"DAMAGED {damage}", flush=True)
        now = time.monotonic()
        if now - told >= every:
            told = now
            rate = (summed + bare) / (now - started)
            left = (total - summed - bare) / max(rate, 1)
            end = "\r" if sys.stderr.isatty() else "\n"
            text = f"{human_bytes(summed + bare)} of {human_bytes(total)}, {human_bytes(rate)}/s, "
            text += f"{left:.0f} s left"
            print(text, end=end, file=sys.stderr, flush=True)
    seconds = max(time.monotonic() - started, 1e-9)
    said = f"{human_bytes(summed)} read and compared"
    if bare:
        said += f"; {human_bytes(bare)} without a checksum are only known to be there, whole"
    print(
        f"{'FAIL' if bad else 'PASS'}: {checkpoint.folder}: {said}; {bad} damaged; "
        f"{seconds:.1f} s ({human_bytes(summed / seconds)}/s)"
    )
    if bare:
        print(
            "A conversion writes no checksums; `megatron-patch convert verify` compares its bytes "
            "with the Hugging Face files"
        )
    return 1 if bad else 0


def main(argv: list[str]) -> int:
    """`megatron-patch ckpt show|verify DIR`; 1 for an incomplete or damaged checkpoint."""
    parser = argparse.ArgumentParser(prog="megatron-patch ckpt", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show", help="step, layout, optimizer format, sizes, missing files, other steps"
    )
    show.add_argument("--json", action="store_true", help="for programs")
    check = commands.add_parser("verify", help="compare every byte that has a checksum with it")
    check.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), metavar="N")
    for command in (show, check):
        command.add_argument("directory", type=Path, help="a run, its checkpoints/, or one step")
    options = parser.parse_args(argv)
    if options.command == "show":
        return _show(options.directory, options.json)
    if options.workers < 1:
        raise UserError(f"--workers {options.workers}: at least 1 is needed")
    return _verify(options.directory, options.workers)
