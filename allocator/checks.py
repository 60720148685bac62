"""Invariants by name: which exist, which are fatal, and what each level does when one does not hold.

Owns the table `INVARIANTS` and the level. Must never read the environment: the level (`BANDMASTER_INVARIANTS` = 0, 1
warn, 2 strict) is passed in. Fatal ones raise at every level, because going on would corrupt live data; the others
are silent at 0, collected in `Checks.found` at 1 (each line once; the shell logs and drains it), and raise at 2. At 2
every chain also recounts itself after each step.
"""

from __future__ import annotations

from typing import NamedTuple

from allocator.errors import InvariantBroken

OFF, WARN, STRICT = 0, 1, 2


class Invariant(NamedTuple):
    """Whether it is fatal at every level, and what it says."""

    fatal: bool
    text: str


INVARIANTS: dict[str, Invariant] = {
    "band.free_of_bound_unit": Invariant(True, "every id a free names is bound: no second free, none of a free id"),
    "band.take_of_unbound_id": Invariant(True, "every id a take names is unbound, inside the id space, and named once"),
    "band.free_outside_reservation": Invariant(True, "no free names a unit held for a peer's rows: its use ends first"),
    "band.free_of_fixed_unit": Invariant(True, "no free that ranks hear of names a published or sent unit"),
    "band.write_of_fixed_unit": Invariant(True, "nothing but its peer writes a unit that is held or fixed"),
    "band.rebind_of_bound_unit": Invariant(True, "a rebind names units that exist and live pages that hold none"),
    "use.once": Invariant(True, "a use begins once, under a number above all earlier ones, is fixed once, ends once"),
    "use.names_live_units": Invariant(True, "a use and a copy name units that are live and have an owner"),
    "use.reads_received_unit": Invariant(True, "nobody reads a unit that a peer may be writing"),
    "use.released_in_step": Invariant(True, "a step lists as released exactly the uses whose end it was decided with"),
    "band.geometry_ready": Invariant(True, "a flush that moves units sees a band without pending units"),
    "chain.window_segment_bound": Invariant(True, "a window part names pages that the owner holds"),
    "chain.window_segment_released": Invariant(True, "an owner free names pages that every window has released"),
    "chain.realizable": Invariant(True, "a take that the logical chain accepted can be realized on this layout"),
    "chain.stage_capacity_agreement": Invariant(
        True, "what is live fits every stage with the fixed extents that its ranks reported"
    ),
    "chain.byte_conservation": Invariant(
        True, "live + hole + pending + vacated + fenced + beyond = the band's part of the arena"
    ),
    "chain.idle": Invariant(True, "at idle nothing is live and nothing pends"),
    "chain.step_order": Invariant(True, "steps, launches and processing come in order, each once"),
    "op.canonical": Invariant(True, "parts ascend by band, ids ascend strictly, no part is empty"),
    "capacity.observe_only_read": Invariant(False, "no estimate is read while a decision is made"),
}


class Checks:
    """The level of invariant checks of one chain, and what was found at level 1."""

    __slots__ = ("_said", "found", "level")

    def __init__(self, level: int = WARN) -> None:
        if level not in (OFF, WARN, STRICT):
            raise ValueError(f"the invariant level must be 0, 1 or 2, not {level}")
        self.level = level
        self.found: list[str] = []
        self._said: set[str] = set()

    def broken(self, name: str, detail: str) -> None:
        """The invariant `name` does not hold: raises InvariantBroken where it is fatal or the level is strict."""
        assert detail, "a broken invariant says what it saw"
        if INVARIANTS[name].fatal or self.level >= STRICT:
            raise InvariantBroken(name, detail)
        if self.level >= WARN:
            line = f"{name}: {detail}"
            if line not in self._said:
                self._said.add(line)
                self.found.append(line)


def some(ids: object, most: int = 8) -> str:
    """The first few ids of a column, for error text."""
    values = [int(value) for value in ids]  # type: ignore[attr-defined]
    tail = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + tail
