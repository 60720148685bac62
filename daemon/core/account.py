"""Account: how many choices were received, refused, accepted, and what became of them, as numbers of one moment.

Owns the equations between those numbers, once for everybody who counts: the core, and whoever compares logs, journal
and metrics with it. Must never count anything itself. Numbers are of one life of the daemon and count choices: a
request with n = 3 is three of each.

    received = refused + accepted        accepted + recovered = finished + aborted + failed + live
                                         live = waiting + holding
"""

from __future__ import annotations

from typing import NamedTuple

from daemon.core.state import CoreState


class Account(NamedTuple):
    """The numbers of one life at one moment.

    `recovered` were accepted in an earlier life and had not ended. `repeated` arrivals were answered again and are in
    no other number. `waiting` hold nothing, `holding` have a row.
    """

    received: int = 0
    refused: int = 0
    accepted: int = 0
    recovered: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    repeated: int = 0
    live: int = 0
    waiting: int = 0
    holding: int = 0

    @property
    def ended(self) -> int:
        """All that ended, whichever way."""
        return self.finished + self.aborted + self.failed

    def problems(self) -> list[str]:
        """The equations that do not hold, with their numbers; none when all do."""
        sides = (
            ("received", self.received, "refused + accepted", self.refused + self.accepted),
            ("accepted + recovered", self.accepted + self.recovered, "ended + live", self.ended + self.live),
            ("live", self.live, "waiting + holding", self.waiting + self.holding),
        )
        return [f"{name} is {left}, {others} is {right}" for name, left, others, right in sides if left != right]


def account_of(core: CoreState) -> Account:
    """What the core counts now; costs about a microsecond."""
    totals = core.totals
    return Account(
        totals.received,
        totals.refused,
        totals.accepted,
        totals.recovered,
        totals.finished,
        totals.aborted,
        totals.failed,
        totals.repeated,
        core.live,
        core.waiting,
        core.holding,
    )
