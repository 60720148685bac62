"""Pages: who computed which full-attention page, so that an eviction can say whose pages it took.

Owns that map of one epoch, made from the steps of a replayed core. Must never ask more of a step than its ops and its
page tables. Invariant: an eviction whose pages cannot be told apart from pages freed otherwise names nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from allocator.columns import Int32s, i32
from allocator.ops import Free, Op, Take
from daemon.core.outputs import Outputs
from daemon.core.reasons import Verdict
from daemon.core.scheduler import SchedulerCore
from ipc.messages import Step

NEW = -1  # taken in this step, not given to a row yet


class Pages:
    """`left_by` are the requests whose pages the newest input evicted, with how many, most first."""

    def __init__(self) -> None:
        self.left_by: tuple[tuple[int, int], ...] = ()
        self._band = 0
        self._by = np.zeros(1, np.int64)  # request by virtual page id, 0: not known
        self._took: Counter[int] = Counter()

    def begin(self, virtual_pages: int, band: int) -> None:
        """An epoch begins, or the journal in the middle of one: nothing is known of any page."""
        self._by = np.zeros(virtual_pages + 1, np.int64)
        self._band = band
        self.forget()

    def forget(self) -> None:
        """Nothing is known of the newest input."""
        self.left_by = ()
        self._took.clear()

    def took(self, request: int) -> tuple[int, int]:
        """Full-attention pages that the newest step took for a request, and for all."""
        return self._took[request], self._took.total()

    def stepped(self, core: SchedulerCore, out: Outputs) -> None:
        """A tick was fed to the core; what it took and evicted."""
        self.forget()
        step = out.step
        if step is None:
            return
        evicted = sum(one.numbers.get("units_full", 0) for one in out.decisions if one.verdict == Verdict.EVICTED)
        if evicted:
            self._evicted(step.ops, evicted)
        self._taken(core, step)

    def _evicted(self, ops: list[Op], count: int) -> None:
        """The last frees before a take are what it evicted, where their number and no other take's says so too."""
        found = [ids for at, op in enumerate(ops) if isinstance(op, Take) for ids in self._freed_before(ops, at, count)]
        if len(found) != 1:
            return
        counted = Counter(self._by[found[0]].tolist())
        counted.pop(0, None)
        self.left_by = tuple(sorted(counted.items(), key=lambda one: (-one[1], one[0])))

    def _freed_before(self, ops: list[Op], at: int, count: int) -> Iterator[Int32s]:
        """Exactly so many pages that the frees right before an op have, if their bounds allow it."""
        pages: list[Int32s] = []
        while at > 0 and isinstance(ops[at - 1], Free) and sum(map(len, pages)) < count:
            at -= 1
            pages.append(self._ids(ops[at]))
        if sum(map(len, pages)) == count:
            yield np.concatenate(pages)

    def _taken(self, core: SchedulerCore, step: Step) -> None:
        taken = [self._ids(op) for op in step.ops if isinstance(op, Take)]
        if step.forward is None or not any(len(ids) for ids in taken):
            return
        for ids in taken:
            self._by[ids] = NEW
        pages, rows = i32(step.forward.table_pages), i32(step.forward.table_rows)
        fresh = self._by[pages] == NEW
        requests = core.state.rows.request[rows[fresh]]
        self._by[pages[fresh]] = requests
        for request, count in Counter(requests.tolist()).items():
            self._took[int(request)] += count

    def _ids(self, op: Op) -> Int32s:
        assert isinstance(op, Take | Free), "what names pages by band"
        parts = [i32(part.ids) for part in op.parts if part.band == self._band]
        return parts[0] if parts else np.zeros(0, np.int32)
