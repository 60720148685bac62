"""Faults of a rank: what it decides or performs otherwise than the ops say.

Owns the changes to one rank, each by one method of one object. Must never touch what the core decides. The truth is the
step, the op at which it happened, and a request that the op concerns by the core's own tables.
"""

from __future__ import annotations

from typing import Any

from allocator.columns import Int32s
from allocator.effects import Copy, Effect, WaitForward, Zero
from allocator.ops import Free, Op, Take
from allocator.physical.band import Band
from ipc.messages import Step
from tools.planted.scene import Fault, Scene, Truth, WorkingRank, takes_pages


class RankFault(Fault):
    """Of the one rank; `struck` notes the truth where the rank is."""

    def struck(self, scene: Scene, rank: WorkingRank) -> None:
        """It happens now, at the rank's step and op."""
        step = rank.step
        assert step is not None, "a rank strikes within a step"
        op: Any = step.ops[rank.op] if 0 <= rank.op < len(step.ops) else None
        about = scene.holders(op) if isinstance(op, Take | Free) else []
        self.truth = Truth(step.seq, rank.op, about[0] if about else 0)


class WrongPage(RankFault):
    """A rank binds the ids of a take to other units than the rule says."""

    def rank(self, scene: Scene, rank: WorkingRank) -> None:
        """See Fault."""
        units = rank.chain._stored[-1].units
        bind = units.bind

        def bound(positions: Int32s, ids: Int32s) -> Any:
            if scene.ripe and ids.size > 1:
                self.struck(scene, rank)
                positions = positions[::-1].copy()
            return bind(positions, ids)

        units.bind = bound  # type: ignore[method-assign]


class LostFree(RankFault):
    """A rank does not free the last page of a free: a leak on that rank alone."""

    turns = 30

    def rank(self, scene: Scene, rank: WorkingRank) -> None:
        """See Fault."""
        band = rank.chain._stored[-1]
        free = band.free

        def freed(ids: Int32s) -> list[Effect]:
            if scene.ripe and not scene.core.state.live:  # the next take of that id breaks the rank, unreported
                self.struck(scene, rank)
                ids = ids[:-1]
            return free(ids) if ids.size else []

        band.free = freed  # type: ignore[method-assign]


class EarlyReuse(RankFault):
    """A rank takes units for free while a forward that may read them is in flight."""

    def rank(self, scene: Scene, rank: WorkingRank) -> None:
        """See Fault."""
        for band in rank.chain._stored:
            self._change(scene, rank, band)

    def _change(self, scene: Scene, rank: WorkingRank, band: Band) -> None:
        free = band.free

        def freed(ids: Int32s) -> list[Effect]:
            effects = free(ids)
            step = rank.step
            if scene.ripe and step is not None and rank.op == len(step.ops) - 1 and band.pending.units:
                self.truth = Truth(step.seq)
                band.settle_all()
            return effects

        band.free = freed  # type: ignore[method-assign]


class Undecided(RankFault):
    """The chain leaves an effect out of an op, before the digest is taken."""

    kind: type[Effect]

    def rank(self, scene: Scene, rank: WorkingRank) -> None:
        """See Fault."""
        decide = rank.chain._apply

        def decided(op: Op) -> list[Effect]:
            effects = decide(op)
            if scene.ripe and any(isinstance(effect, self.kind) for effect in effects):
                self.struck(scene, rank)
                effects = [effect for effect in effects if not isinstance(effect, self.kind)]
            return effects

        rank.chain._apply = decided  # type: ignore[method-assign]


class SkippedWait(Undecided):
    """A rank's chain moves units without waiting for the forward that reads them."""

    kind = WaitForward


class Unperformed(RankFault):
    """The executor leaves out an effect that its chain decided."""

    kind: type[Effect]

    def rank(self, scene: Scene, rank: WorkingRank) -> None:
        """See Fault."""
        perform = rank.executor._perform

        def performed(effect: Effect) -> None:
            if scene.ripe and isinstance(effect, self.kind):
                self.struck(scene, rank)
                return
            perform(effect)

        rank.executor._perform = performed  # type: ignore[method-assign]


class UnperformedWait(Unperformed):
    """A rank decides on a wait for a forward and does not perform it."""

    kind = WaitForward


class NotZeroed(Unperformed):
    """A rank hands out pages with what an earlier request left in them."""

    kind = Zero


class NotMoved(Unperformed):
    """A rank moves units in its books and does not copy their bytes."""

    kind = Copy


class LostOp(RankFault):
    """A rank's logical chain misses the only op of a step."""

    def rank(self, scene: Scene, rank: WorkingRank) -> None:
        """The mirror belongs to the recording: see `record`."""

    def record(self, scene: Scene, payload: Any) -> list[Any]:
        """The digest that a rank without the op has: that of no op at all."""
        recording = scene.recording
        mirror = recording.mirror
        if isinstance(payload, Step) and not hasattr(mirror, "planted"):
            apply = mirror.apply_step

            def applied(seq: int, ops: list[Op], released: Any = ()) -> bytes:
                pages = len(ops) == 1 and takes_pages(ops[0])
                if scene.ripe and pages:
                    self.truth = Truth(seq, 0, (scene.holders(ops[0]) or [0])[0])
                    ops = []
                digest: bytes = apply(seq, ops, released)
                return digest

            mirror.apply_step = applied
            mirror.planted = True
        return [payload]


FAULTS: tuple[type[Fault], ...] = (
    WrongPage,
    LostFree,
    EarlyReuse,
    SkippedWait,
    UnperformedWait,
    NotZeroed,
    NotMoved,
    LostOp,
)
