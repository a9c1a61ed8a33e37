"""The demo's text, tokenizer, model and schedule."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_patch.data import demo, idxmap
from megatron_patch.util import UserError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small stand-in for a standard library: 60 files of about 20 KB."""
    folder = tmp_path / "lib"
    for i in range(60):
        path = folder / f"part{i % 7}" / f"m{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def f_{i}_{j}(x):\n    return x * {j}\n\n" for j in range(500)))
    (folder / "test").mkdir()
    (folder / "test" / "t.py").write_text("left out\n" * 1000)
    (folder / "broken.py").write_bytes(b"\xff\xfe\xff" * 100)
    (folder / "blank.py").write_text("\n\n")
    return folder


def test_collect_is_reproducible_mixed_and_counts_what_it_leaves(library: Path) -> None:
    corpus = demo.collect([library])
    assert corpus == demo.collect([library])
    assert len(corpus.documents) == 60
    assert corpus.unreadable == 1 and corpus.over_the_cap == 0
    assert corpus.bytes == sum(len(text.encode()) for _, text in corpus.documents)
    names = [name for name, _ in corpus.documents]
    assert names != sorted(names)
    assert not any(name.startswith("test/") for name in names)


def test_collect_stops_at_the_cap(library: Path) -> None:
    corpus = demo.collect([library], max_bytes=600_000)
    assert corpus.bytes <= 600_000
    assert len(corpus.documents) + corpus.over_the_cap == 60
    # The first of the whole order, not a choice of those that fit.
    everything = [name for name, _ in demo.collect([library]).documents]
    assert [name for name, _ in corpus.documents] == everything[: len(corpus.documents)]


def test_collect_falls_back_to_the_next_folder(library: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert demo.collect([empty, library]) == demo.collect([library])


def test_too_little_text_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"only 6 bytes .* needs 500000.*--data-path"):
        demo.collect([tmp_path])


def test_this_machine_has_the_text() -> None:
    corpus = demo.collect()
    assert corpus.bytes > 4_000_000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "input"
    demo.prepare(folder)
    return folder


def test_prepare_gives_a_model_directory_and_readable_data(prepared: Path) -> None:
    from tokenizers import Tokenizer

    config = json.loads((prepared / "model" / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(prepared / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"] == demo.VOCAB_SIZE
    assert tokenizer.token_to_id(demo.END_OF_TEXT) == config["eos_token_id"] == 0
    index = idxmap.read_index(str(prepared / "demo_text_document"))
    documents = [json.loads(line)["text"] for line in (prepared / "corpus.jsonl").open()]
    assert len(index.lengths()) == len(documents)
    for i in (0, len(documents) - 1):
        ids = index.tokens(i).tolist()
        assert ids[-1] == 0
        assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == documents[i]
    # Enough for the run, so that no text is seen twice.
    needed = demo.STEPS * demo.GLOBAL_BATCH_SIZE * demo.SEQ_LENGTH
    assert index.token_count() * 0.95 > needed


def test_prepare_again_changes_nothing(prepared: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in prepared.rglob("*")}
    demo.prepare(prepared)
    assert {p: p.stat().st_mtime_ns for p in prepared.rglob("*")} == before
    assert os.listdir(prepared.parent) == ["input"]


def test_a_half_made_or_older_directory_is_made_anew(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_fill", _stand_in)
    folder = tmp_path / "run" / "input"
    first = demo.prepare(folder)
    (folder / "demo_text_document.bin").unlink()
    assert demo.read_prepared(folder) is None
    assert demo.prepare(folder) == first and demo.read_prepared(folder) == first
    monkeypatch.setattr(demo, "FORMAT", demo.FORMAT + 1)
    assert demo.read_prepared(folder) is None
    demo.prepare(folder)
    assert demo.read_prepared(folder) is not None


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Path, folders: object) -> None:
        (work / "half").write_text("x")
        raise UserError("no")

    monkeypatch.setattr(demo, "_fill", fail)
    with pytest.raises(UserError):
        demo.prepare(tmp_path / "input")
    assert list(tmp_path.iterdir()) == []


def _stand_in(work: Path, folders: object) -> demo.Prepared:
    """The files of a prepared directory without the work."""
    (work / "model").mkdir()
    for name in ("model/tokenizer.json", "demo_text_document.bin", "demo_text_document.idx"):
        (work / name).write_text("x")
    made = demo.Prepared(demo.FORMAT, "3", 1, 1, 1, "0")
    (work / "demo.json").write_text(json.dumps(vars(made)))
    return made


def test_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too little text"):
        demo.write_model(tmp_path / "m", ["a b c"])


@pytest.mark.parametrize(
    ("done", "steps", "end", "says"),
    [
        (0, 100, 100, "100 steps from scratch"),
        (40, 100, 100, "stopped at step 40; it goes on to step 100"),
        (100, 100, 200, "had finished at step 100; its schedule is extended by 100"),
        (140, 100, 200, "it goes on to step 200"),
        (200, 100, 300, "to 300"),
    ],
)
def test_schedule(done: int, steps: int, end: int, says: str) -> None:
    plan = demo.schedule(done, steps)
    assert (plan.start, plan.end, plan.then) == (done, end, end + steps)
    assert says in plan.says


def test_saved_step_reads_the_tracker_file(tmp_path: Path) -> None:
    assert demo.saved_step(tmp_path) == 0
    (tmp_path / "checkpoints").mkdir()
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("")  # a save that was killed
    assert demo.saved_step(tmp_path) == 0
    tracker.write_text("40\n")
    assert demo.saved_step(tmp_path) == 40


@pytest.mark.parametrize("ranks", [1, 2, 3, 16, 40])
def test_batch_sizes_fit_any_number_of_ranks(ranks: int) -> None:
    flags = demo.train_flags(Path("x"), ranks)
    micro, batch = (
        int(flags[flags.index(f) + 1]) for f in ("--micro-batch-size", "--global-batch-size")
    )
    assert batch % (micro * ranks) == 0 and batch >= demo.GLOBAL_BATCH_SIZE


def test_transformers_reads_the_model(prepared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared / "model")
    assert tokenizer.decode(tokenizer("def f(x):\n")["input_ids"]) == "def f(x):\n"
    config = transformers.AutoConfig.from_pretrained(prepared / "model")
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight.shape == (demo.VOCAB_SIZE, config.hidden_size)
