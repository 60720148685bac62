"""Restarts: how often the ranks may be started again, and how long to wait before it.

Owns the times of restarts. Must never read a clock: the caller brings the time, in seconds of any steady clock.
Invariants: within any `window_s` there are at most `most` restarts; the pause doubles with each restart in a row that
brought no progress, from `PAUSE_MIN_S` to `PAUSE_MAX_S`.
"""

from __future__ import annotations

from collections import deque

PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 5.0


class Restarts:
    """The budget of restarts of one daemon."""

    def __init__(self, most: int, window_s: float) -> None:
        self.most = most
        self.window_s = window_s
        self.total = 0
        self._times: deque[float] = deque()
        self._in_vain = 0  # restarts in a row whose epoch brought no progress

    def within_window(self, now_s: float) -> int:
        """Restarts that still count."""
        while self._times and now_s - self._times[0] >= self.window_s:
            self._times.popleft()
        return len(self._times)

    def take(self, now_s: float, progressed: bool) -> float | None:
        """One more restart: seconds to wait before it, None when there were too many; `progressed`: see above."""
        if self.within_window(now_s) >= self.most:
            return None
        self._times.append(now_s)
        self.total += 1
        self._in_vain = 0 if progressed else self._in_vain + 1
        return float(min(PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(self._in_vain, 16)))
