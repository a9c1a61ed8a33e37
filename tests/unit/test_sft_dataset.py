"""Rows of a fine-tuning run: every sample once an epoch, weights, order, resume, sources."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import chat_fixtures as fx
import text_fixtures
from chat_fixtures import assistant, user

from megatron_patch.data import idxmap, packing, sft_dataset, sft_store
from megatron_patch.data.chat import Options
from megatron_patch.data.packing import Alignment, alignment
from megatron_patch.data.sft_dataset import Rows, Shape
from megatron_patch.data.sft_store import Job
from megatron_patch.data.tokenizers import TokenizerRequest
from megatron_patch.util import UserError

LENGTHS = (3, 64, 17, 40, 5, 21, 33, 8, 60, 2, 28, 11, 49)


def write_set(prefix: Path, lengths: Any = LENGTHS) -> sft_store.Samples:
    """A prepared set; sample n is made of ids 100 * n, 100 * n + 1, ..."""
    tokens = trained = 0
    with (
        idxmap.Writer(f"{prefix}_ids", np.dtype(np.int32), overwrite=True) as ids,
        idxmap.Writer(f"{prefix}_mask", np.dtype(np.uint8), overwrite=True) as masks,
    ):
        for number, length in enumerate(lengths):
            mask = (np.arange(length) % 3 != 0).astype(np.uint8)
            row = np.arange(length, dtype=np.int32) + 100 * number
            ids.write(row, np.array([length]), np.array([1]))
            masks.write(mask, np.array([length]), np.array([1]))
            tokens, trained = tokens + length, trained + int(mask.sum())
        ids.commit()
        masks.commit()
    meta = {"format": sft_store.FORMAT, "version": sft_store.VERSION, "samples": len(lengths),
            "tokens": tokens, "trained_tokens": trained}  # fmt: skip
    Path(f"{prefix}.json").write_text(json.dumps(meta))
    return sft_store.open_samples(prefix)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> sft_store.Samples:
    return write_set(tmp_path_factory.mktemp("set") / "s")


def rows(samples: sft_store.Samples, length: int = 64, **more: Any) -> Rows:
    weights = more.pop("weights", (1.0,))
    cache = more.pop("cache", None)
    given = {"alignment": Alignment(1, 1), "ranks": 2, "micro_batches": 2, "seed": 3, **more}
    pool = sft_dataset.pool([("set", samples)], length)
    return Rows(pool, weights, Shape(length=length, **given), cache)


def step_rows(made: Rows, step: int) -> list[dict[str, Any]]:
    return [made.row(step * made.shape.rows + n) for n in range(made.shape.rows)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("unit", ["token", "sample"])
def test_an_epoch_trains_every_sample_once(samples, packed, unit):
    made = rows(samples, packed=packed, unit=unit)
    steps = made.steps(1)
    for epoch in range(2):
        seen = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            items = step_rows(made, step)
            members = [n for item in items for n in item["samples"].tolist()]
            seen += members
            fillers = sum(not item["samples"].size for item in items)
            real = sum(LENGTHS[n] for n in members) + fillers
            assert sum(int(item["cu_seqlens"][-1]) for item in items) == real
            # Whatever the unit, the weights of a step add up to its real tokens.
            assert sum(float(i["loss_mask"].sum(dtype=np.float64)) for i in items) == pytest.approx(
                real, rel=1e-6
            )
            wanted = [int((np.arange(LENGTHS[n]) % 3 != 0).sum()) for n in members]
            units = sum(wanted) if unit == "token" else len(members)
            assert items[0]["scale"] == pytest.approx(real / units)
        assert sorted(seen) == list(range(len(LENGTHS)))


def test_a_sample_weighs_one_and_its_tokens_alike(samples):
    made = rows(samples, unit="sample")
    for number in range(made.steps(1) * made.shape.rows):
        item = made.row(number, natural=True)
        for start, member in zip(item["cu_seqlens_padded"], item["samples"], strict=False):
            part = item["loss_mask"][start : start + LENGTHS[member]]
            assert part.sum() == pytest.approx(1, rel=1e-6)
            assert np.ptp(part[part > 0]) == 0
            # The target of position p is the token after it.
            ids = 100 * member + np.arange(LENGTHS[member])
            assert item["tokens"][start : start + LENGTHS[member]].tolist() == ids.tolist()
            targets = item["labels"][start : start + LENGTHS[member]][part > 0]
            assert [t % 100 % 3 != 0 for t in targets.tolist()] == [True] * targets.size


def test_epochs_differ_and_repeat_exactly(samples):
    made, again = rows(samples), rows(samples)
    per_epoch = made.steps(1)
    first, second = (
        [made.row(n)["samples"].tolist() for n in range(e * 4 * per_epoch, (e + 1) * 4 * per_epoch)]
        for e in (0, 1)
    )
    assert first != second
    # Another process, in another order.
    assert [again.row(n)["samples"].tolist() for n in reversed(range(4 * per_epoch))] == first[::-1]
    assert rows(samples, seed=4).row(0)["samples"].tolist() != first[0]


def test_length_of_a_run(samples):
    made = rows(samples)
    steps = made.steps(1)
    assert made.steps(3) == 3 * steps
    assert made.steps(2.5) == 2 * steps + -(-steps // 2)
    assert made.epochs(3 * steps) == 3
    assert made.tokens == sum(LENGTHS) + made.epoch(0).schedule.report.fillers
    assert made.describe(steps - 1)["epoch"] == 1
    assert made.describe(steps)["epoch"] == pytest.approx(1 + 1 / steps)


def test_schedules_are_kept_and_read_back(samples, tmp_path, monkeypatch):
    fresh = rows(samples)
    kept = rows(samples, cache=str(tmp_path))
    steps = fresh.steps(2)
    assert kept.steps(2) == steps
    kept.row(steps * 4 - 1)
    want = [fresh.row(number)["samples"].tolist() for number in range(steps * 4)]
    monkeypatch.setattr(packing, "schedule", None)
    again = rows(samples, cache=str(tmp_path))
    assert [again.row(number)["samples"].tolist() for number in range(steps * 4)] == want
    assert again.epoch(0).schedule.report == fresh.epoch(0).schedule.report
    monkeypatch.undo()
    other = rows(samples, cache=str(tmp_path), seed=9)
    assert other.digest != fresh.digest
    other.epoch(0)
    assert len(list(tmp_path.glob("packs-*.npz"))) == 3


def test_sets_are_read_by_weight(tmp_path):
    sets = [("a", write_set(tmp_path / "a", LENGTHS[:5])), ("b", write_set(tmp_path / "b"))]
    pool = sft_dataset.pool(sets, 64)
    made = Rows(pool, (2.0, 0.5), Shape(64, Alignment(1, 1), 1, 1, seed=0))
    counts = np.zeros(len(pool), int)
    for number in range(made.steps(2)):
        np.add.at(counts, made.row(number)["samples"], 1)
    assert counts[:5].tolist() == [4] * 5
    assert counts[5:].tolist() == [1] * len(LENGTHS)
    assert pool.name(5) == "b sample 0"


def test_long_samples(samples):
    dropped = sft_dataset.pool([("set", samples)], 40)
    assert len(dropped) == sum(n <= 40 for n in LENGTHS)
    assert dropped.counts["overlong"] == sum(n > 40 for n in LENGTHS)
    cut = sft_dataset.pool([("set", samples)], 40, on_overlong="truncate")
    assert cut.lengths.tolist() == [min(n, 40) for n in LENGTHS]
    assert cut.trained.tolist() == [int((np.arange(min(n, 40)) % 3 != 0).sum()) for n in LENGTHS]
    assert cut[1].ids.tolist() == list(range(100, 140))
    with pytest.raises(UserError, match=r"sample 1 has 64 tokens.*40.*3 samples"):
        sft_dataset.pool([("set", samples)], 40, on_overlong="error")
    with pytest.raises(UserError, match="no sample of at most --seq-length 1 "):
        sft_dataset.pool([("set", samples)], 1)
    # A cut that leaves nothing to train takes the sample with it.
    emptied = sft_dataset.pool([("set", samples)], 1 + 1, on_overlong="truncate")
    assert emptied.trained.min() == 1


def test_held_out_samples(samples):
    whole = sft_dataset.pool([("set", samples)], 64)
    train, valid = sft_dataset.split(whole, 0.2, 5)
    assert len(valid) == round(0.2 * len(LENGTHS))
    assert sorted([*train.number, *valid.number]) == list(range(len(LENGTHS)))
    again = sft_dataset.split(whole, 0.2, 5)[1]
    assert again.number.tolist() == valid.number.tolist()
    assert sft_dataset.split(whole, 0.2, 6)[1].number.tolist() != valid.number.tolist()
    with pytest.raises(UserError, match="both parts need"):
        sft_dataset.split(whole, 0.01, 5)


def test_rows_without_packing_are_as_long_as_needed(samples):
    made = rows(samples, packed=False, alignment=Alignment(4, 8))
    sizes = [made.row(n) for n in range(len(LENGTHS))]
    for item in sizes:
        (member,) = item["samples"].tolist()
        assert item["tokens"].size == -(-LENGTHS[member] // 8) * 8
    fixed = rows(samples, packed=False, varying=False)
    assert {fixed.row(n)["tokens"].size for n in range(len(LENGTHS))} == {64}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_ranks_hold_everything_once(samples, size):
    align = alignment(cp=size)
    made = rows(samples, length=64, alignment=align, micro_batches=1)
    for number in range(made.steps(1) * 2):
        item = made.row(number)
        edges = item["cu_seqlens_padded"]
        parts = [packing.cp_index(edges, size, rank) for rank in range(size)]
        assert sorted(itertools.chain(*parts)) == list(range(64))
        assert {part.size for part in parts} == {64 // size}
        if size == 1:
            continue
        for start, end in itertools.pairwise(edges.tolist()):
            chunk = (end - start) // (2 * size)
            for rank, part in enumerate(parts):
                mine = [n - start for n in part.tolist() if start <= n < end]
                want = [*range(rank * chunk, (rank + 1) * chunk)]
                want += range((2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk)
                assert mine == want


def test_chats_and_prepared_sets_give_the_same_rows(tmp_path):
    model = fx.model(tmp_path / "m", "thinking")
    chats = [
        {"messages": [user(text[: 7 * n + 3]), assistant(text[: 5 * n + 2])]}
        for n, text in zip(range(30), text_fixtures.corpus() * 3, strict=False)
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(map(json.dumps, chats)) + "\n")
    request = TokenizerRequest("HuggingFaceTokenizer", str(model))

    def job(path: str) -> Job:
        return Job((path,), str(tmp_path / "off"), request, options=Options())

    sft_store.build(job(str(source)))
    made = []
    for path in (str(source), str(tmp_path / "off")):
        sets, weights = sft_dataset.open_sets([(None, path)], job, str(tmp_path / "cache"))
        pool = sft_dataset.pool(sets, 128)
        made.append(Rows(pool, weights, Shape(128, Alignment(1, 1), 2, 2, seed=1)))
    assert made[0].steps(1) == made[1].steps(1) > 2
    assert made[0].digest == made[1].digest
    for number in range(made[0].steps(2) * 4):
        online, offline = made[0].row(number), made[1].row(number)
        assert all(np.array_equal(online[name], offline[name]) for name in online)
    # Again from the cache: nothing is tokenized.
    before = sorted(p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir())
    sft_dataset.open_sets([(None, str(source))], job, str(tmp_path / "cache"))
    assert sorted(p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()) == before


def test_bound_of_the_lengths():
    """Few values, never too small, and never the row's length but where one room fills it."""
    from megatron_patch.training.batch import _bound

    for total in (64, 100, 4096, 5000):
        bounds = {longest: _bound(longest, total) for longest in range(1, total + 1)}
        assert all(longest <= bound <= total for longest, bound in bounds.items())
        assert [longest for longest, bound in bounds.items() if bound == total] == [total]
    assert len({_bound(longest, 4096) for longest in range(1, 4033)}) == 5
