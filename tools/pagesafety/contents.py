"""What every virtual unit and host slot of a stage must hold, by the ops and forwards alone.

Owns the expected bytes, advanced in the order in which ops and forwards are issued. Must never see a physical unit or
an effect: that is what makes it a witness. Bytes of token bands are below 128 and those of state at or above it, so a
byte says which kind of writer it is from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Bytes8s, Int32s, i32, i64
from allocator.geometry import Geometry
from allocator.ops import Backup, CopyState, Fix, Flush, Free, Hold, Load, Op, Publish, Rebind, Send, Take

STATE_BIT = 0x80


class ForwardPlan:
    """One forward by virtual ids: units read and written per band, and what is written where."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, Int32s]] = []
        self.writes: list[tuple[int, Int32s, int]] = []  # band, ids, a number that offsets and bytes follow from
        self.unknown = False  # speculative: the chains are not told what it writes


def written_rows(kind: str, unit_bytes: int, ids: Int32s, number: int) -> tuple[Int32s, Bytes8s]:
    """Byte offsets and bytes (uint8[ids, n]) that a forward writes: a row of a page, or the whole state of a slot."""
    seeds = number + ids.astype(np.int64) * 7
    if kind == "state":
        values = (seeds[:, None] + np.arange(unit_bytes) * 3) % 127 + 1 | STATE_BIT
        return np.zeros(ids.size, dtype=np.int32), values.astype(np.uint8)
    return (seeds % unit_bytes).astype(np.int32), (seeds % 126 + 1).astype(np.uint8)[:, None]


def peer_rows(kind: str, unit_bytes: int, use: int, ids: Int32s) -> Bytes8s:
    """What the peer of a receive writes into these units."""
    values = (use * 31 + ids.astype(np.int64)[:, None] * 11 + np.arange(unit_bytes) * 5) % 127 + 1
    return (values | STATE_BIT if kind == "state" else values).astype(np.uint8)


class StageContents:
    """Expected bytes of one stage: `rows[band]` uint8[ids + 1, unit_bytes], known where `known[band]`."""

    def __init__(self, geometry: Geometry, stage: int, host_slots: int) -> None:
        self.bands = geometry.stages[stage].bands
        limits = [geometry.virtual_slots if band.kind == "state" else geometry.virtual_pages for band in self.bands]
        self.rows: list[Bytes8s] = []
        self.known: list[NDArray[np.bool_]] = []
        self.host: list[Bytes8s] = []
        for band, limit in zip(self.bands, limits, strict=True):
            self.rows.append(np.zeros((limit + 1, max(1, band.unit_bytes)), dtype=np.uint8))
            self.known.append(np.zeros(limit + 1, dtype=np.bool_))
            self.host.append(np.zeros((host_slots, max(1, band.unit_bytes)), dtype=np.uint8))
        self._receives: set[int] = set()
        self.handed: dict[int, list[tuple[int, Bytes8s]]] = {}  # what each send or reading peer must carry

    def apply(self, op: Op) -> None:
        """The expected bytes after `op`."""
        match op:
            case Flush() | Fix():
                return
            case Rebind(band, sources, targets):
                self._move(band, i32(sources), i32(targets))
                self.known[band][i32(sources)] = False
            case CopyState(band, sources, targets):
                self._move(band, i32(sources), i32(targets))
            case Hold(use, _):
                self._receives.add(use)
            case _:
                for index, part in enumerate(op.parts):
                    if self.bands[part.band].unit_bytes:
                        self._part(op, index, part.band, i32(part.ids))

    def _move(self, band: int, sources: Int32s, targets: Int32s) -> None:
        self.rows[band][targets] = self.rows[band][sources]
        self.known[band][targets] = self.known[band][sources]

    def _part(self, op: Op, index: int, band: int, ids: Int32s) -> None:
        rows, known = self.rows[band], self.known[band]
        match op:
            case Take():
                known[ids] = self.bands[band].kind != "state"
                rows[ids] = 0
            case Free():
                known[ids] = False
            case Backup(_, _, slots):
                self.host[band][i64(slots[index])] = rows[ids]
            case Load(_, _, slots):
                rows[ids] = self.host[band][i64(slots[index])]
                known[ids] = True
            case Publish(use, _) if use in self._receives:
                rows[ids] = peer_rows(self.bands[band].kind, self.bands[band].unit_bytes, use, ids)
                known[ids] = True
            case Publish(use, _) | Send(use, _):
                self.handed.setdefault(use, []).append((band, rows[ids]))

    def receives(self, use: int) -> bool:
        """Whether the peer of `use` writes."""
        return use in self._receives

    def ended(self, use: int) -> list[tuple[int, Bytes8s]]:
        """Forgets a use; what it had to carry."""
        self._receives.discard(use)
        return self.handed.pop(use, [])

    def forward(self, plan: ForwardPlan) -> list[Bytes8s]:
        """The bytes that its reads must see, in order; then its writes are in."""
        seen = [self.rows[band][ids] for band, ids in plan.reads if self.bands[band].unit_bytes]
        for band, ids, number in plan.writes:
            size = self.bands[band].unit_bytes
            if size:
                offsets, values = written_rows(self.bands[band].kind, size, ids, number)
                self.rows[band][ids[:, None], offsets[:, None] + np.arange(values.shape[1])] = values
                self.known[band][ids] = True
        return seen
