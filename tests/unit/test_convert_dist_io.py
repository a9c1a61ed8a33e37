"""The torch_dist format against torch itself, and regions of tensors in every kind of chunks."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_patch.convert import dist_io
from megatron_patch.convert.dist_io import Chunk, Entry, Record, RegionRows, record_frame
from megatron_patch.convert.rows import Files, rows_of, tensor_bytes
from megatron_patch.util import UserError

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "uint8", "bool")


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(3, 5), (7,), (), (1, 2, 3), (0, 4)])
def test_torch_loads_our_records(dtype: str, sizes: tuple[int, ...]) -> None:
    tensor = (torch.randn(sizes) * 9).to(getattr(torch, dtype))
    for start in (0, 13, 64):
        head, tail = record_frame(dtype, sizes, start)
        assert (start + len(head)) % 64 == 0
        found = torch.load(io.BytesIO(head + raw(tensor) + tail), weights_only=True)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_sizes_beyond_31_bits_are_written() -> None:
    head, _ = record_frame("uint8", (3, 1 << 30), 0)
    assert (3 << 30).to_bytes(8, "little") in head


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_records_are_read(dtype: str, tmp_path: Path) -> None:
    tensor = (torch.randn(6, 5) * 9).to(getattr(torch, dtype))
    for given in (tensor, tensor[2:4], torch.nn.Parameter(tensor, requires_grad=False)):
        file = io.BytesIO()
        torch.save(given, file)
        path = tmp_path / "record"
        path.write_bytes(b"before" + file.getvalue() + b"after")
        record = Record(path, 6, len(file.getvalue()))
        entry = Entry("k", tuple(given.shape), dtype, [Chunk((0, 0), tuple(given.shape), record)])
        assert read(entry, (0, 0), tuple(given.shape)) == raw(given.data)


def read(entry: Entry, offset: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    with Files() as files:
        region = RegionRows(files, entry, offset, shape)
        rows = rows_of(shape)
        size = tensor_bytes(shape, entry.dtype) // max(rows, 1)
        # In two reads that meet in the middle of whatever chunk is there.
        data = bytearray(rows * size)
        middle = rows // 2
        region.read(0, middle, memoryview(data)[: middle * size])
        region.read(middle, rows, memoryview(data)[middle * size :])
        return bytes(data)


def boxes(whole: torch.Tensor, cuts: tuple[tuple[int, ...], ...], path: Path) -> Entry:
    """The tensor in a grid of chunks, each saved by torch."""
    chunks = []
    with path.open("wb") as handle:
        edges = [(*cut, size) for cut, size in zip(cuts, whole.shape, strict=True)]
        for box in itertools.product(*([*itertools.pairwise((0, *edge))] for edge in edges)):
            start = handle.tell()
            torch.save(whole[tuple(slice(a, b) for a, b in box)].clone(), handle)
            record = Record(path, start, handle.tell() - start)
            offset, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
            chunks.append(Chunk(offset, sizes, record))
    return Entry("k", tuple(whole.shape), "float32", chunks)


GRIDS = [
    ((), (), (), ()),
    ((1, 2), (), (), ()),
    ((1, 2), (1, 2, 3), (3,), ()),
    ((2,), (1,), (5,), (2,)),
    ((), (3,), (2, 4), (1, 6)),
]


@pytest.mark.parametrize("cuts", GRIDS)
def test_a_region_of_any_chunks(cuts: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    """Layers, experts, rows and columns, each whole or split anywhere."""
    whole = torch.arange(3 * 4 * 6 * 7, dtype=torch.float32).reshape(3, 4, 6, 7)
    entry = boxes(whole, cuts, tmp_path / "f")
    for layer, expert in itertools.product(range(3), range(4)):
        assert read(entry, (layer, expert, 0, 0), (6, 7)) == raw(whole[layer, expert])
    assert read(entry, (2, 0, 0, 0), (4, 6, 7)) == raw(whole[2])
    assert read(entry, (0, 0, 0, 0), (3, 4, 6, 7)) == raw(whole)
    assert read(entry, (1, 2, 3, 0), (3, 7)) == raw(whole[1, 2, 3:])


def test_vectors_and_scalars(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    entry = boxes(whole, ((1,), (3,)), tmp_path / "f")
    assert read(entry, (1, 0), (4,)) == raw(whole[1])
    entry = boxes(torch.arange(5.0), ((2,),), tmp_path / "g")
    assert read(entry, (3,), ()) == raw(torch.tensor(3.0))


@pytest.mark.parametrize("change", [lambda c: c[1:], lambda c: [*c, c[0]]])
def test_a_gap_or_an_overlap_is_refused(change: object, tmp_path: Path) -> None:
    entry = boxes(torch.ones(4, 6), ((2,), (3,)), tmp_path / "f")
    entry.chunks = change(entry.chunks)  # type: ignore[operator]
    with pytest.raises(UserError, match="incomplete or two saves are mixed"):
        read(entry, (0, 0), (4, 6))


def test_a_transposed_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    torch.save(torch.ones(4, 6).t(), file)
    entry = Entry("k", (6, 4), "float32", [Chunk((0, 0), (6, 4), Record(file, 0, 10**6))])
    entry.chunks[0] = Chunk((0, 0), (6, 4), Record(file, 0, file.stat().st_size))
    with pytest.raises(UserError, match="stored transposed"):
        read(entry, (0, 0), (6, 4))


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    torch.save(torch.ones(4, 6), file)
    data = bytearray(file.read_bytes())
    data[-30:] = b"\xff" * 30
    file.write_bytes(data)
    entry = Entry("k", (4, 6), "float32", [Chunk((0, 0), (4, 6), Record(file, 0, len(data)))])
    with pytest.raises(UserError, match="is no tensor"):
        read(entry, (0, 0), (4, 6))


def test_metadata_of_torch(tmp_path: Path) -> None:
    """What torch itself saves is understood, objects included."""
    from torch.distributed import checkpoint

    state = {"a": torch.randn(5, 3), "b": torch.arange(4), "c": {"deep": torch.ones(2)}, "n": 7}
    writer = checkpoint.FileSystemWriter(str(tmp_path))
    checkpoint.save(state, storage_writer=writer, no_dist=True)
    held = dist_io.read_checkpoint(tmp_path)
    assert {k: (e.shape, e.dtype) for k, e in held.tensors.items()} == {
        "a": ((5, 3), "float32"), "b": ((4,), "int64"), "c.deep": ((2,), "float32"),
    }  # fmt: skip
    assert list(held.objects) == ["n"]
    assert read(held.tensors["a"], (0, 0), (5, 3)) == raw(state["a"])


def test_metadata_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return print, ("run",)

    import pickle

    content = SimpleNamespace(storage_data={Evil(): 1}, state_dict_metadata={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="cannot be read"):
        dist_io.read_checkpoint(tmp_path)
