"""The idxmap's bytes are upstream's, and a pair appears whole or not at all."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_patch.data import idxmap
from megatron_patch.util import UserError

Documents = list[list[list[int]]]


def write(prefix: Path, documents: Documents, dtype=np.int32, **options) -> idxmap.Index:
    with idxmap.Writer(str(prefix), np.dtype(dtype), **options) as writer:
        for document in documents:
            flat = [token for sequence in document for token in sequence]
            writer.write(
                np.array(flat, np.int64),
                np.array([len(sequence) for sequence in document], np.int32),
                np.array([len(document)]),
            )
        return writer.commit()


def write_upstream(prefix: Path, documents: Documents, dtype=np.int32) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        flat = [token for sequence in document for token in sequence]
        builder.add_document(flat, [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


def same_pair(left: Path, right: Path) -> bool:
    return all(
        Path(f"{left}{suffix}").read_bytes() == Path(f"{right}{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    )


def random_documents(count: int, largest: int, seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    documents = [
        [
            rng.integers(0, largest + 1, rng.integers(1, 40)).tolist()
            for _ in range(rng.integers(0, 4))
        ]
        for _ in range(count)
    ]
    documents[0] = []  # an empty first document once crashed upstream's readers
    documents.append([[largest]])
    return documents


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 65499), (np.int32, 2**31 - 1)])
def test_bytes_equal_upstreams_builder(tmp_path: Path, dtype, largest: int):
    documents = random_documents(300, largest)
    index = write(tmp_path / "ours", documents, dtype)
    write_upstream(tmp_path / "theirs", documents, dtype)
    assert same_pair(tmp_path / "ours", tmp_path / "theirs")
    assert index.token_count() == sum(len(s) for d in documents for s in d)


def test_bytes_do_not_depend_on_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents = random_documents(200, 1000)
    write(tmp_path / "whole", documents)
    monkeypatch.setattr(idxmap, "_BLOCK", 7)
    index = write(tmp_path / "blocks", documents)
    assert same_pair(tmp_path / "whole", tmp_path / "blocks")
    assert index.token_count() == sum(len(s) for d in documents for s in d)
    idxmap.merge([str(tmp_path / "whole")], str(tmp_path / "copy"))
    assert same_pair(tmp_path / "whole", tmp_path / "copy")


def test_upstream_reads_it(tmp_path: Path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = [[[5, 6, 7]], [], [[1], [2, 3]]]
    write(tmp_path / "d", documents, np.uint16)
    dataset = IndexedDataset(str(tmp_path / "d"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 7], [1], [2, 3]]
    assert dataset.document_indices.tolist() == [0, 1, 1, 3]
    assert idxmap.read_index(tmp_path / "d").tokens(2).tolist() == [2, 3]


@pytest.mark.parametrize("size", [1, 65499, 65500, 65501, 65535, 65536, 65537, 151936])
def test_dtype_is_upstreams_choice_and_holds_the_largest_id(tmp_path: Path, size: int):
    from megatron.core.datasets.indexed_dataset import DType

    dtype = idxmap.dtype_for(size)
    assert dtype == np.dtype(DType.optimal_dtype(size))
    index = write(tmp_path / "d", [[[size - 1, 0]]], dtype)
    assert index.dtype == dtype
    assert index.tokens(0).tolist() == [size - 1, 0]


def test_a_sparse_vocabulary_does_not_overflow():
    assert idxmap.dtype_for(40_000, largest_id=65_535) == np.uint16
    assert idxmap.dtype_for(40_000, largest_id=65_536) == np.int32


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_offsets_beyond_two_gibibytes(dtype):
    lengths = np.array([2**30, 2**30, 5, 2**31 - 1, 3], np.int32)
    handle = io.BytesIO()
    tokens = idxmap.write_index(
        handle,
        np.dtype(dtype),
        iter([lengths[:2], lengths[2:]]),
        [np.ones(5, np.int32)],
        sequences=5,
        documents=5,
    )
    wide = lengths.astype(object)
    expected = [int(sum(wide[:i])) * np.dtype(dtype).itemsize for i in range(5)]
    raw = handle.getvalue()
    assert np.frombuffer(raw, np.int64, 5, 34 + 20).tolist() == expected
    assert expected[-1] > 2**31
    assert expected == sorted(expected)
    assert tokens == int(sum(wide))


def test_announced_counts_are_checked():
    for lengths, documents in (([1, 2], [1]), ([1], [1])):
        with pytest.raises(ValueError, match="announced"):
            idxmap.write_index(
                io.BytesIO(),
                np.dtype(np.int32),
                [np.array(lengths)],
                [np.array(documents)],
                sequences=2,
                documents=len(documents),
            )


def test_nothing_is_left_without_commit(tmp_path: Path):
    with pytest.raises(RuntimeError), idxmap.Writer(str(tmp_path / "d"), np.dtype("i4")) as writer:
        writer.write(np.arange(5), np.array([5]), np.array([1]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_only_the_pair_is_left_after_commit(tmp_path: Path):
    write(tmp_path / "d", [[[1]]])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_an_existing_pair_is_replaced_only_when_asked(tmp_path: Path):
    write(tmp_path / "d", [[[1, 2]]])
    before = (tmp_path / "d.bin").read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        write(tmp_path / "d", [[[3]]])
    assert (tmp_path / "d.bin").read_bytes() == before
    with (
        pytest.raises(RuntimeError),
        idxmap.Writer(str(tmp_path / "d"), np.dtype("i4"), overwrite=True),
    ):
        raise RuntimeError
    assert (tmp_path / "d.bin").read_bytes() == before
    assert write(tmp_path / "d", [[[3]]], overwrite=True).tokens(0).tolist() == [3]


def test_what_a_killed_run_left_is_not_kept(tmp_path: Path):
    for suffix in (".bin", ".idx", ".lengths", ".documents"):
        (tmp_path / f"d{suffix}.partial").write_bytes(b"x" * 1000)
    write(tmp_path / "d", [[[1]]])
    write_upstream(tmp_path / "u", [[[1]]])
    assert same_pair(tmp_path / "d", tmp_path / "u")
    assert not list(tmp_path.glob("*.partial"))


def test_two_writers_of_one_prefix(tmp_path: Path):
    with idxmap.Writer(str(tmp_path / "d"), np.dtype("i4")) as writer:
        writer.write(np.arange(3), np.array([3]), np.array([1]))
        with pytest.raises(UserError, match="another run"):
            idxmap.Writer(str(tmp_path / "d"), np.dtype("i4"))
        assert writer.commit().token_count() == 3


def test_damaged_files_are_named(tmp_path: Path):
    write(tmp_path / "d", [[[1, 2, 3]]])
    binary, idx = tmp_path / "d.bin", tmp_path / "d.idx"
    good = idx.read_bytes()
    binary.write_bytes(binary.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"d\.bin holds 11 bytes, its index announces 12"):
        idxmap.read_index(tmp_path / "d")
    idx.write_bytes(good[:-4])
    with pytest.raises(UserError, match="cut short"):
        idxmap.read_index(tmp_path / "d")
    idx.write_bytes(b"PK" + good[2:])
    with pytest.raises(UserError, match="no Megatron index"):
        idxmap.read_index(tmp_path / "d")
    idx.write_bytes(good[:9] + struct.pack("<Q", 2) + good[17:])
    with pytest.raises(UserError, match="version 2"):
        idxmap.read_index(tmp_path / "d")
    idx.unlink()
    with pytest.raises(UserError, match=r"d\.idx does not exist"):
        idxmap.token_count(tmp_path / "d.bin")


def test_merge_is_one_run_over_all(tmp_path: Path):
    documents = random_documents(60, 500)
    parts = [documents[:20], documents[20:21], documents[21:]]
    for number, part in enumerate(parts):
        write(tmp_path / f"p{number}", part, np.uint16)
    write_upstream(tmp_path / "all", documents, np.uint16)
    names = [str(tmp_path / f"p{i}") for i in range(3)]
    idxmap.merge([names[0] + ".idx", *names[1:]], str(tmp_path / "merged"))
    assert same_pair(tmp_path / "merged", tmp_path / "all")


def test_merge_refuses_what_does_not_fit(tmp_path: Path):
    write(tmp_path / "a", [[[1]]], np.uint16)
    write(tmp_path / "b", [[[1]]], np.int32)
    with pytest.raises(UserError, match="different tokenizers"):
        idxmap.merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c"))
    with pytest.raises(UserError, match="both an input and the output"):
        idxmap.merge([str(tmp_path / "a")], str(tmp_path / "a"), overwrite=True)
    with pytest.raises(UserError, match="nothing to merge"):
        idxmap.merge([], str(tmp_path / "c"))
    assert not (tmp_path / "c.bin").exists()


def test_eod_share(tmp_path: Path):
    write(tmp_path / "all", [[[5, 9]], [], [[9]], [[1], [2, 9]]])
    write(tmp_path / "half", [[[5, 9]], [[9, 4]]])
    assert idxmap.eod_share(tmp_path / "all", 9) == 1.0
    assert idxmap.eod_share(tmp_path / "half", 9) == 0.5
    assert idxmap.eod_share(tmp_path / "all", 3) == 0.0


def test_an_index_that_points_outside_is_refused(tmp_path: Path):
    with idxmap.Writer(str(tmp_path / "d"), np.dtype(np.uint16)) as writer:
        writer.write(np.arange(12), np.array([4, 4, 4]), np.array([1, 1, 1]))
        writer.commit()
    path = tmp_path / "d.idx"
    whole = path.read_bytes()
    for place in (len(whole) - 9, 34 + 3 * 4 + 7):  # a document's first sequence, a pointer
        content = bytearray(whole)
        content[place] = 0x7F
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"d\.idx points outside"):
            idxmap.eod_share(tmp_path / "d", 3)
