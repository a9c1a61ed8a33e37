"""The clock of a start-up."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron_patch import _compat

CHILD = """
import time
time.sleep(0.4)
from megatron_patch.training import startup
startup.begin()
called = startup.ends("data", lambda: None)
time.sleep(0.2)
called(); called()
time.sleep(0.3)
print(startup.end("first step"))
assert startup.end("again") is None
startup.mark("later")
"""


def test_phases_add_up_to_the_life_of_the_process() -> None:
    before = time.monotonic()
    text = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
    ).stdout.strip()
    whole = time.monotonic() - before
    head, _, phases = text.partition(" s: ")
    found = {name: float(value) for name, value in (p.rsplit(" ", 1) for p in phases.split(", "))}
    total = float(head.removeprefix("start-up "))
    assert list(found)[-3:] == ["python", "data", "first step"]
    assert found["python"] >= 0.4 and found["data"] >= 0.2 and found["first step"] >= 0.3
    assert total == pytest.approx(sum(found.values()), abs=0.2) and 0.9 <= total <= whole + 0.1


def test_a_package_is_hidden_for_a_while() -> None:
    assert "this" not in sys.modules
    with _compat.hidden("this", "json"):
        import json  # imported before: stays

        assert json.dumps(1) == "1"
        with pytest.raises(ModuleNotFoundError):
            import this  # noqa: F401
    assert "this" not in sys.modules
