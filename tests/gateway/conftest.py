"""Fixtures: a private directory whose path is short enough for a Unix socket, and its front endpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A 0700 directory, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="bm-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def endpoint(run_dir: Path) -> str:
    """An ipc endpoint in a fresh private directory."""
    return f"ipc://{run_dir / 'front.sock'}"
