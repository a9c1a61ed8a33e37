"""Saved at one layout, loaded at another: every weight, fp32 master and moment bit for bit.

The five losses that follow equal those of the run that went on without a stop, in the last bit
where the layout is the same. All layouts have several gradient buckets, and padded ends. The
ordinary run takes a few pairs; `pytest -m slow -s tests/dist/test_resume_matrix.py` takes all of
them and prints a line for each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import MODELS, ODD, at_step, stored, write_corpus, write_model

BATCH, STEPS = 6, 10
#: Name -> ranks and flags.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp1": (1, ()),
    "dp2": (2, ()),
    "dp3": (3, ()),
    "tp2": (2, ("--tp", "2")),
    "pp2": (2, ("--pp", "2")),
    "vpp": (2, ("--pp", "2", "--vpp", "2")),
    "uneven": (2, ("--pp", "2", "--decoder-first-pipeline-num-layers", "1")),
    "ep2": (2, ("--ep", "2")),
}
KINDS = {
    "dense": ODD,
    "moe": MODELS["moe"]
    | {"vocab_size": 511, "hidden_size": 72, "head_dim": 18, "moe_intermediate_size": 44},
}
#: Largest relative difference of a loss; bf16's own steps are 4e-3.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}

SHORT = [
    ("dense", "dp3", "dp1", "fp32"),
    ("dense", "dp3", "tp2", "fp32"),
    ("dense", "dp3", "vpp", "fp32"),
    ("moe", "ep2", "dp1", "fp32"),
    ("moe", "ep2", "uneven", "fp32"),
]
_LONG = [
    *((k, a, b, "fp32") for k in KINDS for a in LAYOUTS for b in LAYOUTS if "dp1" not in (a, b)),
    ("moe", "dp1", "ep2", "fp32"),
    ("dense", "dp3", "tp2", "bf16"),
    ("moe", "ep2", "dp3", "bf16"),
    ("moe", "tp2", "tp2", "bf16"),
]
LONG = [c for c in _LONG if c not in SHORT and (c[0] == "moe" or "ep2" not in c)]
CASES = [
    *(pytest.param(*case, id="-".join(case)) for case in SHORT),
    *(pytest.param(*case, id="-".join(case), marks=pytest.mark.slow) for case in LONG),
]


@dataclass(frozen=True)
class Saved:
    """A run of ten steps, saved after five."""

    output: Path
    records: list[dict[str, Any]]
    rows: list[Counter[str]]
    states: dict[str, tuple[str, tuple[int, ...], bytes]]


class Runs:
    """Runs of all layouts, each made when it is first asked for."""

    def __init__(self, ranks: RankServer, folder: Path) -> None:
        self.ranks, self.folder, self._saved = ranks, folder, {}  # type: ignore[var-annotated]
        # Fewer sequences than ten steps read, so that they cross from one epoch to the next.
        write_corpus(folder / "corpus", documents=10)
        for kind, config in KINDS.items():
            write_model(folder / kind, config)

    def train(
        self,
        job: Path,
        output: Path,
        kind: str,
        layout: str,
        precision: str,
        *more: str,
        **options: Any,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Records of the run, and what its ranks tell."""
        world, flags = LAYOUTS[layout]
        argv = [
            *("--hf-model", str(self.folder / kind), "--data-path", str(self.folder / "corpus")),
            *("--output-dir", str(output), "--seq-length", "32", "--micro-batch-size", "1"),
            *("--global-batch-size", str(BATCH), "--train-iters", str(STEPS), "--lr", "3e-3"),
            *("--warmup-steps", "2", "--seed", "11", "--precision", precision),
            *("--overlap-grad-reduce", "--ddp-bucket-size", "20000", *flags, *more),
        ]
        found = self.ranks.run(
            "tests.dist.matrix_jobs:train", world, job, argv=argv, **options
        ).values
        assert [value["status"] for value in found] == [0] * world
        # Later pipeline stages have one bucket a chunk.
        buckets = [value["buckets"] for value in found]
        assert len(buckets[0]) > 1 and any(pad for of in buckets for _, pad in of), buckets
        return metrics.read(output), found

    def saved(self, kind: str, layout: str, precision: str) -> Saved:
        key = (kind, layout, precision)
        if key not in self._saved:
            folder = self.folder / "-".join(key)
            records, found = self.train(
                folder / "job", folder / "run", *key, "--save-interval", "5"
            )
            states = stored(folder / "run" / "checkpoints" / "iter_0000005")
            self._saved[key] = Saved(folder / "run", records, by_step(found, STEPS), states)
        return self._saved[key]


def by_step(found: list[dict[str, Any]], steps: int) -> list[Counter[str]]:
    """The sequences of every step, whichever replica read them."""
    readers = [value["rows"] for value in found if value["rows"]]
    share = BATCH // len(readers)
    return [
        Counter(row for rows in readers for row in rows[step * share : (step + 1) * share])
        for step in range(steps)
    ]


@pytest.fixture(scope="module")
def runs(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(("kind", "saves", "loads", "precision"), CASES)
def test_saved_at_one_layout_goes_on_at_another(
    kind: str, saves: str, loads: str, precision: str, runs: Runs, tmp_path: Path
) -> None:
    whole = runs.saved(kind, saves, precision)
    output = at_step(whole.output, tmp_path / "run")
    records, found = runs.train(
        tmp_path / "job", output, kind, loads, precision, "--save-interval", "100", resave=True
    )
    again = stored(tmp_path / "job" / "resaved" / "iter_0000005")
    assert sorted(again) == sorted(whole.states)
    different = [key for key in again if again[key] != whole.states[key]]
    rest = whole.records[5:]
    gaps = [abs(a["lm loss"] / b["lm loss"] - 1) for a, b in zip(records, rest, strict=True)]
    padded = sum(pad > 0 for value in found for _, pad in value["buckets"])
    buckets = sum(len(value["buckets"]) for value in found)
    print(
        f"\n{kind:5} {precision} {saves:>6} -> {loads:6} {len(again):3} tensors, "
        f"{len(different)} differ; largest difference of 5 losses {max(gaps):.1e}; "
        f"{buckets} buckets, {padded} padded",
        end="",
    )
    assert not different
    assert [row["iteration"] for row in records] == [6, 7, 8, 9, 10]
    for value in ("consumed_samples", "learning_rate"):
        assert [row[value] for row in records] == [row[value] for row in rest]
    assert by_step(found, 5) == whole.rows[5:], "the same sequences in every step"
    if saves == loads:
        for value in ("lm loss", "load_balancing_loss", "grad_norm"):
            ours, theirs = ([row.get(value) for row in part] for part in (records, rest))
            assert ours == theirs, f"{value}, bit for bit"
    assert max(gaps) < TOLERANCE[precision]


@pytest.mark.parametrize(
    ("kind", "layout", "precision"),
    [
        ("dense", "dp3", "fp32"),
        ("moe", "ep2", "fp32"),
        pytest.param("moe", "tp2", "bf16", marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_is_whole(kind: str, layout: str, precision: str, runs: Runs) -> None:
    """Every weight has a master, of which it is the rounded value, and two moments that moved."""
    import torch

    states = runs.saved(kind, layout, precision).states

    def tensor(key: str) -> Any:
        dtype, shape, content = states[key]
        return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(shape)

    weights = [key for key in states if not key.startswith("optimizer.")]
    assert len(weights) > 5
    for key in weights:
        masters = [k for k in states if k.startswith("optimizer.") and k.endswith(f".param.{key}")]
        assert len(masters) == 1, key
        weight, master = tensor(key), tensor(masters[0])
        assert master.dtype == torch.float32
        assert torch.equal(master.to(weight.dtype), weight), key
        for moment in ("exp_avg", "exp_avg_sq"):
            values = tensor(masters[0].replace(".param.", f".{moment}.")).numpy()
            assert np.isfinite(values).all() and np.abs(values).max() > 0, (key, moment)


def test_ten_steps_cross_an_epoch(runs: Runs) -> None:
    """So the cases above resume the order of the data across epochs."""
    read = sum(map(len, runs.saved("dense", "dp3", "fp32").rows))
    assert read > BATCH * STEPS // 2
    tokens = (runs.folder / "corpus.bin").stat().st_size // 2
    assert 1 < BATCH * STEPS * 32 / tokens < 3


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", "tp2"),
        pytest.param("moe", "ep2", marks=pytest.mark.slow),
        pytest.param("dense", "vpp", marks=pytest.mark.slow),
    ],
)
def test_random_numbers_go_on(kind: str, layout: str, runs: Runs, tmp_path: Path) -> None:
    """Python's, NumPy's, torch's and the model-parallel generators, by dropout's losses too."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--save-interval", "5")
    records, found = runs.train(tmp_path / "a", tmp_path / "whole", kind, layout, "fp32", *dropout)
    copy = at_step(tmp_path / "whole", tmp_path / "run")
    rest, later = runs.train(tmp_path / "b", copy, kind, layout, "fp32", *dropout)
    assert [row["lm loss"] for row in rest] == [row["lm loss"] for row in records[5:]]
    for whole, part in zip(found, later, strict=True):
        assert {"python", "numpy", "torch"} < set(whole["random"][0])
        for name in whole["random"][0]:
            states, later_states = ([step[name] for step in of["random"]] for of in (whole, part))
            # Experts draw their first weights and nothing after; upstream keeps one rank's state.
            if name == "expert-parallel-rng":
                assert len(set(states)) == 1, "nobody draws from it while training"
                continue
            assert later_states == states[5:], name
            assert len(set(states)) > 1 or name in ("data-parallel-rng", "torch"), f"{name} moves"
