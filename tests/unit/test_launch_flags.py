"""Which flags the launcher keeps, which go on, and which of two wins."""

from __future__ import annotations

import pytest

from megatron_patch.launch.flags import LAUNCHER_FLAGS, Flags, Options, help_text, split_flags
from megatron_patch.training import args
from megatron_patch.util import UserError


def test_launcher_flags_are_kept_and_the_rest_goes_on_in_order() -> None:
    options, rest = split_flags(
        ["--tp", "2", "--env=dlc", "--dry-run", "--lr", "1e-4", "--nproc_per_node", "4", "--bf16"]
    )
    assert rest == ["--tp", "2", "--lr", "1e-4", "--bf16"]
    assert (options.env, options.dry_run, options.ranks_per_node) == ("dlc", True, 4)
    assert options.given == {"--env", "--dry-run", "--nproc-per-node"}


@pytest.mark.parametrize("flag", LAUNCHER_FLAGS, ids=lambda f: f.name)
def test_every_launcher_flag_changes_the_options(flag) -> None:
    value = {"text": "slurm", "number": "3", "switch": None}[flag.kind]
    for spelling in (flag.name, *flag.aliases):
        tokens = [spelling] if value is None else [spelling, value]
        options, rest = split_flags(tokens)
        assert rest == []
        assert getattr(options, flag.field) != getattr(Options(), flag.field)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--nnodes"], "--nnodes needs a value"),
        (["--nnodes", "two"], "whole number, got 'two'"),
        (["--nnodes", "0"], "at least 1"),
        (["--env", "moon"], "choose from single, torchrun"),
        (["--dry-run=yes"], "takes no value"),
        (["--nnodes", "2", "--num-nodes", "3"], "--nnodes 2 and --num-nodes 3"),
    ],
)
def test_refusals(tokens: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_flags(tokens)


def test_same_spelling_twice_the_last_wins() -> None:
    assert split_flags(["--nnodes", "2", "--nnodes", "3"])[0].nodes == 3


def test_user_flags_win_under_every_spelling() -> None:
    flags = Flags(("--lr", "1e-5", "--train-iters", "10"), ("--learning_rate=2e-4",))
    assert flags.get("lr") == 2e-4
    assert flags.get("train_iters") == 10
    assert flags.get("hf_model") is None
    plan = args.resolve(
        [*flags.argv(), "--seq-length", "8", "--mbs", "1"], world_size=1, device="cpu"
    )
    assert plan.values["lr"] == 2e-4


def test_a_users_length_displaces_the_launchers() -> None:
    flags = Flags(("--train-iters", "10", "--seq-length", "8"), ("--train-samples", "64"))
    plan = args.resolve(flags.argv(), world_size=1, device="cpu")
    assert plan.run is not None and plan.run.samples == 64


def test_final_flags_beat_the_users() -> None:
    flags = Flags((), ("--train-steps", "40"), ("--train-iters", "80"))
    assert flags.get("train_iters") == 80


def test_unknown_flag_names_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"--trian-iters; nearest: --train-iters"):
        Flags((), ("--trian-iters", "3")).get("lr")


def test_help_shows_every_flag_once() -> None:
    text = help_text("run.sh")
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert len(shown) == len(set(shown))
    assert {f.name for f in LAUNCHER_FLAGS} <= set(shown)
    assert {"--hf-model", "--data-path", "--output-dir", "--tp", "--train-tokens"} <= set(shown)
