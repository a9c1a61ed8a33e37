from __future__ import annotations

import pytest


@pytest.fixture
def law():
    """Fail with every breach of a law on a line of its own."""

    def check(breaches: list[str], text: str) -> None:
        assert not breaches, f"{text}\n" + "\n".join(sorted(breaches))

    return check
