"""Nouns: amounts of memory, places and lists in the words of somebody who knows LLM serving, not this project.

Owns the names of the kinds of memory. Must never drop a number. Invariant: a kind that no row knows keeps its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from allocator.capacity import FROZEN, ID_SPACE

Numbers = Mapping[str, int]
Bands = Sequence[Sequence[str]]
"""Names of bands by stage and place, of the epoch that is told of."""

PLACES = {
    ID_SPACE: "(the numbers for them, of which an arena has so many, have run out)",
    FROZEN: "(nothing may be taken until the ranks have said where published pages lie)",
}
"""What stands for a stage where it is none."""

UNITS = "units_"
SHORT = ("units_short", "stage", "band")
"""Numbers that say where memory lacks how much."""


def units(count: int, what: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def kind(name: str) -> str:
    """One unit of a band, as a noun that takes an s."""
    if name == "full":
        return "full-attention page"
    if name == "state":
        return "recurrent-state slot"
    if name.startswith("window:"):
        return f"{int(name.partition(':')[2]):,}-token-window page"
    return f"unit of {name}" if not name.isdecimal() else f"unit of band {name}"


def amount(count: int, name: str) -> str:
    """`12 full-attention pages`."""
    noun = kind(name)
    if noun.startswith("unit of "):
        return f"{units(count, 'unit')}{noun.removeprefix('unit')}"
    return units(count, noun)


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


def place(numbers: Numbers, bands: Bands = ()) -> str:
    """Where it is short, in words; empty where there is but one stage."""
    stage = numbers.get("stage", 0)
    if stage in PLACES:
        return PLACES[stage]
    return "" if len(bands) == 1 and stage == 0 else f"on pipeline stage {stage}"


def short(numbers: Numbers, bands: Bands) -> str:
    """How much memory lacks, and where; empty when the numbers do not say."""
    if "units_short" not in numbers:
        return ""
    lacking = amount(numbers["units_short"], band_name(numbers, bands))
    return " ".join(part for part in (lacking, place(numbers, bands)) if part)


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
    """A duration: `0.4 ms`, `12 ms`, `3.2 s`, `4 min 10 s`."""
    if ns >= 120 * 10**9:
        minutes, seconds = divmod(round(ns / 1e9), 60)
        return f"{minutes:,} min {seconds} s"
    if ns >= 10**10:
        return f"{ns / 1e9:.1f} s"
    return f"{ns / 1e6:,.0f} ms" if ns >= 10**7 or not ns % 10**6 else f"{ns / 1e6:.1f} ms"
