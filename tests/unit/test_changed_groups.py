"""Which saved parameter groups a resumed run finds."""

from __future__ import annotations

from megatron_patch.patches.changed_lr import as_laid_out, with_current_rates

KEYS = ("wd_mult", "max_lr", "min_lr", "is_expert_parallel")


def group(wd: float, lr: float, expert: bool = False, **more: object) -> dict:
    return {"wd_mult": wd, "max_lr": lr, "min_lr": 0.0, "is_expert_parallel": expert, **more}


def test_groups_take_the_rates_and_the_place_of_this_run() -> None:
    saved = [group(1, 0.1, step=5), group(0, 0.1, step=5)]
    current = [group(1, 0.2, True), group(0, 0.2, True)]
    found = with_current_rates(saved, current, KEYS)
    assert found == [group(1, 0.2, True, step=5), group(0, 0.2, True, step=5)]
    assert saved[0]["max_lr"] == 0.1


def test_groups_that_only_their_rates_tell_apart_keep_them() -> None:
    saved = [group(1, 0.1), group(1, 0.01)]
    assert with_current_rates(saved, [group(1, 0.1), group(1, 0.01)], KEYS) == saved


def test_one_optimizer_becomes_two_and_two_become_one() -> None:
    common = {"optimizer": {"param_groups": [group(1, 0.1)]}, "kind": "full"}
    split = as_laid_out({0: {"state": "a"}, 1: {"state": "b"}, **common}, 2)
    assert split == {0: {"state": "a", **common}, 1: {"state": "b", **common}}
    parts = {
        number: {"optimizer": {"param_groups": [group(1, 0.1, bool(number))]}, "kind": "full"}
        for number in (0, 1)
    }
    joined = as_laid_out({"state": "c", **parts}, 1)
    assert joined["state"] == "c" and joined["kind"] == "full"
    assert joined["optimizer"]["param_groups"] == [group(1, 0.1), group(1, 0.1, True)]


def test_what_fits_stays() -> None:
    one = {"optimizer": {"param_groups": []}, "state": 1}
    two = {0: dict(one), 1: dict(one)}
    assert as_laid_out(one, 1) is one
    assert as_laid_out(two, 2) is two
