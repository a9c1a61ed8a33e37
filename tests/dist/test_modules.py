"""Linear layers and the padded vocabulary, split over ranks and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.harness import RankServer


def test_replicated_linear(ranks: RankServer, tmp_path: Path) -> None:
    first, second = ranks.run("tests.dist.module_jobs:replicated", 2, tmp_path / "job").values
    assert first["weight"] == second["weight"]
    assert np.ptp(first["weight"]) > 1
    assert first["shapes"] == {"x.weight": [6, 16], "x.bias": [6]}
    for key in first["shapes"]:
        assert first["replicas"][key] != second["replicas"][key], "one main copy in a checkpoint"


def test_norm_linear_under_sequence_parallelism(ranks: RankServer, tmp_path: Path) -> None:
    (whole,) = ranks.run("tests.dist.module_jobs:norm_linear", 1, tmp_path / "one").values
    for split in ranks.run("tests.dist.module_jobs:norm_linear", 2, tmp_path / "two").values:
        for name, value in whole.items():
            np.testing.assert_allclose(split[name], value, rtol=0, atol=1e-12, err_msg=name)


@pytest.fixture(scope="module")
def true_vocabulary(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vocabulary")
    (found,) = ranks.run(
        "tests.dist.module_jobs:padded_vocab", 1, folder / "true", true=50, padded=50
    ).values
    assert found["hooks"] == 0, "nothing to do without padding"
    return found


@pytest.mark.parametrize(
    ("world", "padded"),
    # 64 over two: the second rank's rows end in padding. 100 and 120: its rows are all padding,
    # and at 120 the first rank's end in some.
    [(1, 64), (2, 64), (2, 100), (2, 120)],
)
def test_padded_vocabulary_is_no_vocabulary(
    world: int, padded: int, ranks: RankServer, true_vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    result = ranks.run(
        "tests.dist.module_jobs:padded_vocab", world, tmp_path / "job", true=50, padded=padded
    )
    for found in result.values:
        assert found["hooks"] == 1
        assert found["head_padding"] == 0.0
        assert found["largest_choice"] < 50
        for name in ("loss", "head", "embedding", "norm"):
            np.testing.assert_allclose(
                found[name], true_vocabulary[name], rtol=1e-6, atol=1e-8, err_msg=name
            )
