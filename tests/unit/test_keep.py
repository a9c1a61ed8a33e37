"""Which checkpoints stay, what the links point to, and when the clock saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patch.training import keep, saves


def _save(directory: Path, *steps: int, tracker: int | None = None) -> None:
    for step in steps:
        (directory / f"iter_{step:07d}").mkdir(parents=True)
        (directory / f"iter_{step:07d}" / "file").write_text("x")
    if tracker is not None:
        (directory / keep.TRACKER).write_text(str(tracker))


def _there(directory: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in directory.glob("iter_*"))


@pytest.mark.parametrize(
    ("last", "every", "stay"),
    [
        (1, None, [40, 50]),
        (2, None, [30, 40, 50]),
        (1, 20, [20, 40, 50]),
        (9, None, [10, 20, 30, 40, 50]),
    ],
)
def test_what_stays(tmp_path: Path, last: int, every: int | None, stay: list[int]) -> None:
    """Step 50 is being saved: the tracker file says 40."""
    _save(tmp_path, 10, 20, 30, 40, 50, tracker=40)
    keep.Keeper(tmp_path, last, every).finish()
    assert _there(tmp_path) == stay
    assert not list(tmp_path.glob(".leaving-*"))


def test_nothing_goes_without_a_tracker(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20)
    keep.Keeper(tmp_path, 1, None).finish()
    assert _there(tmp_path) == [10, 20]


def test_removal_follows_the_tracker_and_clears_what_was_interrupted(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, tracker=20)
    (tmp_path / ".leaving-iter_0000005").mkdir()
    keeper = keep.Keeper(tmp_path, 1, None)
    keeper.look()
    keeper._thread.join()
    assert _there(tmp_path) == [20]
    assert not list(tmp_path.glob(".leaving-*"))
    _save(tmp_path, 30)
    keeper.look()
    assert _there(tmp_path) == [20, 30], "30 is not whole yet"
    (tmp_path / keep.TRACKER).write_text("30")
    keeper.finish()
    assert _there(tmp_path) == [30]


def test_links_follow_and_the_best_stays(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, 30, tracker=30)
    keeper = keep.Keeper(tmp_path, 1, None, losses={10: 2.0, 20: 2.5, 99: 1.0})
    keeper.finish()
    assert _there(tmp_path) == [10, 30]
    assert {n: (tmp_path / n).readlink() for n in ("latest", "best")} == {
        "latest": Path("iter_0000030"),
        "best": Path("iter_0000010"),
    }
    _save(tmp_path, 40, tracker=40)
    keeper.evaluated(40, 1.5)
    keeper.finish()
    assert _there(tmp_path) == [40]
    assert (tmp_path / "latest" / "file").read_text() == "x"
    assert (tmp_path / "best").readlink() == Path("iter_0000040")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_all_stay_without_a_number_and_still_have_links(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, 30, tracker=20)
    keep.Keeper(tmp_path, None, None).finish()
    assert _there(tmp_path) == [10, 20, 30]
    assert (tmp_path / "latest").readlink() == Path("iter_0000020"), "30 is being saved"
    assert not (tmp_path / "best").is_symlink()


def test_the_last_checkpoint_before_a_jump_stays(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, 30, 40, tracker=40)
    keeper = keep.Keeper(tmp_path, 1, None)
    keeper.jumped(25)
    keeper.finish()
    assert _there(tmp_path) == [20, 40]
    keep.Keeper(tmp_path, 1, None, jumps=[25]).finish()
    assert _there(tmp_path) == [20, 40], "another start knows it from the record"


def test_something_in_place_of_a_link_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(tmp_path, 10, tracker=10)
    (tmp_path / "latest").mkdir()
    keeper = keep.Keeper(tmp_path, 1, None)
    keeper.finish()
    keeper.finish()
    assert (tmp_path / "latest").is_dir()
    assert capsys.readouterr().out.count("no links latest and best") == 1


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(saves.time, "monotonic", lambda: self.now)


def _due(clock: _Clock, saved: saves.Saves, steps: int, seconds: float) -> list[int]:
    """Steps after which it saves, when each takes so many seconds."""
    found = []
    for step in range(1, steps + 1):
        clock.now += seconds
        if saved.due(step):
            found.append(step)
            saved.stood_still(step, 0.0, False)
    return found


def test_the_clock_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    assert _due(clock, saves.Saves(1.0, steps=10), 10, 25) == [3, 6, 9]
    assert _due(clock, saves.Saves(1.0, steps=9), 9, 25) == [3, 6], "the last is saved anyway"
    assert _due(clock, saves.Saves(None, steps=10), 10, 25) == []
    assert _due(clock, saves.Saves(1.0, steps=10, every=3), 10, 25) == [4, 7], "3 by its number"


def test_a_save_waits_for_an_evaluation_that_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    minutes = 600 / 60  # due at step 60, 120, ... of 10 s
    assert _due(clock, saves.Saves(minutes, steps=130, evaluation=64), 130, 10) == [64, 128]
    assert _due(clock, saves.Saves(minutes, steps=130, evaluation=90), 130, 10) == [60, 120]


def test_a_save_beside_the_training_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    told: list[tuple[int, float, dict[str, object]]] = []
    saved = saves.Saves(1.0, steps=9, report=lambda *one: told.append(one))
    saved.looked(1.0, False)
    assert not told, "nothing is open"
    saved.stood_still(3, 0.5, True)
    clock.now += 7.5
    saved.looked(0.25, False)
    saved.looked(0.25, True)
    assert [seconds for _, seconds, _ in told] == [0.5, 0.25, 0.25]
    assert told[-1][2] == {"save": True, "whole_after_seconds": 8.0, "in_all": 1.0}
    assert "is whole 8.0 s after its begin; training stood still for 1.00 s" in saves.words(
        *told[-1]
    )
