from __future__ import annotations

from check_family import check_family
from configs import MIXTRAL


def test_contract(tmp_path):
    check_family("mixtral", MIXTRAL, "mixtral", tmp_path)
