"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patch.training import keep


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
