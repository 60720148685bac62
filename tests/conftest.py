"""What holds for every test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_width_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is as wide as it is: whoever runs the tests may have set the width of a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
