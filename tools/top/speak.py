"""Speak: decisions and waits in the words of `bandmaster why`, for lines of a terminal.

Owns the colours of verdicts and which of them are routine. Must never phrase a decision by itself: the sentences are
`tools.why.words`'.
"""

from __future__ import annotations

from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from daemon.core.requests import State
from daemon.recent import Told
from tools.top.palette import BAD, DIM, GOOD, HOT, PREFILL, TEXT, WARN
from tools.why.nouns import Bands, joined, rest, short
from tools.why.waits import FOR, waiting
from tools.why.words import sentence

ROUTINE = frozenset(
    {Verdict.ACCEPTED, Verdict.ADMITTED, Verdict.ENDED, Verdict.EVICTED, Verdict.IDLE, Verdict.UNPARKED}
)
"""Verdicts of a day on which nothing is scarce."""

COLOURS: dict[str, str] = {
    Verdict.ACCEPTED: DIM,
    Verdict.ADMITTED: PREFILL,
    Verdict.ENDED: GOOD,
    Verdict.EVICTED: DIM,
    Verdict.IDLE: DIM,
    Verdict.WAITS: WARN,
    Verdict.SHRUNK: WARN,
    Verdict.PARKED: HOT,
    Verdict.UNPARKED: GOOD,
    Verdict.RETRACTED: BAD,
    Verdict.REFUSED: BAD,
    Verdict.STALLED: BAD,
    Verdict.REQUEUED: HOT,
}
ENDED_WELL = ("stop", "length")


def colour_of(decided: Decided) -> str:
    """The colour of a decision."""
    if decided.verdict == Verdict.ENDED and decided.reason not in ENDED_WELL:
        return BAD if decided.reason != "abort" else WARN
    return COLOURS.get(decided.verdict, TEXT)


def is_routine(told: Told) -> bool:
    """Whether a decision says nothing of scarcity or failure."""
    decided = told.decided
    return decided.verdict in ROUTINE and not (decided.verdict == Verdict.ENDED and decided.reason not in ENDED_WELL)


def spoken(decided: Decided, bands: Bands) -> str:
    """The sentence of a decision; as it stands where a daemon of another version left out what the sentence needs."""
    try:
        return sentence(decided, bands)
    except (KeyError, ValueError):
        return joined(decided.reason, rest(decided.numbers))


def waits(reason: str, numbers: dict[str, int], bands: Bands) -> str:
    """What a request waits for; as it stands, as above."""
    try:
        return waiting(reason, numbers, bands)
    except (KeyError, ValueError):
        return joined(reason, rest(numbers))


def waits_short(reason: str, numbers: dict[str, int], bands: Bands) -> str:
    """The same in a few words."""
    words = FOR.get(reason, reason)
    return f"{words}, short of {short(numbers, bands)}" if "units_short" in numbers else words


def stage_word(stage: str) -> str:
    """A state of a request in at most ten characters."""
    return "parked" if stage in (State.PARKED_ROW, State.PARKED_CHUNK) else stage
