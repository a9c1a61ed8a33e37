from __future__ import annotations

import pytest
from check_family import check_family, check_windows, resolve
from configs import SMOLLM3

from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("smollm3", SMOLLM3, "smollm3", tmp_path)


@pytest.mark.slow
def test_windows(tmp_path):
    check_windows(SMOLLM3, [0, 0, 1, 0], tmp_path)


def test_which_layers_rotate(tmp_path):
    listed = {key: value for key, value in SMOLLM3.items() if key != "no_rope_layers"}
    assert resolve(listed, tmp_path).args["no_rope_freq"] == [0, 0, 0, 1]
    every = resolve(listed | {"no_rope_layers": [1] * 4}, tmp_path).args
    assert "no_rope_freq" not in every
    for wrong in ([1, 1], [1, 1, 2, 0], [True] * 4):
        with pytest.raises(UserError, match="'no_rope_layers' has"):
            resolve(listed | {"no_rope_layers": wrong}, tmp_path)
