"""Core attention under context parallelism equals attention on one rank, outputs and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.attention_jobs import CASES
from tests.dist.harness import RankServer


@pytest.mark.parametrize("size", [2, 4])
def test_equals_one_rank(size: int, ranks: RankServer, tmp_path: Path) -> None:
    result = ranks.run("tests.dist.attention_jobs:attend", size, tmp_path / "job")
    for rank, cases in enumerate(result.values):
        assert set(cases) == set(CASES)
        for name, gaps in cases.items():
            assert max(gaps.values()) < 1e-12, (rank, name, gaps)


def test_refusals(ranks: RankServer, tmp_path: Path) -> None:
    result = ranks.run("tests.dist.attention_jobs:refuse", 2, tmp_path / "job")
    for messages in result.values:
        full, masked, uneven, packed_full, dynamic = messages
        assert "causal only" in full
        assert "causal only" in masked
        assert "6 tokens, not a multiple of 2 x CP = 4" in uneven
        assert "causal only" in packed_full
        assert "dynamic context parallel" in dynamic
