"""Watch: a monitor outside the server that asks for its health all the time, and dates what it sees.

Owns the looks and what they say of one fault. Must never use a connection twice, nor wait longer than a monitor would:
no answer in time is red. All times are seconds of the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import trio

LOOK_EVERY_S = 0.05
ANSWER_WITHIN_S = 0.75


class Look(NamedTuple):
    """One look at /health: when it began and ended, and whether the server said that it serves."""

    began_s: float
    ended_s: float
    green: bool


class Seen(NamedTuple):
    """What a fault looked like, in seconds from it on; None for what did not come."""

    red_s: float | None  # until the first look that is not green has its answer, or none
    green_s: float | None  # until the end of the first green look behind the last red one
    silence_s: float  # the longest time from the fault on in which no client got a token
    tokens_s: float | None  # until the first token behind that silence


class Watch:
    """Looks at one address until cancelled."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._request = f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
        self.looks: list[Look] = []

    async def run(self) -> NoReturn:
        """Look at a steady pace."""
        while True:
            began = time.monotonic()
            green = await self._look()
            self.looks.append(Look(began, time.monotonic(), green))
            await trio.sleep(max(0.0, began + LOOK_EVERY_S - time.monotonic()))

    async def _look(self) -> bool:
        with trio.move_on_after(ANSWER_WITHIN_S):
            try:
                async with await trio.open_tcp_stream(self._host, self._port) as stream:
                    await stream.send_all(self._request)
                    return b" 200 " in (await stream.receive_some(64)).split(b"\r\n")[0]
            except (OSError, trio.BrokenResourceError):
                return False
        return False

    def green_since(self, moment_s: float) -> bool:
        """Whether the last look began after the moment and was green."""
        return bool(self.looks) and self.looks[-1].green and self.looks[-1].began_s >= moment_s

    def seen(self, fault_s: float, until_s: float, arrivals_s: Iterable[float]) -> Seen:
        """What a fault looked like until the time when everything asked before it had come."""
        looks = [look for look in self.looks if look.ended_s >= fault_s and look.began_s <= until_s]
        reds = [look for look in looks if not look.green]
        green = (
            next((look for look in looks if look.green and look.began_s >= reds[-1].ended_s), None) if reds else None
        )
        gap = _longest_gap(fault_s, sorted(moment for moment in arrivals_s if fault_s <= moment <= until_s))
        return Seen(
            reds[0].ended_s - fault_s if reds else None,
            green.ended_s - fault_s if green else None,
            gap[1] - gap[0] if gap else 0.0,
            gap[1] - fault_s if gap else None,
        )


def _longest_gap(fault_s: float, arrivals_s: list[float]) -> tuple[float, float] | None:
    """Begin and end of the longest time between tokens, the fault itself taken for one; None without any behind it."""
    ends = [fault_s, *arrivals_s]
    return max(pairwise(ends), key=lambda gap: gap[1] - gap[0], default=None)
