from __future__ import annotations

from check_family import check_family
from configs import MISTRAL


def test_contract(tmp_path):
    check_family("mistral", MISTRAL, "mistral", tmp_path)
