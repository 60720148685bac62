"""Nouns: amounts of memory, places and lists in the words of somebody who knows LLM serving, not this project.

Owns the names of the kinds of memory. Must never drop a number. Invariant: a kind that no row knows keeps its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from allocator.capacity import FROZEN, ID_SPACE

Numbers = Mapping[str, int]
Bands = Sequence[Sequence[str]]
"""Names of bands by stage and place, of the epoch that is told of."""

LEAST_ROOM = "on the pipeline stage with the least room"
FROZEN_PLACE = "(none may be taken until the ranks have said where published pages lie)"

CLOCK_FROM_NS = 10**18  # times before 2001 are those of a simulated world
UNITS = "units_"
SHORT = ("units_short", "stage", "band")
"""Numbers that say where memory lacks how much."""


def units(count: int, what: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def kind(name: str) -> tuple[str, str]:
    """One unit of a band: a noun that takes an s, and what follows it."""
    if name == "full":
        return "full-attention page", ""
    if name == "state":
        return "recurrent-state slot", ""
    if name.startswith("window:"):
        return "page", f" of the {int(name.partition(':')[2]):,}-token sliding window"
    return "unit", f" of band {name}" if name.isdecimal() else f" of {name}"


def amount(count: int, name: str) -> str:
    """`12 full-attention pages`."""
    noun, behind = kind(name)
    return f"{units(count, noun)}{behind}"


def amounts(numbers: Numbers, prefix: str = UNITS) -> str:
    """All units by band that numbers name, as a list; empty when there are none."""
    named = {name.removeprefix(prefix): count for name, count in numbers.items() if is_band(name, prefix)}
    return listed(amount(named[name], name) for name in sorted(named, key=lambda one: one != "full") if named[name])


def is_band(name: str, prefix: str = UNITS) -> bool:
    """Whether a number counts units of a band."""
    return name.startswith(prefix) and name != "units_short"


def listed(parts: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = list(parts)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}" if words else ""


def band_name(numbers: Numbers, bands: Bands) -> str:
    """The band that is short; its number where no epoch said more. Every stage has the same bands."""
    band = numbers.get("band", 0)
    known = bool(bands) and 0 <= band < len(bands[0])
    return bands[0][band] if known else str(band)


def place(numbers: Numbers, bands: Bands = (), only: str = "") -> str:
    """Where it is short, in words; `only` where there is but one stage."""
    stage = numbers.get("stage", 0)
    if stage == FROZEN:
        return FROZEN_PLACE
    if len(bands) == 1 and stage in (0, ID_SPACE):
        return only
    return LEAST_ROOM if stage == ID_SPACE else f"on pipeline stage {stage}"


def short(numbers: Numbers, bands: Bands, only: str = "") -> str:
    """How much memory lacks, and where (`only`: on the only stage there is); empty when the numbers do not say."""
    if "units_short" not in numbers:
        return ""
    lacking = amount(numbers["units_short"], band_name(numbers, bands))
    return " ".join(part for part in (lacking, place(numbers, bands, only)) if part)


def short_of(numbers: Numbers, bands: Bands) -> dict[str, str]:
    """The names behind the numbers of what is short, as plain values."""
    return {"band": band_name(numbers, bands), "where": place(numbers)}


def rest(numbers: Numbers, told: Sequence[str] = SHORT) -> str:
    """Numbers that no sentence took, by name."""
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items() if name not in told)


def joined(*parts: str) -> str:
    """Parts of a sentence, without the empty ones."""
    return "; ".join(part for part in parts if part)


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `11th`."""
    teens = number % 100 in (11, 12, 13)
    ending = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def times(count: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def milliseconds(ns: int) -> str:
    """A duration: `under 0.1 ms`, `0.4 ms`, `12 ms`, `13.2 s`, `4 min 10 s`.

    Digits are cut off, as in the whole milliseconds that decisions have, so that two tellings of one time agree.
    """
    if ns >= 120 * 10**9:
        minutes, seconds = divmod(ns // 10**9, 60)
        return f"{minutes:,} min {seconds} s"
    if ns >= 10**10:
        return f"{ns // 10**9}.{ns // 10**8 % 10} s"
    if 0 < ns < 100_000:
        return "under 0.1 ms"
    whole = f"{ns // 10**6:,}"
    return f"{whole} ms" if ns >= 10**7 or not ns % 10**6 else f"{whole}.{ns // 10**5 % 10} ms"
