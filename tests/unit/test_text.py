"""Preprocessing writes what Megatron-LM's tool writes, from every format, or says what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import text_fixtures as fixtures

from megatron_patch.data import idxmap, sources, text, tokenizers
from megatron_patch.data.tokenizers import TokenizerRequest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "toolkits/pretrain_data_preprocessing/preprocess_data.py"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.qwen_like(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.llama3_like(tmp_path_factory.mktemp("llama3") / "model")


def documents() -> list[str]:
    texts = [*fixtures.corpus(), "", "x", "  ", "<|endoftext|> inside", "\u1df6\u0897 rare"]
    return [texts[i % len(texts)] + str(i) * (i % 3) for i in range(150)] + ["", "last"]


def write_jsonl(path: Path, values: list, key: str = "text") -> Path:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for number, value in enumerate(values):
            record = {"id": number, key: value, "after": [1, {"x": None}]}
            out.write(json.dumps(record, ensure_ascii=bool(number % 2)) + "\n")
    return path


def run(*arguments: object) -> int:
    return text.main([str(argument) for argument in arguments])


def pair(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    return tuple(Path(f"{prefix}_{key}_document{s}").read_bytes() for s in (".bin", ".idx"))


def upstream(prefix: Path, model: Path, values: list, *, eod: bool, key: str = "text") -> None:
    """What ``tools/preprocess_data.py`` does with these values, on the wheel's own classes."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(str(model))
    builder = IndexedDatasetBuilder(
        f"{prefix}_{key}_document.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    for value in values:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in value if isinstance(value, list) else [value]:
            sentence_ids = tokenizer.text_to_ids(sentence)
            if sentence_ids:
                ids += sentence_ids
                lengths.append(len(sentence_ids))
        if ids and eod:
            ids.append(tokenizer.eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}_{key}_document.idx")


# --------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("engine", ["auto", "pieces", "reference"])
@pytest.mark.parametrize("eod", [True, False])
@pytest.mark.parametrize("model", ["qwen", "llama3"])
def test_bytes_are_upstreams(model: str, eod: bool, engine: str, tmp_path: Path, request):
    folder = request.getfixturevalue(model)
    values = [*documents(), ["two ", "", "sequences"], [], ["", ""]]
    source = write_jsonl(tmp_path / "d.jsonl", values)
    flags = ["--append-eod"] if eod else []
    status = run(
        "--input-path", source, "--output-path", tmp_path / "ours", "--tokenizer-type",
        "HuggingFaceTokenizer", "--tokenizer-model", folder, "--engine", engine, *flags,
    )  # fmt: skip
    assert status == 0
    upstream(tmp_path / "theirs", folder, values, eod=eod)
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


@pytest.mark.parametrize("block", [50, 333, 4096, 100_000])
@pytest.mark.parametrize("workers", [1, 3])
def test_bytes_do_not_depend_on_cutting_or_workers(
    block: int, workers: int, tmp_path: Path, qwen: Path, monkeypatch
):
    values = documents()[:70] if block < 1000 else documents()
    source = write_jsonl(tmp_path / "d.jsonl", values)
    with source.open("a") as out:
        out.write('\n\n  \n{"text": "no newline at the end"}')
    monkeypatch.setattr(sources, "BLOCK", block)
    monkeypatch.setattr(sources.tasks, "__kwdefaults__", {"block": block, "shard": 0, "shards": 1})
    assert (
        run(
            "--input", source, "--output-prefix", tmp_path / "ours", "--hf-model", qwen,
            "--append-eod", "--workers", workers,
        )
        == 0
    )  # fmt: skip
    upstream(tmp_path / "theirs", qwen, [*values, "no newline at the end"], eod=True)
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


def test_several_keys(tmp_path: Path, qwen: Path):
    records = [{"text": t, "title": t[:20]} for t in documents()[:40]]
    source = tmp_path / "d.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--append-eod", "--json-keys", "text", "title") == 0  # fmt: skip
    for key in ("text", "title"):
        upstream(tmp_path / "t", qwen, [r[key] for r in records], eod=True, key=key)
        assert pair(tmp_path / "o", key) == pair(tmp_path / "t", key)


def parquet(path: Path, values: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": range(len(values)), "text": values}), path, row_group_size=23)


def zst(data: bytes) -> bytes:
    import zstandard

    half = len(data) // 2
    compress = zstandard.ZstdCompressor().compress
    return compress(data[:half]) + compress(data[half:])


FORMATS = {
    "jsonl": lambda p, v: write_jsonl(p, v),
    "ndjson": lambda p, v: write_jsonl(p, v),
    "json": lambda p, v: write_jsonl(p, v),
    "array.json": lambda p, v: p.write_text(json.dumps([{"text": t} for t in v])),
    "pretty.json": lambda p, v: p.write_text(
        json.dumps([{"text": t} for t in v], indent=2, ensure_ascii=False)
    ),
    "objects.json": lambda p, v: p.write_text(
        "\n".join(json.dumps({"text": t}, indent=1) for t in v)
    ),
    "array.json.gz": lambda p, v: p.write_bytes(
        gzip.compress(json.dumps([{"text": t} for t in v]).encode())
    ),
    "jsonl.gz": lambda p, v: p.write_bytes(
        gzip.compress(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in v))
    ),
    "jsonl.zst": lambda p, v: p.write_bytes(
        zst(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in v))
    ),
    "bom.jsonl": lambda p, v: p.write_bytes(
        b"\xef\xbb\xbf" + b"".join(json.dumps({"text": t}).encode() + b"\r\n" for t in v)
    ),
    "parquet": parquet,
}


@pytest.mark.parametrize("block", [300, 1 << 22])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_bytes(
    name: str, block: int, tmp_path: Path, qwen: Path, monkeypatch
):
    values = documents()
    if block < 1000:
        values = values[:40] + values[-3:]
    monkeypatch.setattr(sources.tasks, "__kwdefaults__", {"block": block, "shard": 0, "shards": 1})
    source = tmp_path / f"d.{name}"
    FORMATS[name](source, values)
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--append-eod", "--engine", "reference") == 0  # fmt: skip
    upstream(tmp_path / "t", qwen, values, eod=True)
    assert pair(tmp_path / "o") == pair(tmp_path / "t")


@pytest.mark.parametrize("block", [40, 1 << 22])
@pytest.mark.parametrize("compressed", [False, True])
def test_text_files(compressed: bool, block: int, tmp_path: Path, qwen: Path, monkeypatch):
    monkeypatch.setattr(sources.tasks, "__kwdefaults__", {"block": block, "shard": 0, "shards": 1})
    data = "one\ntwo\n\nthree\r\n\r\n \nfour  \nfive\n<SEP>six\n\n\n"
    suffix = ".txt.gz" if compressed else ".txt"
    source = tmp_path / f"d{suffix}"
    raw = data.encode()
    source.write_bytes(gzip.compress(raw) if compressed else raw)
    lines = ["one", "two", "three", "four  ", "five", "<SEP>six"]
    cases = {
        (): [data],
        ("--txt-documents", "file"): [data],
        ("--txt-documents", "line"): lines,
        ("--txt-documents", "blank-line"): ["one\ntwo", "three", "four  \nfive\n<SEP>six"],
        ("--txt-separator", "<SEP>"): [data.split("<SEP>")[0].strip("\r\n"), "six"],
    }
    for number, (flags, values) in enumerate(cases.items()):
        prefix = tmp_path / f"o{number}"
        assert run("--input", source, "--output-path", prefix, "--hf-model", qwen,
                   "--append-eod", *flags) == 0  # fmt: skip
        upstream(tmp_path / "t", qwen, values, eod=True)
        assert pair(prefix) == pair(tmp_path / "t"), flags


def test_folders_and_patterns(tmp_path: Path, qwen: Path, capsys):
    values = documents()
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", values[:30])
    write_jsonl(folder / "b" / "c.jsonl", values[30:31])
    FORMATS["jsonl.gz"](folder / "c.jsonl.gz", values[31:50])
    (folder / "d.txt").write_text("a text")
    (folder / "e.txt").write_text("another")
    write_jsonl(folder / "f.jsonl", values[50:])
    (folder / "README.md").write_text("left out")
    (folder / ".hidden.jsonl").write_text("{")
    expected = [*values[:50], "a text", "another", *values[50:]]
    upstream(tmp_path / "t", qwen, expected, eod=True)
    assert run("--input", folder, "--output-path", f"{tmp_path}/out/", "--hf-model", qwen,
               "--append-eod") == 0  # fmt: skip
    assert pair(tmp_path / "out" / "corpus") == pair(tmp_path / "t")
    assert "left out 1 files" in capsys.readouterr().err
    assert run("--input", f"{folder}/**/*.jsonl", f"{folder}/[de].txt", "--output-path",
               tmp_path / "g", "--hf-model", qwen, "--append-eod") == 0  # fmt: skip
    upstream(tmp_path / "t", qwen, [*values[:31], *values[50:], "a text", "another"], eod=True)
    assert pair(tmp_path / "g") == pair(tmp_path / "t")
    assert run("--input", folder, folder / "a.jsonl", "--output-path", tmp_path / "h",
               "--hf-model", qwen) == 2  # fmt: skip
    assert "given twice" in capsys.readouterr().err


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shards_merged_are_one_run(shards: int, tmp_path: Path, qwen: Path, capsys):
    values = documents()
    write_jsonl(tmp_path / "a.jsonl", values[:60])
    FORMATS["jsonl.gz"](tmp_path / "b.jsonl.gz", values[60:80])
    write_jsonl(tmp_path / "c.jsonl", values[80:])
    common = ["--input", *(tmp_path / n for n in ("a.jsonl", "b.jsonl.gz", "c.jsonl"))]
    common += ["--hf-model", qwen, "--append-eod"]
    for shard in reversed(range(shards)):
        assert run(*common, "--output-path", tmp_path / "o", "--num-shards", shards,
                   "--shard-index", shard) == 0  # fmt: skip
        if shard == 1:
            assert run("--merge", "--num-shards", shards, "--output-path", tmp_path / "o") == 2
            assert "shards are not there" in capsys.readouterr().err
    assert run("--merge", "--num-shards", shards, "--output-path", tmp_path / "o") == 0
    upstream(tmp_path / "t", qwen, values, eod=True)
    assert pair(tmp_path / "o") == pair(tmp_path / "t")
    parts = sorted(tmp_path.glob("o_shard-*.idx"))
    assert len(parts) == shards
    assert run("--merge", "--input-path", *parts, "--output-path", tmp_path / "again") == 0
    assert pair(tmp_path / "again") == pair(tmp_path / "t")


@pytest.mark.parametrize("extra", [0, 64_100])
def test_dtype_follows_the_larger_of_tokenizer_and_padded_size(
    extra: int, tmp_path: Path, qwen: Path
):
    source = write_jsonl(tmp_path / "d.jsonl", ["a b c"])
    flags = ["--padded-vocab-size", 1500 + extra] if extra else []
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--append-eod", *flags) == 0  # fmt: skip
    index = idxmap.read_index(tmp_path / "o_text_document")
    assert index.dtype == (np.int32 if extra else np.uint16)


def test_megatrons_dataset_reads_it(tmp_path: Path, qwen: Path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoTokenizer

    values = [t for t in documents() if t]
    source = write_jsonl(tmp_path / "d.jsonl", values)
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--append-eod") == 0  # fmt: skip
    dataset = IndexedDataset(str(tmp_path / "o_text_document"))
    hf = AutoTokenizer.from_pretrained(qwen)
    assert len(dataset) == len(values)
    for number in range(0, len(values), 17):
        ids = dataset[number].tolist()
        assert ids[-1] == hf.eos_token_id
        assert ids[:-1] == hf(values[number]).input_ids
    total = sum(len(dataset[i]) for i in range(len(dataset)))
    assert total == int(dataset.sequence_lengths.sum())
    assert total == idxmap.token_count(tmp_path / "o_text_document")


# ---------------------------------------------------------------------------------- what is printed


def test_report(tmp_path: Path, qwen: Path, capsys):
    source = write_jsonl(tmp_path / "d.jsonl", ["a b", "", "c"])
    with source.open("a") as out:
        out.write("\n \n")
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--append-eod") == 0  # fmt: skip
    said = capsys.readouterr()
    prefix = f"{tmp_path}/o_text_document"
    assert f"\n  --data-path {prefix}\n" in said.out
    eod = tokenizers.load(TokenizerRequest("HuggingFaceTokenizer", str(qwen))).eod
    assert f"EOD        {eod.id} '<|endoftext|>', after each document" in said.out
    assert "BOS        the tokenizer has none" in said.out
    assert f"tokens     {idxmap.token_count(prefix)} " in said.out
    assert "2 blank lines passed over, 1 documents without a token kept" in said.out
    assert "WARNING" not in said.err


def test_data_without_eod_warns(tmp_path: Path, llama3: Path, capsys):
    source = write_jsonl(tmp_path / "d.jsonl", ["a b"])
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", llama3) == 0
    said = capsys.readouterr()
    assert "WARNING: no EOD was appended" in said.err
    assert "--append-eod" in said.err
    assert "'<|end|>', NOT appended" in said.out
    assert "'<|begin|>', before each document" in said.out
    assert run("--input", source, "--output-path", tmp_path / "p", "--hf-model", llama3,
               "--append-eod", "--no-special-tokens") == 0  # fmt: skip
    assert "'<|begin|>', not added" in capsys.readouterr().out


def test_eod_that_does_not_exist(tmp_path: Path, capsys):
    folder = fixtures.qwen_like(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    source = write_jsonl(tmp_path / "d.jsonl", ["a"])
    common = ["--input", source, "--output-path", tmp_path / "o", "--hf-model", folder]
    assert run(*common, "--append-eod") == 2
    assert "names no EOS token" in capsys.readouterr().err
    assert not list(tmp_path.glob("o*"))
    assert run(*common, "--append-eod", "--eod-token", "<|im_end|>") == 0
    ids = idxmap.read_index(tmp_path / "o_text_document").tokens(0)
    assert (
        ids[-1]
        == tokenizers.load(
            TokenizerRequest("HuggingFaceTokenizer", str(folder), eod_token="<|im_end|>")
        ).eod.id
    )


# ---------------------------------------------------------------------------------------- bad input

BAD = {
    '{"text": "cut': "is not valid JSON",
    '{"content": "x"}': "has no key 'text' (keys: 'content'",
    '{"text": null}': "has null under 'text', not text",
    '{"text": 3}': "has number under 'text'",
    '{"text": ["a", 1]}': "has array under 'text'",
    '["text"]': "is a JSON array, not an object",
    "null": "is a JSON null, not an object",
    '{"text": "\\ud800 lone"}': "has a lone surrogate \\ud800",
    '{"text": ["ok", "\\udfff"]}': "has a lone surrogate \\udfff",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines(line: str, tmp_path: Path, qwen: Path, capsys):
    source = tmp_path / "d.jsonl"
    good = ["first", "last"]
    source.write_text(f'{{"text": "first"}}\n\n{line}\n{{"text": "last"}}\n')
    common = ["--input", source, "--hf-model", qwen, "--append-eod"]
    assert run(*common, "--output-path", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert f"error: {source} line 3 {BAD[line]}" in error
    assert "--on-bad-line skip" in error
    assert not list(tmp_path.glob("o*"))
    assert run(*common, "--output-path", tmp_path / "o", "--on-bad-line", "skip") == 0
    said = capsys.readouterr()
    assert "1 of 4 records were left out" in said.err
    assert f"{source} line 3 {BAD[line]}" in said.err
    upstream(tmp_path / "t", qwen, good, eod=True)
    assert pair(tmp_path / "o") == pair(tmp_path / "t")


def test_bytes_that_are_not_utf8(tmp_path: Path, qwen: Path, capsys):
    source = tmp_path / "d.jsonl"
    source.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen) == 2
    assert "line 2 is not UTF-8 (byte 10 of the line)" in capsys.readouterr().err
    (tmp_path / "t.txt").write_bytes(b"abc\xfe")
    assert run("--input", tmp_path / "t.txt", "--output-path", tmp_path / "o", "--hf-model",
               qwen) == 2  # fmt: skip
    assert "t.txt is not UTF-8 (byte 3)" in capsys.readouterr().err


def test_what_upstreams_parser_accepts_is_accepted(tmp_path: Path, qwen: Path):
    source = tmp_path / "d.jsonl"
    big = "1" * 400
    source.write_text(f'{{"text": "a", "x": NaN}}\n{{"x": {big}, "text": "b", "text": "c"}}\n')
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen) == 0
    upstream(tmp_path / "t", qwen, ["a", "c"], eod=False)
    assert pair(tmp_path / "o") == pair(tmp_path / "t")


@pytest.mark.parametrize("name", ["jsonl", "jsonl.gz", "array.json", "parquet"])
@pytest.mark.parametrize("block", [200, 1 << 22])
def test_place_of_a_bad_record(
    name: str, block: int, tmp_path: Path, qwen: Path, capsys, monkeypatch
):
    monkeypatch.setattr(sources.tasks, "__kwdefaults__", {"block": block, "shard": 0, "shards": 1})
    values: list = [f"document {i} " * 5 for i in range(90)]
    values[61] = None
    source = tmp_path / f"d.{name}"
    FORMATS[name](source, values)
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--workers", 2) == 2  # fmt: skip
    noun = {"array.json": "item", "parquet": "row"}.get(name, "line")
    assert f"d.{name} {noun} 62 has null" in capsys.readouterr().err


def test_line_number_in_a_later_shard(tmp_path: Path, qwen: Path, capsys):
    values: list = [f"document {i} " * 5 for i in range(90)]
    values[80] = 7
    source = write_jsonl(tmp_path / "d.jsonl", values)
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--num-shards", 3, "--shard-index", 2) == 2  # fmt: skip
    assert "line 81 has number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "d.jsonl.gz",
            gzip.compress(b'{"text": "a b c"}\n' * 9, mtime=0)[:-9],
            "damaged or cut short",
        ),
        ("d.jsonl.gz", b"no gzip", "damaged or cut short"),
        ("d.jsonl.zst", b"no zstandard", "damaged or cut short"),
        ("d.json", b'[{"text": "a"}, {"text": "b"', "item 2 is not valid JSON"),
        ("d.json", b'[{"text": "a"} {"text": "b"}]', "a comma is missing"),
        ("d.json", b'[{"text": "a"}] x', "text after the array's end"),
        ("d.parquet", b"PAR0", "cannot be read as Parquet"),
        ("d.csv", b"a,b", "suffix that is not known"),
        ("d.jsonl", b"", "no token in 0 records"),
        ("d.jsonl", b'{"text": ""}\n', "no token in 1 records"),
    ],
)
def test_files_that_cannot_be_used(name: str, data: bytes, message: str, tmp_path, qwen, capsys):
    (tmp_path / name).write_bytes(data)
    assert run("--input", tmp_path / name, "--output-path", tmp_path / "o", "--hf-model", qwen) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("o*"))


def test_missing_parquet_column(tmp_path: Path, qwen: Path, capsys):
    parquet(tmp_path / "d.parquet", ["a"])
    assert run("--input", tmp_path / "d.parquet", "--output-path", tmp_path / "o", "--hf-model",
               qwen, "--json-keys", "content") == 2  # fmt: skip
    assert "has no column 'content'; it has id, text" in capsys.readouterr().err


# -------------------------------------------------------------------------------- when things break


class Failing:
    """An engine that fails on one text, in the way that is asked for."""

    name = "failing"

    def __init__(self, inner: tokenizers.Engine, how: str) -> None:
        self.inner = inner
        self.how = how

    def encode_many(self, texts):
        if any("FAIL HERE" in t for t in texts):
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "panic":
                raise BaseException("a panic in Rust")
            raise RuntimeError("boom")
        return self.inner.encode_many(texts)


@pytest.mark.parametrize("how", ["raise", "panic", "kill"])
def test_a_worker_that_fails_ends_the_run(
    how: str, tmp_path: Path, qwen: Path, capsys, monkeypatch
):
    monkeypatch.setattr(sources.tasks, "__kwdefaults__", {"block": 500, "shard": 0, "shards": 1})
    monkeypatch.setattr(sources, "BLOCK", 500)
    values = [f"document {i} " * 5 for i in range(300)]
    values[200] = "FAIL HERE"
    source = write_jsonl(tmp_path / "d.jsonl", values)
    real = tokenizers.load

    def load(request):
        loaded = real(request)
        engine = Failing(loaded.reference, how)
        return tokenizers.replace(loaded, engine=engine, reference=engine)

    monkeypatch.setattr(tokenizers, "load", load)
    start = time.monotonic()
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen,
               "--workers", 2, "--engine", "reference") == 2  # fmt: skip
    assert time.monotonic() - start < 15
    error = capsys.readouterr().err
    if how == "kill":
        assert "a worker process was killed by signal 9" in error
        assert f"at {source}, bytes " in error
    else:
        assert f"{source} line 201: failing cannot encode it: " in error
        assert ("a panic in Rust" if how == "panic" else "RuntimeError: boom") in error
    assert not list(tmp_path.glob("o*"))


def test_the_audit_catches_an_engine_that_goes_wrong_later(
    tmp_path: Path, qwen: Path, capsys, monkeypatch
):
    loaded = tokenizers.load(TokenizerRequest("HuggingFaceTokenizer", str(qwen)))

    class Drifting:
        name = "drifting"

        def encode_many(self, texts):
            return [ids[:-1] for ids in loaded.reference.encode_many(texts)]

    def accelerate(tokenizer, sample):
        return tokenizers.replace(tokenizer, engine=Drifting()), tokenizers.Proof(True)

    monkeypatch.setattr(tokenizers, "accelerate", accelerate)
    source = write_jsonl(tmp_path / "d.jsonl", ["some words"])
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen) == 2
    assert "line 1: drifting gives other ids than tokenizers" in capsys.readouterr().err
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_half_file(number: int, tmp_path: Path, qwen: Path):
    source = tmp_path / "d.jsonl"
    line = json.dumps({"text": "\n".join(fixtures.corpus())}) + "\n"
    with source.open("w") as out:
        for _ in range(120_000_000 // len(line)):
            out.write(line)
    command = [sys.executable, str(TOOL), "--input", str(source), "--output-path",
               str(tmp_path / "o"), "--hf-model", str(qwen), "--append-eod", "--workers", "2",
               "--engine", "reference"]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job inherits an ignored SIGINT, which Python would keep.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    partial = tmp_path / "o_text_document.bin.partial"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (partial.exists() and partial.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert children
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert not (tmp_path / "o_text_document.bin").exists()
    assert not (tmp_path / "o_text_document.idx").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "nothing was written" in error
        assert "Traceback" not in error
        assert not list(tmp_path.glob("o*"))
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


def test_a_full_disk_is_an_error_not_a_hang(tmp_path: Path, qwen: Path, capsys, monkeypatch):
    def full(path, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(idxmap, "write_at", full)
    source = write_jsonl(tmp_path / "d.jsonl", ["a"] * 10)
    assert run("--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen) == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.glob("o*"))


# --------------------------------------------------------------------------------- the command line


def test_existing_output_is_kept(tmp_path: Path, qwen: Path, capsys):
    source = write_jsonl(tmp_path / "d.jsonl", ["a"])
    common = ["--input", source, "--output-path", tmp_path / "o", "--hf-model", qwen]
    assert run(*common) == 0
    before = pair(tmp_path / "o")
    write_jsonl(source, ["b c d"])
    assert run(*common) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert pair(tmp_path / "o") == before
    assert run(*common, "--overwrite") == 0
    assert pair(tmp_path / "o") != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-path", "o"], "--input-path is needed"),
        (["--input", "d"], "--output-path is needed"),
        (["--input", "/no/such", "--output-path", "o"], "does not exist"),
        (["--input", "/no/*.jsonl", "--output-path", "o"], "matches no file"),
        (["--input", "d", "--output-path", "o", "--num-shards", "2"], "go together"),
        (["--input", "d", "--output-path", "o", "--shard-index", "0"], "go together"),
        (
            ["--input", "d", "--output-path", "o", "--num-shards", "2", "--shard-index", "2"],
            "outside 0 to 1",
        ),
        (["--merge", "--output-path", "o"], "--merge takes either"),
        (["--input", "d", "--output-path", "o", "--json-keys", "a", "a"], "names a key twice"),
    ],
)
def test_flags_that_do_not_go(arguments: list[str], message: str, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_two_names_with_two_values(capsys):
    assert run("--input", "a", "--input-path", "b", "--output-path", "o") == 2
    assert "--input a and --input-path b are the same setting" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--no-such-flag")


def test_pais_command_line(tmp_path: Path, llama3: Path, capsys):
    from transformers import AutoTokenizer

    source = write_jsonl(tmp_path / "d.jsonl", documents()[:5], key="content")
    assert run("--input", source, "--output_prefix", tmp_path / "o", "--patch-tokenizer-type",
               "LLama3Tokenizer", "--jsonl_keys", "content", f"--load={llama3}", "--workers", 2,
               "--partitions", 1, "--keep-sequential-samples", "--append-eod", "--seq-length",
               2048) == 0  # fmt: skip
    said = capsys.readouterr()
    assert "--seq-length has no effect" in said.err
    assert "--partitions has no effect" in said.err
    hf = AutoTokenizer.from_pretrained(llama3)
    index = idxmap.read_index(tmp_path / "o_content_document")
    expected = hf(documents()[0], add_special_tokens=False).input_ids
    assert index.tokens(0).tolist() == [*expected, hf.eos_token_id]


def test_nothing_heavy_is_imported(tmp_path: Path, qwen: Path):
    source = write_jsonl(tmp_path / "d.jsonl", ["a"])
    code = (
        "import sys\nfrom megatron_patch.data.text import main\n"
        f"assert main(['--input', {str(source)!r}, '--output-path', {str(tmp_path / 'o')!r}, "
        f"'--hf-model', {str(qwen)!r}]) == 0\n"
        "heavy = {'torch', 'megatron', 'transformers', 'awkward', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_tool_runs_from_anywhere(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(TOOL), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--input-path" in done.stdout
    assert "--merge" in done.stdout


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path, qwen: Path):
    psutil = pytest.importorskip("psutil")

    def peak(copies: int) -> int:
        source = tmp_path / f"d{copies}.jsonl"
        block = "".join(json.dumps({"text": f"short text {i}"}) + "\n" for i in range(50_000))
        with source.open("w") as out:
            for _ in range(copies):
                out.write(block)
        process = psutil.Popen(
            [sys.executable, str(TOOL), "--input", str(source), "--output-path",
             str(tmp_path / f"o{copies}"), "--hf-model", str(qwen), "--workers", "2"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        highest = 0
        while process.poll() is None:
            try:
                tree = [process, *process.children(recursive=True)]
                highest = max(highest, sum(p.memory_full_info().uss for p in tree))
            except psutil.Error:
                pass
            time.sleep(0.02)
        assert process.returncode == 0
        source.unlink()
        return highest

    small, large = peak(20), peak(60)
    assert large < small * 1.1 + 8e6, (small, large)
