"""Which data sets a run reads, in what shares, and whether they hold what it asks for.

Megatron's grammar: prefixes, or weight prefix weight prefix ..., on the command line, in a list
file, or for each split on its own. What upstream answers with a traceback, an endless loop or
silence is an error or a note here, before any rank starts. Standard library only; the indices are
read where they are on this machine.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.util import Range, UserError, human_count

if TYPE_CHECKING:
    from megatron_patch.data.idxmap import Index

Blend = list[tuple[float | None, str]]

#: Names of upstream's splits in its order, as users call them.
SPLITS = ("training", "validation", "test")
#: Dests that name data, apart from those of one split each.
_WHOLE = ("data_path", "data_args_path", "per_split_data_args_path", "mock_data")
_OWN_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
#: Dests whose blend is given on the command line itself.
LISTS = ("data_path", *_OWN_SPLIT)


def flag(dest: str) -> str:
    """The option of a dest of this module, all of which are spelled like their dest."""
    return "--" + dest.replace("_", "-")


# --- grammar ----------------------------------------------------------------------------------


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_weight(text: str) -> bool:
    """A number that is not, against all habits, the name of a data set."""
    return _number(text) is not None and not os.path.exists(text + ".idx")


def bare(prefix: str) -> str:
    """A prefix without the ``.bin`` or ``.idx`` that the user typed after it."""
    if prefix.endswith((".bin", ".idx")) and not os.path.exists(prefix + ".idx"):
        return prefix[:-4]
    return prefix


def read_blend(tokens: Iterable[str], where: str = "--data-path") -> Blend:
    """Megatron's data grammar: prefixes, or weight prefix weight prefix ...

    Args:
        tokens: What was given, in order.
        where: Flag or file, for messages.

    Returns:
        (weight or None, prefix) for every data set.

    Raises:
        UserError: Nothing, weights and prefixes that do not alternate, or a weight that is not a
            number above 0.
    """
    items = list(tokens)
    if not items:
        raise UserError(f"{where} names no data; give a PREFIX (of PREFIX.bin and PREFIX.idx)")
    weights = [item for item in items if _is_weight(item)]
    if not weights:
        return [(None, bare(prefix)) for prefix in items]
    alternate = len(items) % 2 == 0 and all(_number(w) is not None for w in items[::2])
    if not alternate or any(_is_weight(prefix) for prefix in items[1::2]):
        shown = " ".join(items[:6]) + (" ..." if len(items) > 6 else "")
        raise UserError(
            f"{where} {shown}: {len(items)} entries, {len(weights)} of them numbers; give prefixes "
            "alone, or a weight before each of them (0.7 PREFIX 0.3 PREFIX)"
        )
    blend: Blend = []
    for weight, prefix in zip(items[::2], items[1::2], strict=True):
        if needed := Range(0, above=True).wanted(float(weight)):
            raise UserError(
                f"{where}: weight {weight} of {prefix}: {needed} is needed; to leave a data set "
                "out, drop both"
            )
        blend.append((float(weight), bare(prefix)))
    return blend


def read_list_file(path: str) -> list[str]:
    """Entries of a ``--data-args-path`` file; ``#`` begins a comment.

    Raises:
        UserError: It cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"--data-args-path {path}: {_why(problem)}") from problem
    return [word for line in lines for word in re.split(r"(?:^|\s)#", line)[0].split()]


def _why(problem: OSError | ValueError) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)


def _read_split_file(path: str) -> list[Blend | None]:
    """The blends of a ``--per-split-data-args-path`` file, one a split."""
    where = f"--per-split-data-args-path {path}"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"{where}: {_why(problem)}") from problem
    keys = ("train", "valid", "test")
    if not isinstance(found, dict) or set(found) != set(keys):
        raise UserError(
            f"{where}: an object with the keys train, valid and test is needed, each a list of "
            "data or null"
        )
    blends: list[Blend | None] = []
    for key in keys:
        entry = found[key]
        if entry is None:
            blends.append(None)
            continue
        items = entry.split() if isinstance(entry, str) else entry
        if not isinstance(items, list) or not all(isinstance(i, str | int | float) for i in items):
            raise UserError(f"{where}: {key!r} is {entry!r}; a list of weights and prefixes")
        blend = read_blend([str(item) for item in items], f"{where} ({key})")
        for item in items:
            if isinstance(item, str) and bare(item) != item:
                raise UserError(f"{where}: {item}: write {bare(item)}, without .bin or .idx")
        blends.append(blend)
    return blends


def read_split(text: str) -> tuple[float, float, float]:
    """Shares of the three splits, as given (they need not add up to anything).

    Raises:
        UserError: Not one to three numbers of at least 0, or no share for training.
    """
    parts = [_number(part) for part in re.split(r"[,/\s]+", text.strip())]
    wanted = f"--split {text}: one to three numbers for training,validation,test such as 99,1,0"
    numbers = [part for part in parts if part is not None and Range(0).wanted(part) is None]
    if len(numbers) != len(parts) or not 1 <= len(numbers) <= len(SPLITS):
        raise UserError(f"{wanted} are needed")
    train, valid, test = numbers + [0.0] * (len(SPLITS) - len(numbers))
    if not train:
        raise UserError(f"{wanted}, the first of them above 0")
    return train, valid, test


@dataclass(frozen=True)
class Sources:
    """What a run reads.

    Attributes:
        blends: One a split; None where the split has none of its own.
        flags: The flag that named each, for messages.
        shares: Shares of the splits in one common blend; None where each split has its own.
    """

    blends: tuple[Blend | None, Blend | None, Blend | None]
    flags: tuple[str, str, str]
    shares: tuple[float, float, float] | None

    @property
    def training(self) -> Blend:
        """The data sets that are trained on."""
        return self.blends[0] or []

    def prefixes(self) -> list[str]:
        """Every prefix once, in the order given."""
        return list(dict.fromkeys(p for blend in self.blends for _, p in blend or []))


def sources(values: Mapping[str, Any]) -> Sources:
    """The data of a plan's values, from whichever flag names it.

    Raises:
        UserError: Flags that exclude each other, a file that cannot be read, or a bad entry in one.
    """
    given = [d for d in _WHOLE if values[d] or values[d] == []]
    own = [d for d in _OWN_SPLIT if values[d] is not None]
    if len(given) > 1 or (given and own):
        first, second = [*given, *own][:2]
        more = ", and --train-data-path for the training data" if own else ""
        raise UserError(f"{flag(first)} and {flag(second)} exclude each other; keep one{more}")
    text = values["split"]
    apart = own or values["per_split_data_args_path"]
    if apart and text is not None:
        raise UserError(
            f"--split {text} has no effect where each split has its own data "
            f"({flag((own or given)[0])}); drop it"
        )
    shares = None if apart else read_split(text) if text is not None else None
    if own:
        blends = [read_blend(values[d], flag(d)) if d in own else None for d in _OWN_SPLIT]
        return Sources(
            (blends[0], blends[1], blends[2]),
            (flag(_OWN_SPLIT[0]), flag(_OWN_SPLIT[1]), flag(_OWN_SPLIT[2])),
            None,
        )
    name = flag(given[0]) if given else "--data-path"
    if values["per_split_data_args_path"]:
        one, two, three = _read_split_file(values["per_split_data_args_path"])
        return Sources((one, two, three), (name, name, name), None)
    blend: Blend | None = None
    if values["data_path"] is not None:
        blend = read_blend(values["data_path"])
    elif values["data_args_path"]:
        path = values["data_args_path"]
        blend = read_blend(read_list_file(path), f"{name} {path}")
    return Sources((blend, blend, blend), (name, name, name), shares)


#: Flags of upstream's for several validation sets, and what they say here.
_SETS = ("multiple_validation_sets", "validation_set_names", "full_validation")
_NAMED = re.compile(r"([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)


def named(tokens: Sequence[str], where: str) -> list[tuple[str, str]]:
    """``NAME=PREFIX ...`` -> (name, prefix) of each; nothing where none has a name.

    Raises:
        UserError: Only some have one, or two have the same.
    """
    pairs: list[tuple[str, str]] = []
    for token in tokens:
        match = _NAMED.fullmatch(token)
        if match and not os.path.exists(token) and not os.path.exists(bare(token) + ".idx"):
            pairs.append((match[1], bare(match[2])))
    if pairs and len(pairs) < len(tokens):
        raise UserError(
            f"{where}: {len(pairs)} of {len(tokens)} entries have a name; write NAME=PREFIX for "
            "each of them (a loss each), or for none (one loss)"
        )
    twice = [name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1]
    if twice:
        raise UserError(f"{where}: two sets are named {twice[0]}; each needs a name of its own")
    return pairs


def validation(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """Validation sets with a loss each: new values, their names, and whether each is read whole.

    Upstream has them with whole sets only, which it reads one sequence at a time and several times
    over, and not in a pipeline: they are this library's (``data/pretrain_dataset.py``), and its
    flags say the same as names do.

    Raises:
        UserError: Names and sets that do not fit together.
    """
    where = flag("valid_data_path")
    tokens = values["valid_data_path"]
    if not tokens:
        return {}, (), False
    pairs = named(tokens, where)
    apart = [dest for dest in _SETS if values[dest]]
    if not pairs and not apart:
        return {}, (), False
    if not pairs:
        blend = read_blend(tokens, where)
        if any(weight is not None for weight, _ in blend):
            raise UserError(f"{where}: {flag(apart[0])} gives each set a loss; drop the weights")
        names = values["validation_set_names"] or [os.path.basename(p) for _, p in blend]
        if len(names) != len(blend):
            raise UserError(
                f"--validation-set-names: {len(names)} names for {len(blend)} sets of {where}"
            )
        names = [n if names.count(n) == 1 else f"{n}-{i}" for i, n in enumerate(names)]
        pairs = [(name, prefix) for name, (_, prefix) in zip(names, blend, strict=True)]
    elif values["validation_set_names"]:
        raise UserError(f"--validation-set-names and names in {where}; keep one of them")
    changes: dict[str, Any] = {
        dest: None if dest == "validation_set_names" else False for dest in apart
    }
    changes["valid_data_path"] = [prefix for _, prefix in pairs]
    return changes, tuple(name for name, _ in pairs), bool(values["full_validation"])


def tidy(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What to hand to Megatron in place of what was given, and notes about it.

    Its parser reads no comments in list files, takes ``.bin`` for a part of the name, and reads
    ``1e-2`` in a split as 1 and 2.
    """
    changes: dict[str, Any] = {}
    notes = []
    for dest in LISTS:
        if values[dest]:
            read_blend(values[dest], flag(dest))
        if values[dest] and (clean := [bare(p) for p in values[dest]]) != values[dest]:
            changes[dest] = clean
            notes.append(f"{flag(dest)}: data is named without .bin or .idx, which is left out")
    path = values["data_args_path"]
    if path and values["data_path"] is None:
        words = read_list_file(path)
        read_blend(words, f"--data-args-path {path}")
        changes |= {"data_path": [bare(word) for word in words], "data_args_path": None}
        notes.append(f"--data-args-path {path}: {len(words)} entries, handed on as --data-path")
    if values["split"] is not None:
        plain = ",".join(f"{x:f}".rstrip("0").rstrip(".") for x in read_split(values["split"]))
        if re.fullmatch(r"[\d.]+([,/ ]+[\d.]+)*", values["split"]) is None:
            changes["split"] = plain
    return changes, notes


def weighed(
    values: Mapping[str, Any], one_by_one: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Weights for data sets that were given without: their tokens. New values, and notes.

    Upstream builds one epoch of each data set without a weight and ends in the middle of a run that
    is longer. Data that is not on this machine is left as it is, and validation sets that are
    evaluated one by one have to be.
    """
    changes: dict[str, Any] = {}
    notes = []
    for dest in LISTS:
        blend = read_blend(values[dest], flag(dest)) if values[dest] else []
        apart = dest == "valid_data_path" and one_by_one
        if len(blend) < 2 or apart or any(weight is not None for weight, _ in blend):
            continue
        if not all(os.path.isfile(p + end) for _, p in blend for end in (".idx", ".bin")):
            continue
        tokens = [_held(prefix) for _, prefix in blend]
        if not all(tokens):
            continue  # said by `empty`
        pairs = [(str(n), p) for n, (_, p) in zip(tokens, blend, strict=True)]
        changes[dest] = [word for pair in pairs for word in pair]
        shares = ", ".join(f"{os.path.basename(p)} {int(n) / sum(tokens):.1%}" for n, p in pairs)
        notes.append(f"{flag(dest)} without weights: each counts by its tokens ({shares})")
    return changes, notes


# --- what the data holds ----------------------------------------------------------------------


def missing(found: Sources) -> list[str]:
    """Files that are named and not on this machine."""
    return [
        prefix + suffix
        for prefix in found.prefixes()
        for suffix in (".idx", ".bin")
        if not os.path.isfile(prefix + suffix)
    ]


def bounds(shares: Sequence[float], sequences: int) -> list[tuple[int, int] | None]:
    """First and last-but-one sequence of each split; None for a split without a share.

    Rounds as upstream does (``megatron/core/datasets/blended_megatron_dataset_builder.py``,
    ``..._config.py: convert_split_vector_to_split_matrix``).
    """
    total = sum(shares)
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share / total)
    return [
        (round(a * float(sequences)), round(b * float(sequences))) if a < b else None
        for a, b in itertools.pairwise(edges)
    ]


def _tokens(index: Index, first: int, last: int, enough: int) -> int:
    """Tokens of sequences ``first:last``; stops counting at ``enough``."""
    block, total = 1 << 16, 0
    for start in range(first, last, block):
        total += int(index.lengths(start, min(start + block, last)).sum(dtype="int64"))
        if total >= enough:
            break
    return total


def empty(found: Sources, seq_length: int) -> dict[int, str]:
    """Splits that hold too little for a single sample: number of the split -> what is short.

    Upstream looks for the number of epochs that gives enough samples, and never finds it. Data that
    is not on this machine is left out.

    Raises:
        UserError: An index that is there cannot be read.
    """
    short: dict[int, str] = {}
    for number, blend in enumerate(found.blends):
        for _, prefix in blend or []:
            if number in short or not os.path.isfile(prefix + ".idx"):
                continue
            from megatron_patch.data.idxmap import read_index

            index = read_index(prefix)
            limits = bounds(found.shares, index.sequences) if found.shares else None
            part = limits[number] if limits else (0, index.sequences)
            if part is None:
                continue
            name = f"the {SPLITS[number]} split of {prefix}"
            if part[0] >= part[1]:
                short[number] = f"{name} holds no document (there are {index.documents} in all)"
                continue
            # One more than a sequence: its last label is the token after it.
            tokens = _tokens(index, *part, enough=seq_length + 1)
            if tokens <= seq_length:
                short[number] = (
                    f"{name} holds {tokens} tokens, which is less than one sequence of "
                    f"{seq_length} and the token after it"
                )
    return short


@dataclass(frozen=True)
class Reading:
    """How much of a run comes from a data set.

    Attributes:
        prefix: The data set.
        share: Of the run's sequences.
        tokens: Of its training part; None where it is not on this machine.
        epochs: How often the run reads it; None with ``tokens``.
    """

    prefix: str
    share: float
    tokens: int | None
    epochs: float | None

    def __str__(self) -> str:
        part = f"{self.share:.1%} of the run"
        if self.tokens is None or self.epochs is None:
            return f"{part}; how many epochs is not known, its data is not here"
        return f"{part}, read {self.epochs:.3g} times ({human_count(self.tokens)} tokens)"


def _held(prefix: str) -> int:
    """Tokens of a data set, by the bytes of its data."""
    from megatron_patch.data.idxmap import read_index  # NumPy, only where data is here

    return os.path.getsize(prefix + ".bin") // read_index(prefix).dtype.itemsize


def epoch_samples(prefix: str, seq_length: int) -> int:
    """Sequences of one pass over a data set; the last label is the token after the last one."""
    return (_held(prefix) - 1) // seq_length


def readings(found: Sources, tokens: int) -> list[Reading]:
    """What a run reads of each of its data sets.

    Counts the bytes of the data, not its index: at once, whatever the size.

    Args:
        found: The data.
        tokens: Of the run.
    """
    blend = found.training
    weights = [1.0 / len(blend) if weight is None else weight for weight, _ in blend]
    rows = []
    for weight, (_, prefix) in zip(weights, blend, strict=True):
        share, held = weight / sum(weights), None
        if os.path.isfile(prefix + ".idx") and os.path.isfile(prefix + ".bin"):
            held = _held(prefix)
            if found.shares:
                held = round(held * found.shares[0] / sum(found.shares))
        rows.append(Reading(prefix, share, held, share * tokens / held if held else None))
    return rows


def unmarked(found: Sources, ends: Sequence[int], *, sample: int = 48) -> Iterator[str]:
    """Warnings about data whose documents run into each other, from a few documents of each.

    Args:
        found: The data.
        ends: Ids that may end a document, of which one has to.
        sample: Documents to look at.
    """
    for prefix in found.prefixes() if ends else ():
        if not (os.path.isfile(prefix + ".idx") and os.path.isfile(prefix + ".bin")):
            continue
        from megatron_patch.data.idxmap import eod_share

        share = max(eod_share(prefix, end, sample=sample) for end in ends)
        if share < _MARKED:
            ids = " or ".join(map(str, ends))
            yield (
                f"{'none' if not share else f'only {share:.0%}'} of the documents sampled in "
                f"{prefix} end with id {ids}, which ends a document: the model would learn to run "
                "from one into the next; make the data with --append-eod, or name its id by "
                "--null-tokenizer-eod-id"
            )


#: Below this share of documents with a mark at their end the others are no accident.
_MARKED = 0.9
