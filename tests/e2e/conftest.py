"""One modeled server for the tests that leave it as they found it; every test here starts real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import assert_replays, eventually, idle, modeled, serving
from tools.own_server import OwnServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """A modeled server with room for 64 requests; in the end it must be idle, stop cleanly, and replay."""
    with serving(tmp_path_factory.mktemp("shared") / "run", *modeled("--max-running-requests", "64")) as server:
        yield server
        eventually(lambda: idle(server), "everything is given back")
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)
