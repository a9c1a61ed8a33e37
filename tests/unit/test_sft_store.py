"""Sample sets: the same from every format, any number of workers, offline and online."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import chat_fixtures as fx
import text_fixtures
from chat_fixtures import assistant, call, user

from megatron_patch import cli
from megatron_patch.data import idxmap, packing, sft_store, show
from megatron_patch.data.chat import Options
from megatron_patch.data.sft_store import Job, build, cached, open_samples
from megatron_patch.data.tokenizers import TokenizerRequest
from megatron_patch.util import UserError

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "toolkits/sft_data_preprocessing/build_idxmap_sft_dataset.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fx.model(tmp_path_factory.mktemp("model") / "m", "thinking")


def records(count: int = 120) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for number, text in zip(range(count), text_fixtures.corpus() * 9, strict=False):
        size = 37 * (number % 50)
        messages = [user(text[:size]), assistant(text[size : 2 * size], reasoning_content="hm")]
        if number % 3 == 0:
            messages += [user(f"{number}?"), assistant(f"é {number}")]
        if number % 7 == 0:
            messages[1]["tool_calls"] = [call("f", a=number)]
        made.append({"messages": messages, "id": number})
    return made


def job(model: Path, source: Path, output: Path, **more: Any) -> Job:
    options = Options(**more.pop("options", {"max_length": 600}))
    request = TokenizerRequest("HuggingFaceTokenizer", str(model))
    return Job((str(source),), str(output), request, options=options, **more)


def jsonl(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def content(samples: sft_store.Samples) -> list[tuple[list[int], list[int]]]:
    return [
        (s.ids.tolist(), s.mask.tolist()) for s in map(samples.__getitem__, range(len(samples)))
    ]


def expected(model: Path, rows: list[Any]) -> list[tuple[list[int], list[int]]]:
    """One after the other, in this process."""
    outcomes, _ = sft_store.encoder_of(job(model, model, model)).encode(rows)
    return [(s.ids.tolist(), s.mask.tolist()) for s in outcomes if s is not None]


def test_every_format_and_any_workers_give_the_same(model, tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    rows = records()
    want = expected(model, rows)
    assert 60 < len(want) < 120  # some are too long
    plain = jsonl(tmp_path / "a.jsonl", rows)
    data = plain.read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(data))
    (tmp_path / "d.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "e.parquet", row_group_size=17)
    monkeypatch.setattr(sft_store, "_BLOCK", 1 << 14)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.json", "e.parquet"):
        for workers in (1, 3) if name == "a.jsonl" else (2,):
            out = tmp_path / f"{name}-{workers}"
            samples = build(job(model, tmp_path / name, out, workers=workers))
            assert content(samples) == want, name
            assert samples.lengths.tolist() == [len(ids) for ids, _ in want]
            assert samples.trained().tolist() == [sum(mask) for _, mask in want]
            assert samples.meta["records"] == 120
            assert samples.meta["counts"]["overlong_dropped"] == 120 - len(want)
            assert samples.meta["trained_tokens"] == sum(sum(mask) for _, mask in want)
    with pytest.raises(IndexError):
        samples[len(samples)]
    again = pickle.loads(pickle.dumps(samples))  # what a loader's process gets
    assert content(again) == want


def test_online_is_offline(model, tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", records(40))
    offline = build(job(model, source, tmp_path / "off"))
    online = cached(job(model, source, tmp_path / "unused"), tmp_path / "cache")
    assert content(online) == content(offline)

    def batches(samples: sft_store.Samples) -> list[dict[str, Any]]:
        plan = packing.schedule(samples.lengths, 1024, multiple=4, ranks=2, seed=5)
        return [
            packing.item([(samples[int(n)].ids, samples[int(n)].mask) for n in plan.packs[int(p)]],
                         1024, multiple=4)
            for p in plan.order.ravel()
        ]  # fmt: skip

    for one, other in zip(batches(online), batches(offline), strict=True):
        assert all(np.array_equal(one[key], other[key]) for key in one)
    totals = sum(item["loss_mask"].sum() for item in batches(online))
    assert totals == online.meta["trained_tokens"]

    capsys.readouterr()
    assert cached(job(model, source, tmp_path / "x"), tmp_path / "cache").prefix == online.prefix
    assert capsys.readouterr().out == ""  # found, not made
    other = cached(job(model, source, tmp_path, options={"max_length": 300}), tmp_path / "cache")
    assert other.prefix != online.prefix
    os.utime(source, (1, 1))
    changed = cached(job(model, source, tmp_path), tmp_path / "cache")
    assert changed.prefix != online.prefix
    # A run that was killed before its end leaves no .json: it is made again.
    Path(changed.prefix + ".json").unlink()
    assert content(cached(job(model, source, tmp_path), tmp_path / "cache")) == content(offline)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(65499, "uint16"), (65500, "int32"), (65536, "int32"), (151936, "int32")]
)
def test_any_vocabulary_size(model, tmp_path, rows, dtype):
    source = jsonl(tmp_path / "a.jsonl", records(9))
    samples = build(job(model, source, tmp_path / "o", padded_vocab_size=rows))
    assert samples.ids.dtype == np.dtype(dtype)
    assert samples.mask.dtype == np.uint8
    assert content(samples) == expected(model, records(9))


def test_large_ids_survive(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "m"
    folder.mkdir()
    vocab = {f"w{n}": n for n in range(70000)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w69999"}')
    ids = [1, 65499, 65500, 65535, 65536, 65537, 69999]
    source = jsonl(tmp_path / "a.jsonl", [{"input_ids": ids, "labels": [-100, *ids[1:]]}])
    samples = build(job(folder, source, tmp_path / "o"))
    assert samples[0].ids.tolist() == ids
    assert samples[0].mask.tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_bad_records_are_named_by_line(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sft_store, "_BLOCK", 1 << 12)
    rows: list[Any] = records(60)
    rows[41] = '{"messages": ['
    rows[50] = {"messages": [user("a")]}
    rows[20] = ""
    source = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=r"a\.jsonl line 42 is not valid JSON"):
        build(job(model, source, tmp_path / "o", workers=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]
    samples = build(job(model, source, tmp_path / "o", workers=3, skip_bad=True))
    said = capsys.readouterr()
    assert "2 of 60 records were left out" in said.err
    assert "line 51 has no assistant turn" in said.err
    assert "1 blank lines passed over" in said.out
    assert samples.meta["bad"] == 2
    good = [row for n, row in enumerate(rows) if n not in (20, 41, 50)]
    assert content(samples) == expected(model, good)


def test_sets_are_whole_or_absent(model, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", records(9))
    made = build(job(model, source, tmp_path / "o"))
    with pytest.raises(UserError, match="exists already"):
        build(job(model, source, tmp_path / "o"))
    build(job(model, source, tmp_path / "o", overwrite=True))
    with pytest.raises(UserError, match="no finished sample set"):
        open_samples(tmp_path / "none")
    other = build(job(model, jsonl(tmp_path / "b.jsonl", records(5)), tmp_path / "p"))
    for suffix in (".bin", ".idx"):
        shutil.copy(other.prefix + "_mask" + suffix, made.prefix + "_mask" + suffix)
    with pytest.raises(UserError, match="do not belong together"):
        open_samples(made.prefix)
    empty = jsonl(tmp_path / "c.jsonl", [{"messages": [user("a"), assistant("b", weight=0)]}])
    with pytest.raises(UserError, match="no sample is left of 1 records"):
        build(job(model, empty, tmp_path / "q"))
    assert not list(tmp_path.glob("q*"))
    with pytest.raises(UserError, match="is text"):
        build(job(model, (tmp_path / "d.txt").write_text("x") and tmp_path / "d.txt", tmp_path))


def test_upstream_reads_the_streams(model, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    samples = build(job(model, jsonl(tmp_path / "a.jsonl", records(9)), tmp_path / "o"))
    theirs = IndexedDataset(samples.prefix + "_ids")
    for number in range(len(samples)):
        assert theirs[number].tolist() == samples[number].ids.tolist()
    assert idxmap.token_count(samples.prefix + "_mask") == samples.meta["tokens"]


def test_memory_is_bounded(model, tmp_path):
    """Four times the records, the same memory within a tenth."""
    rows = records(400)
    peaks = []
    for times in (4, 16):
        source = tmp_path / f"{times}.jsonl"
        with source.open("w") as out:
            for _ in range(times):
                out.writelines(json.dumps(row) + "\n" for row in rows)
        code = (
            "import resource, sys\nfrom megatron_patch.data.sft_store import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            "usage = [resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF,"
            " resource.RUSAGE_CHILDREN)]\nprint('PEAK', max(usage))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "--input", str(source), "--hf_model", str(model),
             "--output-prefix", str(tmp_path / f"o{times}"), "--workers=1"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split("PEAK")[1]))
    assert peaks[1] < 1.1 * peaks[0], peaks


# ------------------------------------------------------------------------------------ command line


def test_the_tool(model, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", records(9))
    done = subprocess.run(
        [sys.executable, str(TOOL), "--input", str(source), "--load", str(model), "--output-prefix",
         str(tmp_path / "o"), "--seq-length", "600", "--on-overlong", "truncate",
         "--patch-tokenizer-type", "Qwen2Tokenizer", "--partitions", "1",
         "--extra_vocab_size=421"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "schema     messages (9)" in done.stdout
    notes = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert notes == ["--partitions", "--patch-tokenizer-type", "--extra-vocab-size"]
    assert f"--data-path {tmp_path / 'o'}" in done.stdout
    assert len(open_samples(tmp_path / "o")) == 9
    done = subprocess.run(
        [sys.executable, str(TOOL), "--input", str(source)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: --output-path is needed: the prefix of the result.\n",
    )


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--input", "x.jsonl", "--output", "o"], "--hf-model is needed"),
        (["--hf-model", ".", "--output", "o"], "--input-path is needed"),
        (["--input", "x", "--load", ".", "--output", "o", "--workers", "0"], "must be 1 or more"),
        (
            ["--input", "x", "--load", ".", "--output", "o", "--chat-template-kwargs", "["],
            "no JSON",
        ),
    ],
)
def test_mistakes_are_said_in_a_sentence(flags, why, capsys):
    assert sft_store.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error
    assert len(error.splitlines()) == 1


def test_show(model, tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", [*records(30), {"messages": [user("a")]}])
    png = tmp_path / "h.png"
    flags = ["show", "--data-path", str(source), "--hf-model", str(model), "--samples", "2"]
    flags += ["--histogram", str(png), "--max-length", "600"]
    assert show.main([*flags, "--color", "always"]) == 1
    out, err = capsys.readouterr()
    assert "\x1b[30;42m<tool_call>" in out
    assert "line 31 has no assistant turn" in err
    assert "refused    1 records in all (training ends" in out
    assert "samples    " in out and "trained (" in out
    assert "% full" in out
    assert png.read_bytes().startswith(b"\x89PNG")
    table = next(line for line in out.splitlines() if line.startswith("tokens "))
    lengths = [len(ids) for ids, _ in expected(model, records(30))]
    assert int(table.split()[1]) == min(lengths)
    assert int(table.split()[-1]) == max(lengths)
    assert show.main([*flags, "--color", "never", "--on-bad-line", "skip"]) == 0
    out, _ = capsys.readouterr()
    assert "\x1b" not in out
    assert "⟦<tool_call>" in out and "<|im_end|>⟧" in out
    assert out.count("--- ") == 2
    assert show.main([*flags, "--max-samples", "5"]) == 1
    out, _ = capsys.readouterr()
    stopped = int(out.split("stopped after ")[1].split()[0])
    assert stopped >= 5
    assert f"samples    {stopped} with" in out
    assert show.main(["show", "--data", "none", "--hf-model", str(model)]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert "data" in cli.COMMANDS


def test_show_prints_one_of_each_file_and_schema(model, tmp_path, capsys):
    plain = {"prompt": "one", "completion": "two"}
    first = jsonl(tmp_path / "a.jsonl", [*records(9), plain])
    second = jsonl(tmp_path / "b.jsonl", records(5))
    flags = ["show", "--data-path", str(first), str(second), "--hf-model", str(model)]
    assert show.main([*flags, "--samples", "1", "--histogram", ""]) == 0
    heads = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "--- " in line]
    assert heads == [f"--- {first} line 1", f"--- {first} line 10", f"--- {second} line 1"]
    assert show.main([*flags, "--samples", "0", "--histogram", ""]) == 0
    assert "--- " not in capsys.readouterr().out


def test_ticks_of_the_histogram_are_plain_numbers():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.hist([120, 900, 4000])
    show.plain_log_axis(axes)
    axes.set_xlim(100, 5000)
    axes.figure.canvas.draw()
    said = [label.get_text() for label in axes.get_xticklabels()]
    assert {"100", "200", "1000", "5000"} <= set(said) and not any("$" in text for text in said)


def test_show_into_a_closed_pipe(model, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", records(400))
    command = (
        f"set -o pipefail; {sys.executable} -m megatron_patch data show --data-path {source} "
        f"--hf-model {model} --samples 400 --histogram '' | head -1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.startswith("--- ")
