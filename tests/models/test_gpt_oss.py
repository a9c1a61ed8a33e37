from __future__ import annotations

from check_family import check_family
from configs import GPT_OSS


def test_contract(tmp_path):
    check_family("gpt_oss", GPT_OSS, "gpt_oss", tmp_path)
