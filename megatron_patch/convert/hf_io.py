"""Hugging Face model directories: what is in them, read and written without loading a model.

Reading goes by the safetensors headers, so names, shapes and sizes cost nothing and every fault of
a directory is found before the first weight is read. Writing plans every shard first: a tensor's
place in its file is known, so several processes fill one file, and the index comes last.

Format: 8 bytes little-endian header length, a JSON header, the data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_patch.convert.rows import (
    FP8_BLOCK,
    ITEM_SIZE,
    MXFP4_BLOCK,
    Copy,
    FileRows,
    Files,
    HeldRows,
    Quantised,
    ScaledRows,
    Transposed,
    rows_of,
    tensor_bytes,
    transposed_rows,
    unpacked_rows,
    write_all,
    write_rows,
)
from megatron_patch.convert.rules import Stack, refuse_stack
from megatron_patch.util import UserError, atomic_write, human_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

#: safetensors dtype -> torch dtype name.
DTYPES = MappingProxyType(
    {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
        "BOOL": "bool",
    }
)  # fmt: skip
_NAMES = MappingProxyType({torch: name for name, torch in DTYPES.items()})

#: The format of quantised weights, and what the name of their scales adds to theirs.
FP8, SCALE = "float8_e4m3fn", "_scale_inv"

#: What the names of weights in MXFP4 and of their scales add to those of the weights.
_BLOCKS, _SCALES_OF_BLOCKS = "_blocks", "_scales"

#: Other formats of the same weights; never copied along, and no replacement for safetensors.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")

_SCALES = ("float32", "bfloat16")

#: The safetensors library refuses longer headers.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file.

    Attributes:
        name: Its name.
        path: The file.
        offset: Its first byte in the file.
        shape: Its shape.
        dtype: Its torch dtype name; of a tensor with scales, that of their product.
        scale: The scale of every block of an FP8 or MXFP4 tensor.
        packed: Whether it is MXFP4: its shape is then ``[..., columns, rows]``, as in files that
            hold it unpacked, but its bytes are ``[..., rows, columns / 32, 16]``.
        transposed: Whether the file keeps its two axes the other way round.
    """

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    scale: Stored | None = None
    packed: bool = False
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return tensor_bytes(self.shape, self.dtype)

    def rows(self, files: Files) -> FileRows | ScaledRows | HeldRows:
        """For reading."""
        shape = self.shape[::-1] if self.transposed and not self.packed else self.shape
        if self.scale is None:
            plain = FileRows(files, self.path, self.offset, shape, self.dtype)
            return transposed_rows(plain) if self.transposed else plain
        scale = self.scale.rows(files)
        assert isinstance(scale, FileRows)
        if self.packed:
            assert self.transposed, self.name
            bytes_ = (*scale.shape, MXFP4_BLOCK // 2)
            return unpacked_rows(FileRows(files, self.path, self.offset, bytes_, "uint8"), scale)
        return ScaledRows(FileRows(files, self.path, self.offset, shape, FP8), scale)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, in the order of their data.

    Raises:
        UserError: The file is missing, cut off, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise UserError(
                    f"{path} ({size} bytes) is cut off or no safetensors file: its header should "
                    f"have {length} bytes. Copy or download it again."
                )
            header = json.loads(handle.read(length))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: its header is not valid JSON ({error}).") from None
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise UserError(f"{path}: {name} has dtype {entry['dtype']}, which is not supported.")
        begin, end = entry["data_offsets"]
        tensor = Stored(name, path, 8 + length + begin, tuple(entry["shape"]), dtype)
        if tensor.nbytes != end - begin:
            raise UserError(
                f"{path}: {name} has {end - begin} bytes, but {dtype} {list(tensor.shape)} has "
                f"{tensor.nbytes}. The file is damaged."
            )
        found.append(tensor)
    found.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in found:
        if tensor.offset != end:
            raise UserError(f"{path}: {tensor.name} overlaps its neighbour or leaves a gap.")
        end += tensor.nbytes
    if end != size:
        raise UserError(
            f"{path} has {size} bytes, but its header describes {end}. The file is "
            f"{'cut off' if size < end else 'damaged'}: copy or download it again."
        )
    return {tensor.name: tensor for tensor in found}


def read_model(directory: str | os.PathLike[str]) -> dict[str, Stored]:
    """Every tensor of a model directory, shard by shard.

    Raises:
        UserError: No safetensors files, a shard missing or cut off, or an index that says
            something else than the shards; names the file.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such directory. Give a directory with safetensors files.")
    index = folder / INDEX
    if index.exists():
        return _read_shards(folder, index)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_WEIGHTS)
        hint = (
            f"it holds {', '.join(others[:3])}; save the model as safetensors "
            f"(save_pretrained of transformers does)"
            if others
            else "give the directory that a model was downloaded or saved to"
        )
        raise UserError(f"{folder}: no safetensors files; {hint}.")
    if len(shards) > 1:
        raise UserError(
            f"{folder}: {len(shards)} safetensors files and no {INDEX}, so nobody knows whether "
            f"they are all. Copy the index, too, or remove files that do not belong to the model."
        )
    return read_header(shards[0])


def _read_shards(folder: Path, index: Path) -> dict[str, Stored]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: no usable weight_map ({error!r}). Copy it again.") from None
    found: dict[str, Stored] = {}
    for shard in sorted(set(listed.values())):
        path = folder / shard
        if not path.exists():
            raise UserError(f"{path} is missing, but {INDEX} lists it. Copy or download it.")
        for name, tensor in read_header(path).items():
            if listed.get(name) != shard:
                place = f"places it in {listed[name]}" if name in listed else "does not list it"
                raise UserError(
                    f"{path} holds {name}, but {INDEX} {place}. The index is another's."
                )
            found[name] = tensor
    lost = sorted(set(listed) - set(found))
    if lost:
        raise UserError(
            f"{folder / listed[lost[0]]} lacks {lost[0]}, which {INDEX} places in it"
            + (f" (and {len(lost) - 1} more)" if len(lost) > 1 else "")
            + ". The index or the file is another's."
        )
    return found


def with_scales(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """FP8 and MXFP4 weights joined with their scales: one tensor each, read as their product.

    Raises:
        UserError: A weight without a scale, or a scale that is not of its weight.
    """
    found = dict(stored)
    for name, tensor in stored.items():
        if name.endswith(_BLOCKS) and tensor.dtype == "uint8":
            plain = name.removesuffix(_BLOCKS)
            found[plain] = _mxfp4(
                plain, found.pop(name), found.pop(plain + _SCALES_OF_BLOCKS, None)
            )
            continue
        if tensor.dtype not in (FP8, "float8_e5m2"):
            continue
        scale = found.pop(name + SCALE, None)
        if scale is None or tensor.dtype != FP8:
            raise UserError(
                f"{tensor.path}: {name} is {tensor.dtype} without {name + SCALE}; FP8 weights are "
                f"read with one scale for {FP8_BLOCK} x {FP8_BLOCK} numbers. Use the unquantised "
                f"checkpoint."
            )
        expected = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
        if scale.shape != expected or len(tensor.shape) != 2 or scale.dtype not in _SCALES:
            raise UserError(
                f"{scale.path}: {scale.name} is {scale.dtype} {list(scale.shape)}, but "
                f"{list(tensor.shape)} in blocks of {FP8_BLOCK} x {FP8_BLOCK} has "
                f"{list(expected)} scales in float32 or bfloat16."
            )
        found[name] = replace(tensor, dtype="bfloat16", scale=scale)
    return found


def _mxfp4(name: str, blocks: Stored, scales: Stored | None) -> Stored:
    *lead, rows, count, size = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
    expected = (*lead, rows, count)
    if scales is None or (scales.shape, scales.dtype, size) != (
        expected,
        "uint8",
        MXFP4_BLOCK // 2,
    ):
        other = f"{scales.dtype} {list(scales.shape)}" if scales else "missing"
        raise UserError(
            f"{blocks.path}: {blocks.name} is {list(blocks.shape)} and its scales "
            f"{name + _SCALES_OF_BLOCKS} are {other}; MXFP4 has blocks of {MXFP4_BLOCK} numbers in "
            f"{MXFP4_BLOCK // 2} bytes, each with a scale of one byte. Copy or download it again."
        )
    shape = (*lead, count * MXFP4_BLOCK, rows)
    return replace(blocks, name=name, shape=shape, dtype="bfloat16", scale=scales, packed=True)


def unstacked(stored: Mapping[str, Stored], stacks: Iterable[Stack]) -> dict[str, Stored]:
    """The tensors by the names that rules know: those of a `Stack` are found in it.

    Raises:
        UserError: A stack of another shape, or one of which a part is there, too.
    """
    found = dict(stored)
    for stack in stacks:
        tensor = found.pop(stack.name, None)
        if tensor is None:
            continue
        refuse_stack(stack, tensor.shape, str(tensor.path), found)
        count = len(stack.parts)
        for number, part in enumerate(stack.parts):
            scale = tensor.scale
            if scale is not None:
                inner = scale.shape[-2:]
                at = scale.offset + number * tensor_bytes(inner, scale.dtype)
                scale = replace(scale, offset=at, shape=inner)
            size = tensor.nbytes // count // (4 if tensor.packed else 1)
            found[part] = replace(
                tensor,
                name=part,
                offset=tensor.offset + number * size,
                shape=stack.inner,
                scale=scale,
                transposed=stack.transposed,
            )
    return found


def companions(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files that travel with the weights, and those that stay behind.

    Returns:
        ``config.json``, tokenizer, templates, generation config and whatever else is small text;
        and the rest (weights in other formats, folders, hidden files).
    """
    taken, left = [], []
    for path in sorted(directory.iterdir()):
        weights = path.suffix in (".safetensors", *_OTHER_WEIGHTS) or path.name.endswith(
            tuple(f"{suffix}.index.json" for suffix in (".safetensors", *_OTHER_WEIGHTS))
        )
        if path.is_dir():
            wanted = path.name == "additional_chat_templates"
        else:
            wanted = not weights and not path.name.startswith(".")
        if wanted:
            taken.append(path)
        elif path.suffix != ".safetensors" and path.name != INDEX:
            left.append(path)
    return taken, left


def copy_companions(source: Path, target: Path, leave: Iterable[str] = ()) -> list[str]:
    """Copy what travels with the weights; returns the names that stayed behind."""
    taken, left = companions(source)
    for path in taken:
        if path.name in leave:
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
    return [path.name for path in left]


# --- writing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor's place in the files to write.

    Attributes:
        name: Its name.
        file: Name of the file.
        offset: First byte.
        shape: Shape in the file.
        dtype: torch dtype name.
        within: The tensor in the file's header of which it is a part; nothing: itself.
    """

    name: str
    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    within: str = ""


@dataclass(frozen=True)
class Shard:
    """One file to write: its name, its header with length in front, and its size in bytes."""

    name: str
    header: bytes
    size: int


def plan_shards(
    tensors: Sequence[tuple[str, tuple[int, ...], str]], max_bytes: int
) -> tuple[tuple[Shard, ...], tuple[Target, ...]]:
    """Lay tensors out in files of at most ``max_bytes``, a larger tensor alone in its file.

    Args:
        tensors: Names, shapes and torch dtype names, in the order in which they are written.
        max_bytes: Largest file, header not counted.

    Returns:
        The files and every tensor's place, in the given order.
    """
    groups: list[list[tuple[str, tuple[int, ...], str]]] = []
    room = 0
    for tensor in tensors:
        size = tensor_bytes(tensor[1], tensor[2])
        if size > room or not groups:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= size
    shards, targets = [], []
    for number, group in enumerate(groups, 1):
        many = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = SINGLE if len(groups) == 1 else many
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        starts = []
        for name, shape, dtype in group:
            size = tensor_bytes(shape, dtype)
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [at, at + size],
            }
            starts.append(at)
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        shards.append(Shard(file, head, len(head) + at))
        targets += [
            Target(name, file, len(head) + start, shape, dtype)
            for (name, shape, dtype), start in zip(group, starts, strict=True)
        ]
    return tuple(shards), tuple(targets)


def parts_of(target: Target, stack: Stack) -> tuple[Target, ...]:
    """The places of a stack's parts in that of the stack."""
    inner = stack.inner[::-1] if stack.transposed else stack.inner
    size = tensor_bytes(inner, target.dtype)
    return tuple(
        Target(part, target.file, target.offset + n * size, inner, target.dtype, stack.name)
        for n, part in enumerate(stack.parts)
    )


def create_shards(folder: Path, shards: Iterable[Shard]) -> None:
    """Create the files with their headers and their full size.

    Another machine may do the same, and may be writing tensors already: nothing is cut off.
    """
    for shard in shards:
        fd = os.open(folder / shard.name, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            write_all(fd, shard.header, 0)
            os.ftruncate(fd, shard.size)
        finally:
            os.close(fd)


class ShardWriter:
    """Fills tensors into the files of `create_shards`; several processes may do so at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def write(
        self,
        target: Target,
        copy: Copy | Quantised | Transposed,
        files: Files,
        buffer: bytearray,
    ) -> int:
        """Write one tensor; returns its bytes."""
        fd = self._open.get(target.file)
        if fd is None:
            fd = self._open[target.file] = os.open(self._folder / target.file, os.O_WRONLY)
        rows, place = rows_of(target.shape), (fd, target.offset)
        written = write_rows(copy, 0, rows, place, files, buffer)
        expected = tensor_bytes(target.shape, target.dtype)
        assert written == expected, (target, written, expected)
        return expected

    def close(self) -> None:
        """Bring everything to the disk."""
        while self._open:
            fd = self._open.popitem()[1]
            os.fsync(fd)
            os.close(fd)


def write_index(folder: Path, targets: Sequence[Target]) -> None:
    """The index of the shards; none where there is one file only."""
    if all(target.file == SINGLE for target in targets):
        return
    total = sum(tensor_bytes(target.shape, target.dtype) for target in targets)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {_in_file(target): target.file for target in sorted(targets, key=_in_file)},
    }
    atomic_write(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _in_file(target: Target) -> str:
    return target.within or target.name


#: What config.json says of weights in FP8.
_QUANTISATION = MappingProxyType(
    {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
)


def scale_powers(folder: Path) -> bool:
    """Whether a model's FP8 scales are powers of two, by its ``config.json``."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool((config.get("quantization_config") or {}).get("scale_fmt") == "ue8m0")


def write_dtype(folder: Path, dtype: str, quantised: bool = False) -> list[str]:
    """Make ``config.json`` name the format of the weights; says what was changed.

    The key keeps its spelling: ``torch_dtype``, or ``dtype`` since transformers 5.

    Args:
        folder: With ``config.json``.
        dtype: torch dtype name of most weights, before they were quantised.
        quantised: Whether there are FP8 weights with scales.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"
    changes = []
    inner = config.get("text_config")  # the keys of a language model beside a vision tower
    apart = isinstance(inner, dict)
    if config.get(key) != dtype and (key in config or not apart):
        changes.append(
            f"config.json: {key} {config.get(key)!r} -> {dtype!r}, the dtype of the weights"
        )
        config[key] = dtype
    if apart:
        key = "dtype" if "dtype" in inner else "torch_dtype"
        if inner.get(key, dtype) != dtype:
            changes.append(f"config.json: text_config.{key} {inner[key]!r} -> {dtype!r}")
            inner[key] = dtype
    if quantised and not config.get("quantization_config"):
        config["quantization_config"] = dict(_QUANTISATION)
        changes.append("config.json: quantization_config added, the weights are FP8")
    if not quantised and config.pop("quantization_config", None):
        changes.append(f"config.json: quantization_config removed, the weights are {dtype}")
    if changes:
        atomic_write(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return changes


def parse_size(text: str, flag: str) -> int:
    """``5GB``, ``500MB``, ``2GiB``, ``4096`` in bytes.

    Raises:
        UserError: Not a size.
    """
    units = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
             "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
    number = text.strip().lower()
    unit = number.lstrip("0123456789._")
    try:
        size = int(float(number[: len(number) - len(unit)]) * units[unit.strip()])
    except (KeyError, ValueError):
        size = 0
    if size < 1:
        raise UserError(f"{flag} {text}: not a size; write it like 5GB, 500MB or 2GiB")
    return size


def check_room(folder: Path, needed: int) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        UserError: Both numbers are in the message.
    """
    where = folder
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    if free < needed:
        raise UserError(
            f"{folder}: {human_bytes(needed)} are needed, {human_bytes(free)} are free on that "
            f"disk. Make room or name another disk."
        )


def dtype_of(tensors: Mapping[str, Stored]) -> str:
    """The dtype that most of the bytes have."""
    by: dict[str, int] = {}
    for tensor in tensors.values():
        by[tensor.dtype] = by.get(tensor.dtype, 0) + tensor.nbytes
    return max(by, key=lambda dtype: (by[dtype], ITEM_SIZE[dtype])) if by else "float32"
