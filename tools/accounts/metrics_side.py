"""The metrics' account: what one scrape says became of all choices.

Owns the reading of the Prometheus text format. Must never ask anybody. A sample that is not there is a finding of its
own, never a zero.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from daemon.core.account import Account
from daemon.core.reasons import EndReason
from daemon.metrics import ACCOUNT_GAUGES, ACCOUNT_TOTALS, PREFIX

NAMES = {f"{PREFIX}{shown}_total": name for name, (shown, _) in ACCOUNT_TOTALS.items()}
NAMES |= {f"{PREFIX}{shown}": name for name, (shown, _) in ACCOUNT_GAUGES.items()}
SEQUENCE, LOST = f"{PREFIX}journal_sequence", f"{PREFIX}log_lines_lost"
FAILURES = f"{PREFIX}observe_failures_total"
DOOR = f'{PREFIX}gateway_events{{event="refused_here"}}'
PLAIN = {*NAMES, SEQUENCE, LOST, FAILURES, DOOR}
_LIFE = re.compile(re.escape(PREFIX) + r'life\{life="([0-9a-f]+)"\}')
_ENDS = re.compile(re.escape(PREFIX) + r'request_success_total\{finished_reason="(\w+)"\}')


class NoScrape(Exception):
    """The text is not what a daemon of this version exposes; the message names what is missing."""


class Scrape(NamedTuple):
    """What one scrape says: behind record `sequence` of a life. `door`: turned away before they were received."""

    life: str
    sequence: int
    account: Account
    ends: dict[str, int]  # by reason
    lines_lost: int = 0
    failures: int = 0
    door: int = 0


def read_scrape(text: str) -> Scrape:
    """A scrape out of its text; raises NoScrape."""
    values: dict[str, int] = {}
    ends: dict[str, int] = {}
    life = ""
    for line in text.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        sample, _, number = line.rpartition(" ")
        if sample in PLAIN:
            values[sample] = int(float(number))
        elif found := _LIFE.fullmatch(sample):
            life = found[1]
        elif found := _ENDS.fullmatch(sample):
            ends[found[1]] = int(float(number))
    missing = sorted(PLAIN - values.keys()) + ([] if life else [f"{PREFIX}life"])
    missing += [f"request_success_total of {reason.value}" for reason in EndReason if reason.value not in ends]
    if missing:
        raise NoScrape(f"the metrics lack {', '.join(missing)}")
    account = Account(**{name: values[sample] for sample, name in NAMES.items()})
    return Scrape(life, values[SEQUENCE], account, ends, values[LOST], values[FAILURES], values[DOOR])
