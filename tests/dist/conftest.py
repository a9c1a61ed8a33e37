from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.harness import RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    """Runs functions on forked CPU ranks; see `harness.RankServer.run`."""
    server = RankServer()
    yield server
    server.close()
