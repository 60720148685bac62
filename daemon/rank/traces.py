"""Traces: what a rank did in its newest steps, kept to name the first place where two ranks differ.

Owns the ring of steps and how effects become words. Must never change what it is shown, nor cost a step more than a few
references. Invariant: two texts are equal only where the effects are: columns too long to show are told by their hash.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import NamedTuple

from allocator.checks import some
from allocator.columns import i32, i64
from allocator.effects import Effect, canonical_bytes
from allocator.geometry import BandGeometry
from allocator.ops import Op
from ipc.messages import OpTrace, StepTrace

STEPS_KEPT = 64
LATE = "waits of the launch before"
LONG_COLUMNS = frozenset({"slots"})  # int64, the others int32


class Trace(NamedTuple):
    """One applied step: both digests behind it, ops, effects, and where those of each op end (`chain.apply`)."""

    seq: int
    logical: bytes
    layout: bytes
    ops: list[Op]
    effects: list[Effect]
    ends: list[int]


class Traces:
    """The newest `STEPS_KEPT` steps; read by another thread than the one that adds to it."""

    def __init__(self, bands: list[BandGeometry]) -> None:
        self._names = [band.name for band in bands]
        self._ring: deque[Trace] = deque(maxlen=STEPS_KEPT)

    def add(self, trace: Trace) -> None:
        """A step was applied."""
        self._ring.append(trace)

    def explain(self) -> list[StepTrace]:
        """All that is kept, oldest first."""
        return [self._step(trace) for trace in list(self._ring)]

    def _step(self, trace: Trace) -> StepTrace:
        begin = trace.ends[0]
        ops = self._op(0, LATE, trace.effects[:begin]) if begin else []
        for index, (op, end) in enumerate(zip(trace.ops, trace.ends[1:], strict=True)):
            ops += self._op(index, type(op).__name__, trace.effects[begin:end])
            begin = end
        return StepTrace(trace.seq, trace.logical, trace.layout, ops)

    def _op(self, index: int, kind: str, effects: list[Effect]) -> list[OpTrace]:
        """The effects of an op, one entry for each band, in the order in which the bands appear; one if it had none."""
        by_band: dict[str, list[Effect]] = {}
        for effect in effects:
            band = getattr(effect, "band", None)
            by_band.setdefault("" if band is None else self._names[band], []).append(effect)
        if not by_band:
            return [OpTrace(index, kind, "", "nothing")]
        return [OpTrace(index, kind, band, in_words(some_effects)) for band, some_effects in by_band.items()]


def in_words(effects: list[Effect]) -> str:
    """Effects as text: `Bind virtual 7, 8 physical 120, 121; Zero units 120, 121 (#1f2e3d4c)`."""
    texts = []
    for effect in effects:
        words = [type(effect).__name__]
        for name in effect.__struct_fields__:
            value = getattr(effect, name)
            if name == "band":
                continue
            if isinstance(value, bytes):
                value = some((i64 if name in LONG_COLUMNS else i32)(value))
            words.append(f"{name} {value}")
        texts.append(" ".join(words))
    digest = blake2b(canonical_bytes(effects), digest_size=4).hexdigest()
    return f"{'; '.join(texts)} (#{digest})"
