"""Actions and findings in words, for people: "take 1 page of full and 1 of window:64", and one line per cause.

Owns the wording and the grouping. Must never lose the machine's form: a finding keeps the texts that `replay` reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tools.smallscope.world import Action, World

WRITES = {"all": "all it may write", "none": "nothing", "unknown": "what nobody knows"}
VERBS = {
    "backup": "back up {} to the host",
    "load": "load {} from the host",
    "hold": "hold {} for a peer's rows",
    "send": "send {}",
    "lend": "publish {} for a peer to read",
}


def in_words(world: World, action: Action) -> str:
    """One action as a sentence without its subject."""
    kind, about = action
    if kind == "take":
        return _take(world, *about)
    if kind == "free":
        return f"free page {about[0]}"
    if kind == "retire":
        return f"retire the unit of {_band(world, about[0])} of page {about[1]}"
    if kind == "free_slot":
        return f"free slot {about[0]}"
    if kind == "launch":
        return f"launch a forward that writes {WRITES[about[0]] if about[0] in WRITES else f'page {about[1]}'}"
    if kind == "flush":
        return f"flush, at most {about[0]} moves a band"
    if kind == "copy_state":
        return f"copy the state of slot {about[0]} to slot {about[1]}"
    if kind == "rebind":
        return f"rebind the unit of {_band(world, about[0])} from page {about[1]} to page {about[2]}"
    if kind in VERBS:
        return VERBS[kind].format(_units(world, about[0]))
    plain = {
        "process": "the oldest forward's result is processed",
        "release": "use {} is released",
        "publish": "publish the rows that use {} holds",
        "fix": "send {} cannot be waited for any more",
        "report": "the report of fixed extents through use {} arrives",
    }
    return plain[kind].format(*about)


def _take(world: World, demand: tuple[int, ...], onto: tuple[tuple[int, ...], ...]) -> str:
    parts = []
    for band, count in enumerate(demand):
        if not count:
            continue
        pages = f" onto page {' and '.join(map(str, onto[band]))}" if onto[band] else ""
        unit = "slot" if band == world.state else "page" if band == world.owner else "unit"
        parts.append(f"{count} {unit}{'s' if count > 1 else ''} of {_band(world, band)}{pages}")
    return f"take {' and '.join(parts)}"


def _band(world: World, band: int) -> str:
    return world.geometry.stages[0].bands[band].name


def _units(world: World, units: Sequence[tuple[int, int]]) -> str:
    band, virtual = units[-1]
    if band == world.state:
        return f"slot {virtual}"
    bands = [_band(world, b) for b, _ in units if b != world.owner]
    with_windows = f" with its units of {' and '.join(bands)}" if bands else ""
    return f"page {virtual}{with_windows}"


def cause_of(name: str, detail: str) -> str:
    """What findings of one cause have in common: numbers do not count."""
    return f"{name}|{re.sub(r'[0-9]+', '#', detail)}"


def grouped(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One finding per cause, the shortest, with the counts of all of them added; in order of first appearance."""
    by_cause: dict[str, dict[str, Any]] = {}
    for finding in findings:
        cause = cause_of(finding["name"], finding["detail"])
        known = by_cause.get(cause)
        if known is None:
            by_cause[cause] = dict(finding)
        else:
            count = known["count"] + finding["count"]
            if len(finding["actions"]) < len(known["actions"]):
                known.update(finding)
            known["count"] = count
    return list(by_cause.values())
