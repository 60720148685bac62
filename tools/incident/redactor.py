"""Redactor: record by record, the journal that the same daemon would have written if users had written otherwise.

Owns the following of a journal with a core that gets the mapped inputs: what comes out of it takes the place of what
was recorded. Must never let a record through that it does not know. Invariants: one record for one record, of the same
number and kind; every decision and every number of the followed core is the recorded one, as is every step but for
tokens, seeds and lengths in bytes that only they have; else CannotFollow is raised, and nothing is given for that
record.

A life whose decisions are of another version cannot be followed: its inputs are mapped where that needs no core, and
every token that was sampled or sent to ranks is 0; its steps are as they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from allocator.columns import i32, i64
from daemon.core import inputs
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from daemon.core.scheduler import SchedulerCore
from ipc.digests import SAMPLED_START, sampled_digest
from ipc.messages import Step
from journal import records
from journal.reader import Record
from journal.records import DECISION_VERSION, INPUT_KINDS, Closed, Digested, Kind, Opened, Snapshotted
from journal.segment import digest
from journal.snapshots import Body, Header, encode_body
from tools.incident.pseudonyms import Tip, without_places
from tools.incident.state import Tips, redact
from tools.incident.values import Known, Values, row_logprobs, shape_of_forward
from tools.replica import factories

replace = msgspec.structs.replace
BODIES_KEPT = 2  # states that wait for the record of their snapshot
LINKS_KEPT = 4096  # of the chain over sampled tokens
TIPS_SPARE = 256


class CannotFollow(Exception):
    """The followed core did otherwise than the recorded one at record `sequence`."""

    def __init__(self, sequence: int, what: str) -> None:
        self.sequence = sequence
        super().__init__(what)


class Made(NamedTuple):
    """A record of the new journal; `body` is the state of a snapshot whose record it is, else empty."""

    sequence: int
    kind: Kind
    payload: bytes
    body: bytes = b""


class Redactor:
    """Takes records in order and gives those that take their place, some of them later."""

    def __init__(self, values: Values, snapshots: bool) -> None:
        """`snapshots`: the journal has snapshots to come, so the ranks' state is followed too."""
        self.notes: list[str] = []
        self.followed = True  # no life had to be passed over
        self._values = values
        self._snapshots = snapshots
        self._core: SchedulerCore | None = None
        self._tips = Tips()
        self._left: dict[int, Known] = {}  # by first number, requests of earlier lives
        self._broke = False  # the core raised at the newest input
        self._expected: dict[Kind, deque[msgspec.Struct]] = {Kind.DECIDED: deque(), Kind.STEPPED: deque()}
        self._waiting: deque[Made | tuple[Record, Digested]] = deque()  # behind a digest whose report has not come
        self._links: dict[int, tuple[bytes, bytes]] = {}  # by step, the chain of sampled tokens: recorded, and ours
        self._reported = 0
        self._epoch = 0
        self._ranks: tuple[Any, list[Any]] | None = None
        self._bodies: dict[int, bytes] = {}
        self._behind = 0  # the record that the snapshot covers at which this journal begins

    # --- from a snapshot -----------------------------------------------------------------------------------------

    def begin_at(self, header: Header, body: Body, ghosts: dict[bytes, bytes]) -> tuple[Header, bytes]:
        """Go on behind a snapshot; what takes its place."""
        resumed = factories().resume(body)
        assert isinstance(resumed.core, SchedulerCore), "the real core is followed"
        self._core = resumed.core
        self._tips = redact(self._core, self._values, ghosts)
        self._ranks = (resumed.mirror, list(resumed.stages))
        self._epoch, self._reported, self._behind = header.epoch, body.reported_seq, header.sequence
        self._links = {body.reported_seq: (body.sampled, self._values.names.digest(body.sampled))}
        mapped = encode_body(self._body(body.stages))
        return replace(header, body_bytes=len(mapped), digest=digest(mapped)), mapped

    def _body(self, stages: list[bytes]) -> Body:
        """The state of core and ranks, with what a restart takes over."""
        assert self._core is not None, "a state is a core's"
        sampled = self._links.get(self._reported, (b"", SAMPLED_START))[1]
        core = self._core
        return Body(
            factories().core_state(core), stages, self._reported, sampled, core.recoverable(), core.next_request
        )

    # --- records -------------------------------------------------------------------------------------------------

    def take(self, record: Record) -> Iterator[Made]:
        """One record of the journal; the records of the new one that can be given now."""
        payload: Any = record.decode()
        if isinstance(payload, Digested):
            self._waiting.append((record, payload))
        else:
            made = self._made(record, payload)
            if self._waiting:
                self._waiting.append(made)
            else:
                yield made
        yield from self._settled(all=isinstance(payload, Opened | inputs.EpochEnded | Closed))

    def end(self) -> Iterator[Made]:
        """The journal ends here."""
        yield from self._settled(all=True)

    def _settled(self, *, all: bool) -> Iterator[Made]:
        """What waited for a report that has come, or will not (`all`)."""
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Made):
                yield first
            else:
                record, said = first
                if not all and said.epoch == self._epoch and said.sampled and said.seq not in self._links:
                    return
                yield Made(record.sequence, Kind.DIGESTED, records.encode(self._digested(said)))
            self._waiting.popleft()

    def _made(self, record: Record, payload: Any) -> Made:
        kind, body = Kind(record.kind), b""
        if isinstance(payload, Opened):
            payload = self._opened(payload)
        elif kind in INPUT_KINDS:
            payload = self._input(record, payload)
        elif isinstance(payload, Decided | Step):
            payload = self._output(record, kind, payload)
        elif isinstance(payload, Snapshotted):
            payload, body = self._snapshotted(record, payload)
        elif isinstance(payload, Closed):
            payload = self._closed(record, payload)
        return Made(record.sequence, kind, records.encode(payload), body)

    def _opened(self, opened: Opened) -> Opened:
        if self._core is not None:
            for (at, id), group in self._core.state.groups.items():
                tip = self._tips.prompts.get((self._core.frontends[at], id))
                if tip is not None:
                    self._left[group.accepted.first_request] = Known(tip, group.digest)
        self._core, self._tips = None, Tips()
        for queue in self._expected.values():
            queue.clear()  # a life that was cut off did not write its last outputs
        self._end_epoch()
        mapped = self._values.opened(opened)
        if opened.decision_version == DECISION_VERSION:
            self._core = SchedulerCore(mapped.core)
        else:
            self.followed = False
            versions = f"{opened.decision_version}, ours is {DECISION_VERSION}"
            self.notes.append(f"life {opened.life} decided by version {versions}: every sampled token in it is 0")
        return mapped

    # --- inputs --------------------------------------------------------------------------------------------------

    def _input(self, record: Record, item: Any) -> msgspec.Struct:
        if self._broke and not isinstance(item, inputs.EpochEnded | inputs.Controlled):
            raise CannotFollow(record.sequence, "the followed core raised at the input before this one")
        self._broke = False
        mapped, ends = self._mapped(item)
        before = self._output_of(item)
        if self._core is not None:
            try:
                outputs = self._core.feed(mapped)
            except Exception:
                self._broke = True  # as the recorded one did, if the epoch ends next
            else:
                self._expected[Kind.DECIDED].extend(outputs.decisions)
                if outputs.step is not None:
                    self._expected[Kind.STEPPED].append(outputs.step)
                self._follow(item, mapped, ends, before, outputs.decisions)
        if isinstance(item, inputs.EpochBegan):
            self._begin_epoch(item)
        elif isinstance(item, inputs.EpochEnded):
            self._end_epoch()
        result: msgspec.Struct = mapped
        return result

    def _mapped(self, item: Any) -> tuple[Any, list[tuple[int, Tip]]]:
        """The input with pseudonyms, and the ends of sequences that it brings or extends, by request where known."""
        names, values = self._values.names, self._values
        if isinstance(item, inputs.Arrived):
            generate, tip = values.generate(item.generate)
            frontend, seed = names.frontend(item.frontend), names.seed(item.seed)
            return replace(item, frontend=frontend, generate=generate, seed=seed), [(0, tip)]
        if isinstance(item, inputs.Reported):
            return self._mapped_report(item)
        if isinstance(item, inputs.Recovered):
            return self._mapped_recovered(item)
        if isinstance(item, inputs.Resumed):
            frontend, id = names.frontend(item.frontend), names.id(item.id)
            tip = self._tips.prompts.get((frontend, id)) or values.tokens.root("", item.id.encode())
            tokens, end = values.tokens.column(tip, item.tokens)
            return replace(item, frontend=frontend, id=id, tokens=tokens), [(0, end)]
        if isinstance(item, inputs.Acknowledged):
            return replace(item, frontend=names.frontend(item.frontend), ids=list(map(names.id, item.ids))), []
        if isinstance(item, inputs.Aborted | inputs.FinishAsked):
            return replace(item, frontend=names.frontend(item.frontend), id=names.id(item.id)), []
        if isinstance(item, inputs.FrontEndLost):
            return replace(item, frontend=names.frontend(item.frontend)), []
        if isinstance(item, inputs.EpochEnded):
            return replace(item, why=without_places(item.why)), []
        if isinstance(item, inputs.JournalDegraded):
            return replace(item, what=without_places(item.what)), []
        assert isinstance(item, WITHOUT_CONTENT), f"nobody said what of {type(item).__name__} is a user's"
        return item, []

    def _mapped_report(self, item: inputs.Reported) -> tuple[inputs.Reported, list[tuple[int, Tip]]]:
        """Sampled tokens extend the sequence of the request that has the row; of rows that are gone they are drawn."""
        core, tokens = self._core, i64(item.tokens).tolist()
        mapped, ends = list[int](), list[tuple[int, Tip]]()
        live = core.state.rows if core is not None and item.epoch == core.state.epoch else None
        for row, generation, token in zip(i32(item.rows).tolist(), i32(item.generations).tolist(), tokens, strict=True):
            number, tip = 0, None
            if live is not None and live.generation[row] == generation:
                number = int(live.request[row])
                tip = self._tips.requests.get(number)
            if tip is None:
                tip = self._values.tokens.root("", b"%d.%d" % (row, generation))
            one, end = self._values.tokens.one(tip, token) if core is not None else (0, tip)
            mapped.append(one)
            ends.append((number, end))
        column = np.array(mapped, np.int64).tobytes()
        if item.epoch == self._epoch and item.seq == self._reported + 1:
            said, ours = self._links.get(self._reported, (SAMPLED_START, SAMPLED_START))
            columns = item.rows, item.generations
            said = sampled_digest(said, item.seq, *columns, item.tokens)
            self._links[item.seq] = said, sampled_digest(ours, item.seq, *columns, column)
            self._links.pop(item.seq - LINKS_KEPT, None)
            self._reported = item.seq
        return replace(item, tokens=column, logprobs=row_logprobs(item.logprobs)), ends

    def _mapped_recovered(self, item: inputs.Recovered) -> tuple[inputs.Recovered, list[tuple[int, Tip]]]:
        groups = []
        for group in item.groups:
            first = group.accepted.first_request
            mapped, tip, ends = self._values.group(group, self._left.get(first))
            groups.append(mapped)
            self._tips.prompts[mapped.frontend, mapped.accepted.id] = tip
            self._tips.requests |= {first + choice: end for choice, end in enumerate(ends)}
        if not item.left:
            self._left.clear()
        return replace(item, groups=groups), []

    def _output_of(self, item: Any) -> tuple[int, bytes]:
        """Number and output of the live request that a client comes back for; 0 without one."""
        core = self._core
        if core is None or not isinstance(item, inputs.Resumed):
            return 0, b""
        names = self._values.names
        group = core.state.group_of(names.frontend(item.frontend), names.id(item.id))
        request = core.state.requests.get(group.accepted.first_request + item.choice) if group is not None else None
        return (0, b"") if request is None else (request.number, core.state.output_of(request))

    def _follow(
        self, item: Any, mapped: Any, ends: list[tuple[int, Tip]], before: tuple[int, bytes], decisions: list[Decided]
    ) -> None:
        """The ends of sequences behind an input."""
        assert self._core is not None, "a core is followed"
        state, tips = self._core.state, self._tips
        if isinstance(item, inputs.Arrived):
            for decided in decisions:
                if decided.verdict == Verdict.ACCEPTED:
                    tip = ends[0][1]
                    tips.prompts[mapped.frontend, mapped.generate.id] = tip
                    tips.requests |= dict.fromkeys(range(decided.request, decided.request + mapped.generate.n), tip)
            self._forget_tips()
        elif isinstance(item, inputs.Reported):
            tips.requests |= {number: tip for number, tip in ends if number}
        elif isinstance(item, inputs.Resumed) and before[0]:
            request = state.requests.get(before[0])
            if request is not None and state.output_of(request) != before[1]:
                tips.requests[before[0]] = ends[0][1]  # the client's tokens took the place of ours

    def _forget_tips(self) -> None:
        """Ends of requests that are over go; amortized constant work per request."""
        assert self._core is not None, "a core is followed"
        state, tips = self._core.state, self._tips
        if len(tips.requests) > 2 * len(state.requests) + TIPS_SPARE:
            tips.requests = {number: tip for number, tip in tips.requests.items() if number in state.requests}
        if len(tips.prompts) > 2 * len(state.groups) + TIPS_SPARE:
            keys = {(state.frontends[at], id) for at, id in state.groups}
            tips.prompts = {key: tip for key, tip in tips.prompts.items() if key in keys}

    # --- outputs -------------------------------------------------------------------------------------------------

    def _output(self, record: Record, kind: Kind, said: Decided | Step) -> msgspec.Struct:
        """What the followed core gave in place of a decision or a step; it must be the same but for content."""
        if isinstance(said, Step) and self._ranks is not None:
            self._apply(said)
        if self._core is None:
            if isinstance(said, Step) and said.forward is not None:
                return replace(said, forward=self._values.blank_forward(said.forward))
            return said
        queue = self._expected[kind]
        if not queue:
            raise CannotFollow(record.sequence, f"a {kind.name} record that the followed core did not make")
        ours = queue.popleft()
        if not _same(said, ours):
            raise CannotFollow(record.sequence, f"the {kind.name} record of the followed core is another one")
        if isinstance(said, Step) and said.snapshot and self._ranks is not None:
            self._keep_body(record.sequence)
        return ours

    def _apply(self, step: Step) -> None:
        """The ranks' state moves by what a step says of units; tokens are not in it."""
        assert self._ranks is not None, "ranks are followed"
        mirror, stages = self._ranks
        mirror.apply_step(step.seq, step.ops, step.released)
        for stage in stages:
            stage.apply_step(step)

    def _keep_body(self, sequence: int) -> None:
        assert self._ranks is not None, "ranks are followed"
        mirror, stages = self._ranks
        self._bodies[sequence] = encode_body(self._body([stage.state(mirror) for stage in stages]))
        while len(self._bodies) > BODIES_KEPT:
            del self._bodies[next(iter(self._bodies))]

    def _snapshotted(self, record: Record, said: Snapshotted) -> tuple[Snapshotted, bytes]:
        """The record of a snapshot, and the state that belongs into its file."""
        if self._core is None:
            return said, b""
        body = self._bodies.pop(said.sequence, None)
        if body is None:
            if said.sequence <= self._behind:
                return said, b""  # of a step in front of the place where this journal begins
            raise CannotFollow(record.sequence, f"a snapshot of record {said.sequence}, where none was asked for")
        return replace(said, digest=digest(body)), body

    def _closed(self, record: Record, said: Closed) -> Closed:
        if self._core is None:
            return replace(said, state=bytes(len(said.state)))
        left = sum(map(len, self._expected.values()))
        if left:
            raise CannotFollow(record.sequence, f"{left} outputs of the followed core were never recorded")
        return replace(said, state=self._core.state_digest())

    def _digested(self, said: Digested) -> Digested:
        """What a rank reported; the digest of tokens is ours where it was right."""
        if not said.sampled:
            return said
        recorded, ours = self._links.get(said.seq, (b"", b"")) if said.epoch == self._epoch else (b"", b"")
        right = said.sampled == recorded
        return replace(said, sampled=ours if right else self._values.names.digest(said.sampled))

    # --- epochs --------------------------------------------------------------------------------------------------

    def _begin_epoch(self, item: inputs.EpochBegan) -> None:
        self._epoch, self._reported, self._links = item.epoch, 0, {}
        if self._snapshots and self._core is not None:
            make, config = factories(), self._core.state.config
            stages = [make.stage(item.geometry, at, config, item.facts) for at in range(len(item.geometry.stages))]
            self._ranks = (make.mirror(item.geometry), stages)

    def _end_epoch(self) -> None:
        self._epoch, self._reported, self._links, self._ranks = 0, 0, {}, None


WITHOUT_CONTENT = (
    inputs.TransferEnded,
    inputs.ExtentsFixed,
    inputs.FlushAsked,
    inputs.EpochBegan,
    inputs.Controlled,
    inputs.Ticked,
)
"""Inputs of which nothing comes from users."""


def _same(said: Any, ours: Any) -> bool:
    """Whether two outputs are equal but for tokens and seeds."""
    if said == ours:
        return True
    if not (isinstance(said, Step) and isinstance(ours, Step)) or said.forward is None or ours.forward is None:
        return False
    shapes = [replace(step, forward=shape_of_forward(step.forward)) for step in (said, ours) if step.forward]
    return bool(shapes[0] == shapes[1])
