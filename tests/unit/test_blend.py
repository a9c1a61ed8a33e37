"""Which data a run reads: the grammar, the splits, and what is refused before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_patch.data import blend
from megatron_patch.data.idxmap import Writer
from megatron_patch.training import args, parallel
from megatron_patch.util import UserError

CONFIG = Path(__file__).parent.parent / "fixtures" / "configs" / "qwen3-0.6b.json"
SEQ = 64
END = 151645


def data(prefix: Path, lengths: list[int], end: int = END) -> str:
    with Writer(str(prefix), np.dtype(np.int32), overwrite=True) as writer:
        for length in lengths:
            ids = np.array([7] * (length - 1) + [end])
            writer.write(ids, np.array([length]), np.array([1]))
        writer.commit()
    return str(prefix)


@pytest.fixture
def hf(tmp_path: Path) -> str:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(json.loads(CONFIG.read_text()) | {"eos_token_id": END})
    )
    return str(folder)


def plan(hf: str, *flags: str) -> args.Plan:
    base = f"--hf-model {hf} --seq-length {SEQ} --lr 1e-3 --train-iters 10 --gbs 2".split()
    return args.resolve([*base, *flags], device="cpu", world_size=1)


# --- grammar ----------------------------------------------------------------------------------


def test_grammar() -> None:
    assert blend.read_blend(["0.3", "a", "0.7", "b"]) == [(0.3, "a"), (0.7, "b")]
    assert blend.read_blend(["a", "b"]) == [(None, "a"), (None, "b")]
    assert blend.read_blend(["a"]) == [(None, "a")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "names no data"),
        ("0.5 a b", "3 entries, 1 of them numbers"),
        ("a 0.5 b 0.5", "4 entries, 2 of them numbers"),
        ("0.5 a 0.5", "3 entries, 2 of them numbers"),
        ("1 2 3 4", "4 entries, 4 of them numbers"),
        ("nan a 1 b", "weight nan of a: a finite number"),
        ("-1 a 2 b", "weight -1 of a: more than 0"),
        ("0 a 1 b", "weight 0 of a: more than 0"),
        ("inf a 1 b", "weight inf of a"),
    ],
)
def test_bad_blends(words: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        blend.read_blend(words.split())
    assert text in str(caught.value) and str(caught.value).startswith("--data-path")


def test_a_typed_suffix_is_left_out_and_said(hf: str, tmp_path: Path) -> None:
    prefix = data(tmp_path / "d", [500] * 20)
    for typed in (f"{prefix}.bin", f"{prefix}.idx"):
        result = plan(hf, "--data-path", typed)
        assert result.values["data_path"] == [prefix]
        assert "--data-path" not in result.megatron_argv()
        assert result.overlay()["data_path"] == [prefix]
        assert sum("without .bin or .idx" in note for note in result.notes) == 1


def test_a_list_file_may_have_comments(hf: str, tmp_path: Path) -> None:
    a, b = data(tmp_path / "a", [500] * 20), data(tmp_path / "b#2", [500] * 20)
    listing = tmp_path / "list.txt"
    listing.write_text(f"# mixture\n0.5 {a} # English\n\n0.5 {b}.bin\n")
    result = plan(hf, "--data-args-path", str(listing))
    assert result.values["data_path"] == ["0.5", a, "0.5", b]
    assert result.values["data_args_path"] is None and "--data-args-path" not in str(
        result.megatron_argv()
    )
    assert result.data.training == [(0.5, a), (0.5, b)]


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "names no data"), (b"# only\n", "names no data"), (b"0.5 x y", "3 entries"),
     (b"\xff\xfe", "utf-8"), (None, "No such file")],
)  # fmt: skip
def test_bad_list_files(hf: str, tmp_path: Path, content: bytes | None, text: str) -> None:
    listing = tmp_path / "list.txt"
    if content is not None:
        listing.write_bytes(content)
    with pytest.raises(UserError) as caught:
        plan(hf, "--data-args-path", str(listing))
    assert text in str(caught.value) and str(listing) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "Expecting"),
        ("[]", "train, valid and test"),
        ('{"train": ["a"]}', "train, valid and test"),
        ('{"train": 3, "valid": null, "test": null}', "'train' is 3"),
        ('{"train": ["1", "a", "b"], "valid": null, "test": null}', "(train)"),
        ('{"train": ["a.bin"], "valid": null, "test": null}', "write a, without"),
    ],
)
def test_bad_split_files(hf: str, tmp_path: Path, content: str, text: str) -> None:
    listing = tmp_path / "splits.json"
    listing.write_text(content)
    with pytest.raises(UserError) as caught:
        plan(hf, "--per-split-data-args-path", str(listing))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "one", "two"),
    [
        ("--mock-data --valid-data-path b", "--mock-data", "--valid-data-path"),
        ("--data-path a --data-args-path b", "--data-path", "--data-args-path"),
        ("--data-path a --mock-data", "--data-path", "--mock-data"),
        ("--train-data-path a --split 99,1,0", "--split 99,1,0", "--train-data-path"),
    ],
)
def test_data_flags_that_exclude_each_other(
    hf: str, tmp_path: Path, flags: str, one: str, two: str
) -> None:
    (tmp_path / "b").write_text("a")
    with pytest.raises(UserError) as caught:
        plan(hf, *flags.replace(" b", f" {tmp_path / 'b'}").split())
    assert one in str(caught.value) and two in str(caught.value)


# --- splits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["nan", "0,0,0", "-1,2,3", "1,2,3,4", "", "a,b", "0,1,0", "inf,1,0", "99;1;0"]
)
def test_bad_splits(hf: str, text: str) -> None:
    with pytest.raises(UserError, match=r"--split .*: one to three numbers"):
        plan(hf, "--data-path", "/nowhere/d", "--split", text)


def test_splits_in_other_notations(hf: str) -> None:
    """Upstream reads the digits of `9.9e1` as 9.9 and 1."""
    values = plan(hf, "--data-path", "/nowhere/d", "--split", "9.9e1,1e0").values
    assert values["split"] == "99,1,0"
    assert plan(hf, "--data-path", "/nowhere/d", "--split", "98/2").values["split"] == "98/2"


def test_bounds_are_upstreams() -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    rng = np.random.default_rng(3)
    for text in ["99,1,0", "969,30,1", "1", "98/2", "100,0,0", "1,1,1"]:
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
        for n in [0, 1, 2, 50, 99, 100, 101, *map(int, rng.integers(1, 10**9, 20))]:
            theirs = [
                None if part is None else tuple(round(edge * float(n)) for edge in part)
                for part in matrix
            ]
            assert blend.bounds(blend.read_split(text), n) == theirs, (text, n)


def test_an_empty_validation_split_turns_evaluation_off(hf: str, tmp_path: Path) -> None:
    """99,1,0 of ten documents; upstream would count epochs for ever."""
    prefix = data(tmp_path / "d", [500] * 10)
    result = plan(hf, "--data-path", prefix, "--eval-iters", "5")
    assert result.values["eval_iters"] == 0 and result.values["split"] == "100,0,0"
    assert "--eval-iters" not in result.megatron_argv()
    (note,) = [n for n in result.notes if n.startswith("evaluation off: ")]
    assert f"the validation split of {prefix} holds no document (there are 10 in all)" in note
    big = data(tmp_path / "big", [500] * 200)
    assert plan(hf, "--data-path", big, "--eval-iters", "5").values["eval_iters"] == 5


@pytest.mark.parametrize("split", ["99,1,0", "98,1,1", "90,9.9,0.1"])
@pytest.mark.parametrize("more", [("--eval-iters", "5"), ("--eval-iters", "0")])
def test_an_empty_split_that_was_asked_for(
    hf: str, tmp_path: Path, split: str, more: tuple[str, ...]
) -> None:
    prefix = data(tmp_path / "d", [500] * 10)
    with pytest.raises(UserError) as caught:
        plan(hf, "--data-path", prefix, "--split", split, *more)
    message = str(caught.value)
    assert message.startswith(f"--split {split}: the ") and "holds no document" in message
    assert "--split 100,0,0" in message


def test_a_split_with_less_than_a_sample(hf: str, tmp_path: Path) -> None:
    short = data(tmp_path / "d", [SEQ // 2] * 200)
    result = plan(hf, "--data-path", short, "--eval-iters", "5")  # two documents of 32: 64 tokens
    assert result.values["eval_iters"] == 0
    assert any("holds 64 tokens, which is less than one sequence of 64" in n for n in result.notes)
    own = data(tmp_path / "v", [SEQ])
    with pytest.raises(UserError, match=r"--valid-data-path: .*holds 64 tokens"):
        plan(hf, "--train-data-path", short, "--valid-data-path", own)
    enough = data(tmp_path / "w", [SEQ + 1])
    assert plan(hf, "--train-data-path", short, "--valid-data-path", enough).values["eval_iters"]


@pytest.mark.parametrize("lengths", [[], [10]])
def test_training_data_without_a_sample(hf: str, tmp_path: Path, lengths: list[int]) -> None:
    prefix = data(tmp_path / "d", lengths)
    with pytest.raises(UserError) as caught:
        plan(hf, "--data-path", prefix)
    assert f"the training split of {prefix}" in str(caught.value)
    assert "--seq-length than 64" in str(caught.value)


# --- presence, weights, ends of documents -----------------------------------------------------


def test_data_that_is_elsewhere_is_a_warning_and_at_the_start_an_error(hf: str) -> None:
    result = plan(hf, "--data-path", "/nowhere/d")
    (warning, _) = parallel.check(result).warnings
    assert warning.startswith("/nowhere/d.idx is not on this machine")
    report = parallel.check(result, start=True)
    assert not report.ok and report.refusals[0] == warning
    per_split = plan(hf, "--train-data-path", "/nowhere/t", "--valid-data-path", "/nowhere/v")
    assert any("/nowhere/v.bin is not on" in w for w in parallel.check(per_split).warnings)
    assert "no data given" in parallel.check(plan(hf), start=True).refusals[0]


def test_what_a_wrong_prefix_was_meant_to_be(hf: str, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("{}")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens_text_document{suffix}").touch()
    said = parallel.check(plan(hf, "--data-path", str(tmp_path / "tokens"))).warnings[0]
    assert said.endswith(f"; {tmp_path}/tokens_text_document is there")
    said = parallel.check(plan(hf, "--data-path", str(tmp_path / "text.jsonl"))).warnings[0]
    assert f"{tmp_path}/text.jsonl is no tokenized data" in said and "preprocess_data.py" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--train-iters", "1000000000000"), "a shorter run than --train-iters 1000000000000"),
        (("--eval-iters", "1000000000000"), "fewer --eval-iters than 1000000000000"),
    ],
)
def test_an_order_that_does_not_fit_into_memory(
    hf: str, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    """Upstream would fill the memory until it is killed."""
    prefix = data(tmp_path / "d", [500] * 200)
    result = plan(hf, "--user-flags", "--data-path", prefix, *flags)
    assert parallel.check(result).ok
    report = parallel.check(result, start=True)
    assert any("TiB" in r and words in r for r in report.refusals)


def test_several_data_sets_count_by_their_tokens(hf: str, tmp_path: Path) -> None:
    """Without weights upstream ends after one epoch, in the middle of a longer run."""
    a, b = data(tmp_path / "a", [500] * 20), data(tmp_path / "b", [500] * 60)
    result = plan(hf, "--data-path", a, b)
    assert result.values["data_path"] == ["10000", a, "30000", b]
    assert any("(a 25.0%, b 75.0%)" in note for note in result.notes)
    assert plan(hf, "--data-path", a, "/nowhere/d").values["data_path"] == [a, "/nowhere/d"]


def test_validation_sets_with_a_loss_each(hf: str, tmp_path: Path) -> None:
    a, b = data(tmp_path / "a", [500] * 20), data(tmp_path / "b", [500] * 60)
    made = plan(hf, "--data-path", a, "--valid-data-path", f"code={a}.bin", f"web={b}")
    assert made.validation_sets == ("code", "web") and not made.validation_whole
    assert made.values["valid_data_path"] == [a, b], "a loss each, so no weights"
    assert made.values["train_data_path"] == [a] and made.values["data_path"] is None
    assert made.values["eval_iters"] == 20
    one = plan(hf, "--data-path", a, "--valid-data-path", f"code={a}")
    assert one.validation_sets == ("code",)
    together = plan(hf, "--data-path", a, "--valid-data-path", a, b)
    assert together.validation_sets == () and together.values["valid_data_path"][1::2] == [a, b]
    (tmp_path / "x=y").mkdir()
    odd = data(tmp_path / "x=y" / "d", [500] * 20)
    assert plan(hf, "--data-path", a, "--valid-data-path", odd).validation_sets == ()


@pytest.mark.parametrize(
    ("more", "names", "whole"),
    [
        ("--full-validation", ("a", "b"), True),
        ("--multiple-validation-sets", ("a", "b"), False),
        ("--multiple-validation-sets --validation-set-names x y", ("x", "y"), False),
    ],
)
def test_upstreams_flags_for_validation_sets(
    hf: str, tmp_path: Path, more: str, names: tuple[str, ...], whole: bool
) -> None:
    """On its own path they end in errors, or read a set several times over."""
    a, b = data(tmp_path / "a", [500] * 20), data(tmp_path / "b", [500] * 60)
    made = plan(hf, "--train-data-path", a, "--valid-data-path", a, b, *more.split())
    assert (made.validation_sets, made.validation_whole) == (names, whole)
    assert made.values["valid_data_path"] == [a, b]
    for dest in ("multiple_validation_sets", "full_validation", "validation_set_names"):
        assert not made.values[dest]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("code=a b", "1 of 2 entries have a name"),
        ("code=a code=b", "two sets are named code"),
        ("a b --multiple-validation-sets --validation-set-names x", "1 names for 2 sets"),
        ("c=a --validation-set-names x", "--validation-set-names and names in"),
        ("0.5 a 0.5 b --multiple-validation-sets", "drop the weights"),
    ],
)
def test_names_of_validation_sets_that_do_not_fit(hf: str, words: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        plan(hf, "--data-path", "t", "--valid-data-path", *words.split())


def test_how_often_a_run_reads_each_data_set(hf: str, tmp_path: Path) -> None:
    """10 steps x 2 x 64 tokens; the weights decide, whatever a set holds."""
    a, b = data(tmp_path / "a", [64] * 10), data(tmp_path / "b", [64] * 80)
    made = plan(hf, "--data-path", "3", a, "1", b)
    assert [(r.prefix, r.share, r.tokens, r.epochs) for r in made.readings] == [
        (a, 0.75, 640, 1.5),
        (b, 0.25, 5120, 0.0625),
    ]
    report = parallel.render(parallel.check(made), [], False)
    assert "75.0% of the run, read 1.5 times (640 tokens)" in report
    assert "25.0% of the run, read 0.0625 times (5.12K tokens)" in report
    split = plan(hf, "--data-path", b, "--split", "50,50,0", "--eval-iters", "0")
    assert [(r.tokens, r.epochs) for r in split.readings] == [(2560, 0.5)]
    gone = plan(hf, "--data-path", "3", a, "1", "/nowhere/d")
    assert [r.epochs for r in gone.readings] == [1.5, None]
    assert "its data is not here" in parallel.render(parallel.check(gone), [], False)


def test_documents_without_an_end_are_warned_about(hf: str, tmp_path: Path) -> None:
    good = data(tmp_path / "good", [500] * 30)
    bad = data(tmp_path / "bad", [500] * 30, end=13)
    assert parallel.end_warnings(plan(hf, "--data-path", good)) == []
    (warning,) = parallel.end_warnings(plan(hf, "--data-path", "0.5", good, "0.5", bad))
    assert warning.startswith(f"none of the documents sampled in {bad} end with id {END}")
    assert "--append-eod" in warning
    named = plan(hf, "--data-path", bad, "--null-tokenizer-eod-id", "13")
    assert parallel.end_warnings(named) == []
