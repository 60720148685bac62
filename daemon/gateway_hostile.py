"""Complaints: log lines about hostile or broken peers, at most one per kind and interval.

Owns the rate limit only. Must never be keyed by anything a peer chooses: kinds are a closed set of the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EVERY_S = 10.0
TEXT_CHARACTERS_MAX = 200


class Complaints:
    """One line at once, then one per `EVERY_S` with the number that was left out."""

    def __init__(self, log: Any, now_s: Callable[[], float], every_s: float = EVERY_S) -> None:
        self._log = log
        self._now_s = now_s
        self._every_s = every_s
        self._said: dict[str, tuple[float, int]] = {}  # event -> (time of the last line, left out since)

    def note(self, event: str, code: str, *, peer: str, text: str) -> None:
        """Log or count one complaint."""
        now = self._now_s()
        last = self._said.get(event)
        if last is not None and now - last[0] < self._every_s:
            self._said[event] = (last[0], last[1] + 1)
            return
        left_out = last[1] if last is not None else 0
        self._said[event] = (now, 0)
        self._log.warning(event, code=code, peer=peer, text=text[:TEXT_CHARACTERS_MAX], left_out=left_out)
