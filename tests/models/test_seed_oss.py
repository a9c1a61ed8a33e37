from __future__ import annotations

import pytest
from check_family import check_family, resolve
from configs import SEED_OSS

from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("seed_oss", SEED_OSS, "seed_oss", tmp_path)


def test_a_size_has_no_default(tmp_path):
    config = {key: value for key, value in SEED_OSS.items() if key != "head_dim"}
    with pytest.raises(UserError, match="head_dim"):
        resolve(config, tmp_path)
