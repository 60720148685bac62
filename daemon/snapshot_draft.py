"""Snapshot draft: the core as it is behind one step, until the stages' parts are there and the file is written.

Owns what goes into a snapshot's file. Must never change the core, and never look at it later than it was begun: what is
encoded is a copy of the process, forked at that moment, beside the loop. Invariant: the same moment gives the same
bytes, whoever writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from daemon.core.scheduler import SchedulerCore
from daemon.forked import Forked
from daemon.snapshots import core_state
from ipc.packing import unpack
from journal import segment, snapshots
from journal.records import DECISION_VERSION
from journal.snapshots import BODY_BYTES_MAX, Body, Header
from journal.storage import Storage

TIMEOUT_S = 1200.0  # from the stages' parts to the file; encoding 100,000 cached nodes took 4.6 s of CPU


@dataclass(frozen=True, slots=True)
class Moment:
    """What a snapshot is of: the state behind record `sequence`, at step `seq`; `reported_seq` was reported by then."""

    journal_id: bytes
    life: str
    sequence: int
    epoch: int
    seq: int
    reported_seq: int
    sampled: bytes
    stages: int


class Written(NamedTuple):
    """A snapshot's file."""

    name: str
    size_bytes: int
    digest: bytes


class Draft(Protocol):
    """A snapshot that was begun."""

    async def finish(self, stages: Sequence[bytes]) -> Written:
        """Write it, with the packed state of each stage. Raises OSError or ForkedFailed, and then there is none."""

    def abandon(self) -> None:
        """It is not wanted any more."""

    async def reap(self) -> None:
        """Wait until nothing of an abandoned one is left, not for long."""

    def gone(self) -> bool:
        """Nothing of it is left."""


Begin = Callable[[SchedulerCore, Storage, Moment], Draft]
"""Begin a snapshot of a core as it is now; raises OSError."""


def write(core: SchedulerCore, storage: Storage, moment: Moment, receive: Callable[[], bytes]) -> Written:
    """Encode the core, receive the packed states of the stages, write the file. Blocks on all of it."""
    state, groups = core_state(core), core.recoverable()
    stages = [unpack(receive(), BODY_BYTES_MAX) for _ in range(moment.stages)]
    body = snapshots.encode_body(Body(state, stages, moment.reported_seq, moment.sampled, groups, core.next_request))
    digest = segment.digest(body)
    header = Header(
        moment.journal_id,
        moment.life,
        DECISION_VERSION,
        moment.sequence,
        moment.epoch,
        moment.seq,
        len(body),
        digest,
    )
    return Written(*snapshots.write(storage, header, body), digest)


class ForkedDraft:
    """A draft in a copy of this process: the loop pauses for the fork, and for nothing else."""

    def __init__(self, core: SchedulerCore, storage: Storage, moment: Moment, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._forked = Forked(lambda receive: msgspec.msgpack.encode(write(core, storage, moment, receive)))

    async def finish(self, stages: Sequence[bytes]) -> Written:
        """See Draft."""
        return msgspec.msgpack.decode(await self._forked.answer(stages, self._timeout_s), type=Written)

    def abandon(self) -> None:
        """See Draft."""
        self._forked.kill()

    async def reap(self) -> None:
        """See Draft."""
        await self._forked.reap()

    def gone(self) -> bool:
        """See Draft."""
        return self._forked.gone()
