"""Memory: the core's way to the logical chain; every question and every change of units goes through here.

Owns the ops of the step being formed and the pages given back since the last question. Must never answer from a
counter of its own: returned pages reach the chain before any question is asked, so a freed unit is visible to the very
next one. Invariant: the ops of a step, applied in order, are exactly what the chain was told, in that order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from allocator.capacity import CapacityRefusal
from allocator.checks import WARN, Checks
from allocator.columns import Int32s
from allocator.demand import Purpose, RequestSizes, request_demand
from allocator.errors import InvariantBroken
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.ops import Flush, Op


class Memory:
    """Owner pages of one epoch. Raises InvariantBroken for a geometry with bands that the core cannot price yet."""

    def __init__(self, geometry: Geometry, checks: Checks) -> None:
        kinds = [band.kind for band in geometry.stages[0].bands]
        if kinds != ["full"]:
            raise InvariantBroken("core.priced_bands", f"the core prices one full-attention band, not {kinds}")
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.chain = LogicalChain(geometry, checks)
        self.capacity_pages = self.chain.most_ever()
        self._ops: list[Op] = []
        self._returned: list[Int32s] = []

    @property
    def has_ops(self) -> bool:
        """Something was taken or given back that no step has carried yet."""
        return bool(self._ops or self._returned)

    def pages_of(self, tokens: int) -> int:
        """Pages that cover `tokens` positions."""
        return -(-tokens // self.page_size)

    def ceiling_pages(self, prompt_tokens: int, output_tokens: int) -> int:
        """The most pages that a request of these sizes can ever hold."""
        sizes = RequestSizes(prompt_tokens, output_tokens)
        return request_demand(self.chain.bands, self.page_size, sizes, Purpose.CEILING)[self.chain.owner]

    def deciding(self) -> AbstractContextManager[None]:
        """Marks the planning of a step: nothing in it may read an estimate."""
        return self.chain.decision()

    def never_fits(self, pages: int) -> bool:
        """Not even an empty arena holds so many pages."""
        return self.chain.never_fits((pages,)) is not None

    def refusal(self, pages: int) -> CapacityRefusal | None:
        """Why `pages` more do not fit now, or None. Changes nothing that can be seen."""
        self.settle()
        return self.chain.refusal((pages,))

    def room_pages(self, planned_pages: int) -> int:
        """The most pages that still fit beside `planned_pages` that are not taken yet; 0 when those do not fit."""
        self.settle()
        return max(0, self.chain.max_extra((planned_pages,)))

    def take(self, pages: int) -> Int32s:
        """Take pages, lowest ids first; the caller has asked `refusal` with the same number."""
        self.settle()
        taken = self.chain.take((pages,))
        self._ops.append(taken.op)
        return taken.ids[0]

    def give_back(self, pages: Int32s) -> None:
        """Pages that their owner holds no longer; one `Free` carries all that come back before the next question."""
        if len(pages):
            assert pages.min() > 0, "the sink is nobody's"
            self._returned.append(pages)

    def flush(self, moves_max: int) -> None:
        """Ask every physical chain for an opportunistic flush in the step being formed."""
        self.settle()
        self._ops.append(Flush(moves_max))

    def pending_ops(self) -> list[Op]:
        """The ops of the step being formed, so far."""
        return list(self._ops)

    def seal(self, seq: int) -> tuple[list[Op], bytes]:
        """The ops of step `seq` and the chained logical digest after them; the next step starts empty."""
        self.settle()
        ops, self._ops = self._ops, []
        return ops, self.chain.step_digest(seq, ops)

    def live_units(self) -> tuple[int, ...]:
        """Live units per band, in chain order, with everything given back."""
        self.settle()
        return self.chain.live_units()

    def check_idle(self) -> None:
        """With nothing live: a recount, and nothing is held; raises InvariantBroken. Not at invariant level 0."""
        self.settle()
        if self.chain.checks.level >= WARN:
            self.chain.check()
            self.chain.check_idle()

    def settle(self) -> None:
        """Tell the chain what was given back; every input ends with it, so that no later look can change the ops."""
        if self._returned:
            pages = self._returned[0] if len(self._returned) == 1 else np.concatenate(self._returned)
            self._returned = []
            self._ops.append(self.chain.free([pages]))
