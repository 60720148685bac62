"""Which outstanding work touches which bytes, and what new work is behind: the race detector of a modeled device.

Owns one bit per outstanding actor (a launched forward, a host copy, a transfer, a peer) and, per byte of the arena, who
reads and who writes it. Must never look at when work really runs: only at the waits it was given. Invariant: an actor
is outstanding until the schedule stream is ordered behind it; all later work is behind the schedule stream, so nothing
can race with it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s
from allocator.geometry import StageGeometry

ACTORS_MAX = 64


class DeviceFault(AssertionError):
    """A chain let a device do what it must never do. `check` names the rule, e.g. `unordered_overlap`."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check
        self.text = text


class Actor(NamedTuple):
    """Outstanding work: its bit, what it is called, and the newest forward that it is ordered behind."""

    bit: int
    name: str
    behind_forward: int


class Order:
    """Byte marks of one arena. `schedule`, `forward` and `use` check new work, then mark what is outstanding."""

    def __init__(self, stage: StageGeometry) -> None:
        self._marks = np.zeros((2, stage.arena_bytes), dtype=np.uint64)  # read by, written by
        self._bands = stage.bands
        self._first = stage.chain_start_bytes
        self._size = stage.arena_bytes
        self._views: list[NDArray[np.uint64]] = []
        for band in stage.bands:
            units = stage.arena_bytes // band.unit_bytes if band.unit_bytes else 0
            self._views.append(self._marks[:, : units * band.unit_bytes].reshape(2, units, band.unit_bytes or 1))
        self._forwards: dict[int, Actor] = {}
        self._uses: dict[int, Actor] = {}
        self._free_bits = list(range(ACTORS_MAX))

    # --- new work ------------------------------------------------------------------------------------------------

    def schedule(self, band: int, units: Int32s, writes: bool, what: str) -> None:
        """Work on the schedule stream: it races with everything outstanding."""
        self._inside(band, units, what)
        self._check(band, units, writes, self._outstanding(), what)

    def forward(self, seq: int, reads: Sequence[tuple[int, Int32s]], writes: Sequence[tuple[int, Int32s]]) -> None:
        """Forward `seq`: ordered behind schedule work and earlier forwards; it races with outstanding uses."""
        others = sum(1 << actor.bit for actor in self._uses.values())
        name = f"forward {seq}"
        for band, units in reads:
            self._check(band, units, False, others, name)
        for band, units in writes:
            self._inside(band, units, name)
            self._check(band, units, True, others, name)
        actor = self._forwards[seq] = Actor(self._free_bits.pop(), name, seq)
        for band, units in reads:
            self._mark(band, units, False, actor)
        for band, units in writes:
            self._mark(band, units, True, actor)

    def use(self, use: int, name: str, band: int, units: Int32s, writes: bool, behind_forward: int) -> None:
        """A copy or transfer: ordered behind schedule work and forwards up to `behind_forward`."""
        self._inside(band, units, name)
        mine = self._uses.get(use)
        if mine is None:
            mine = self._uses[use] = Actor(self._free_bits.pop(), name, behind_forward)
        elif mine.behind_forward < behind_forward:
            mine = self._uses[use] = mine._replace(behind_forward=behind_forward)
        others = self._outstanding() & ~(1 << mine.bit)
        for seq, actor in self._forwards.items():
            if seq <= behind_forward:
                others &= ~(1 << actor.bit)
        self._check(band, units, writes, others, name)
        self._mark(band, units, writes, mine)

    # --- what the schedule stream is ordered behind ----------------------------------------------------------------

    def behind_forward(self, seq: int) -> None:
        """Schedule work from now on runs after every forward up to `seq`."""
        for done in [one for one in self._forwards if one <= seq]:
            self._retire(self._forwards.pop(done))

    def behind_use(self, use: int) -> None:
        """Schedule work from now on runs after use `use`, and after what that one was behind."""
        actor = self._uses.pop(use, None)
        if actor is not None:
            self._retire(actor)
            self.behind_forward(actor.behind_forward)

    # --- inside --------------------------------------------------------------------------------------------------

    def _outstanding(self) -> int:
        return sum(1 << actor.bit for group in (self._forwards, self._uses) for actor in group.values())

    def _inside(self, band: int, units: Int32s, what: str) -> None:
        """Nothing but a forward's padding rows touches bytes outside the chain."""
        if not units.size:
            return
        unit = self._bands[band].unit_bytes
        low, high = int(units.min()) * unit, (int(units.max()) + 1) * unit
        if low < self._first or high > self._size:
            raise DeviceFault(
                "outside_chain",
                f"{what} touches bytes [{low}, {high}) of band {self._bands[band].name}; the chain has "
                f"[{self._first}, {self._size})",
            )

    def _check(self, band: int, units: Int32s, writes: bool, others: int, what: str) -> None:
        if not others or not units.size:
            return
        reading, writing = self._views[band]
        mask = np.uint64(others)
        touched = writing[units] & mask
        if writes:
            touched |= reading[units] & mask
        if touched.any():
            row = int(touched.any(axis=1).argmax())
            bits = int(np.bitwise_or.reduce(touched[row]))
            found = [a.name for group in (self._forwards, self._uses) for a in group.values() if bits >> a.bit & 1]
            verb = "writes" if writes else "reads"
            raise DeviceFault(
                "unordered_overlap",
                f"{what} {verb} unit {int(units[row])} of band {self._bands[band].name} beside {', '.join(found)}, "
                "which it is not ordered behind",
            )

    def _mark(self, band: int, units: Int32s, writes: bool, actor: Actor) -> None:
        if units.size:
            self._views[band][int(writes), units] |= np.uint64(1 << actor.bit)

    def _retire(self, actor: Actor) -> None:
        self._marks &= np.uint64(~(1 << actor.bit) & (2**64 - 1))
        self._free_bits.append(actor.bit)
