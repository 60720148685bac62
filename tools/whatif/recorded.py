"""Recorded: reads a journal once, through the real core, and takes from it what a what-if needs.

Owns the reading: traffic and outputs, the account of the run, the times of its forwards. Must never go on behind a
decision that comes out otherwise than recorded: such a core would misread the rest. Invariants: the journal is only
read; what is held grows with what is live, and a few numbers per request.

Lives and epochs are followed: what an earlier life left goes on in the next. Where a journal was trimmed, its oldest
snapshot says what was live then; those requests begin again at that moment.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from allocator.geometry import Geometry
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.reasons import EndReason, RefusalCode
from daemon.core.scheduler import SchedulerCore
from daemon.snapshots import restore_core
from ipc.messages import Accepted, Finished, ModelFacts, Refused
from journal import records
from journal.reader import Record, Walk
from journal.records import DECISION_VERSION, INPUT_KINDS, Kind, Opened, Readied
from journal.segment import segment_behind
from journal.snapshots import Body, Header
from journal.storage import DiskStorage
from tools.beginnings import start_of
from tools.journal_files import ReadingProgress, refuse_foreign
from tools.whatif.account import Account
from tools.whatif.errors import WhatIfError
from tools.whatif.pace import Samples, Work, work_of
from tools.whatif.traffic import LifeBegan, LifeEnded, Traffic, id_of

ENDED_ITSELF = frozenset({EndReason.STOP, EndReason.LENGTH})
PASSED_ON = inputs.EpochBegan | inputs.EpochEnded | inputs.FrontEndLost | inputs.JournalDegraded
TOLD_TO_END = frozenset({"stop", "drain_expired"})


@dataclass(slots=True)
class _Choice:
    """A live choice of the recorded run. `times` are kept only as far as a stop string's lag needs: the last few."""

    slot: int
    key: tuple[str, str]
    prompt_tokens: int
    limit: int
    output: bytearray = field(default_factory=bytearray)
    newest: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    finish_asked: tuple[int, int] | None = None  # at which output length, and when


@dataclass(slots=True)
class Away:
    """Time without ranks behind the first epoch, until they were ready again: ns by what was lost, daemon or ranks."""

    spent_ns: Counter[str] = field(default_factory=Counter)
    _lost: str = ""
    _since_ns: int = 0

    def lost(self, what: str, now_ns: int) -> None:
        """The daemon or the ranks are gone."""
        self.back(now_ns)
        self._lost, self._since_ns = what, now_ns

    def back(self, now_ns: int) -> None:
        """Ranks are ready, something else is lost too, or the record ends."""
        if self._lost:
            self.spent_ns[self._lost] += max(now_ns - self._since_ns, 0)
        self._lost = ""


@dataclass(slots=True)
class Recorded:
    """What was read. `opened` is the newest life's header, `geometries` those of its epochs, oldest first."""

    traffic: Traffic
    account: Account
    samples: Samples
    opened: Opened | None = None
    facts: ModelFacts | None = None
    geometries: list[Geometry] = field(default_factory=list)
    builds: dict[str, str] = field(default_factory=dict)  # what the newest rank runs on
    lives: int = 0
    epochs: int = 0
    losses: int = 0  # epochs that were lost
    away: Away = field(default_factory=Away)
    last_sequence: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    names: dict[str, int] | None = None  # arrivals by their front end's id, where that is asked for
    notes: list[str] = field(default_factory=list)


def read_journal(storage: DiskStorage, traffic: Traffic, names: bool = False) -> Recorded:
    """Read a whole journal, with `names` of its arrivals; raises WhatIfError, Foreign and JournalError."""
    start, notes = start_of(storage)
    walk = Walk(storage, first=segment_behind(storage, start[0].sequence) if start else 0)
    with ReadingProgress(storage, "reading") as seen:
        reader = Reader(traffic, names)
        found = reader.read(walk.records(), start, seen)
    refuse_foreign(walk)
    found.notes[:0] = notes
    found.notes += [f"a torn tail is left out: {finding.text()}" for finding in walk.cuts()]
    if found.opened is None or not found.geometries:
        raise WhatIfError("the journal has no epoch: no rank ever was ready, so nothing can be replayed")
    if not len(traffic.first_slot):
        raise WhatIfError("no request ever came in this journal, so there is nothing to replay")
    return found


class Reader:
    """Takes the records of a journal in order."""

    def __init__(self, traffic: Traffic, names: bool = False) -> None:
        self._traffic = traffic
        self._found = Recorded(traffic, Account(), Samples(), names={} if names else None)
        self._core: SchedulerCore | None = None
        self._beginning: CoreConfig | None = None  # a life that has no input yet
        self._expected: deque[bytes] = deque()
        self._live: dict[int, _Choice] = {}
        self._arrival_by_key: dict[tuple[str, str], int] = {}  # the newest of a front end's id
        self._first_by_key: dict[tuple[str, str], int] = {}  # and its first number
        self._next = 1
        self._now_ns = 0
        self._flights: deque[tuple[int, int, Work | None]] = deque()  # seq, tick, work
        self._reported_ns = 0
        self._wants_ns = -1
        self._warms_up = False
        self._used = self._allowed = 0  # output tokens of requests that ended by themselves, and their limits

    def read(
        self, journal: Iterable[Record], start: tuple[Header, Body] | None, progress: Callable[[Record], None]
    ) -> Recorded:
        """Everything, in order."""
        if start is not None:
            progress_from = start[0].sequence
            self._resume(start[1])
        else:
            progress_from = 0
        for record in journal:
            progress(record)
            if record.sequence <= progress_from:
                continue
            self._take(record)
        self._end()
        return self._found

    # --- records -------------------------------------------------------------------------------------------------

    def _take(self, record: Record) -> None:
        self._found.last_sequence = record.sequence
        if record.kind == Kind.OPENED:
            self._opened(record)
        elif record.kind in INPUT_KINDS:
            self._input(record)
        elif record.kind == Kind.DECIDED:
            self._compare(record)
        elif record.kind == Kind.READIED:
            readied: Any = record.decode()
            assert isinstance(readied, Readied)
            self._found.builds = readied.versions

    def _opened(self, record: Record) -> None:
        opened: Any = record.decode()
        assert isinstance(opened, Opened)
        if opened.decision_version != DECISION_VERSION:
            raise WhatIfError(
                f"life {opened.life} decided by version {opened.decision_version}, ours is {DECISION_VERSION}: use a "
                "bandmaster of that version"
            )
        if self._core is not None and self._beginning is None:
            self._traffic.add(LifeEnded(self._now_ns))
            self._found.away.lost("daemon", self._now_ns)
        self._expected.clear()  # the last iteration of a life that was cut may lack its outputs
        self._flights.clear()
        self._core = SchedulerCore(opened.core)
        self._found.opened = opened
        self._found.lives += 1
        self._beginning = opened.core

    def _resume(self, body: Body) -> None:
        """Begin at a snapshot: what was live then begins again."""
        core = restore_core(body.core)
        state = core.state
        assert state.memory is not None, "a snapshot is taken in an epoch"
        assert state.facts is not None, "an epoch has its model's facts"
        self._core = core
        now_ns = self._now_ns = state.queue_moved_ns
        self._found.lives = self._found.epochs = 1
        self._found.facts = state.facts
        self._found.geometries.append(state.memory.geometry)
        self._found.opened = Opened(now_ns, "", 0, DECISION_VERSION, state.config, {}, {})
        self._traffic.add(LifeBegan(now_ns, state.config))
        self._recover(inputs.Recovered(now_ns, body.groups, body.next_request))
        self._traffic.add(inputs.EpochBegan(now_ns, state.epoch, state.memory.geometry, state.facts))
        live = sum(was.ended is None for group in body.groups for was in group.choices)
        self._found.notes.append(
            f"the {live} requests that were live at that snapshot begin again there, and the replays begin with an "
            "empty cache: the first figures behind it differ for that"
        )

    def _compare(self, record: Record) -> None:
        """Decisions must come out as they stand."""
        if not self._expected:
            return
        if self._expected.popleft() != record.payload:
            raise WhatIfError(
                f"at sequence {record.sequence} our core decides otherwise than the one that recorded it: nothing can "
                "be said of other settings; `bandmaster replay check` shows the difference"
            )

    def _input(self, record: Record) -> None:
        item: Any = record.decode()
        core = self._core
        if core is None:
            raise WhatIfError(f"record {record.sequence}: an input in front of the first life")
        self._now_ns = max(self._now_ns, item.now_ns)
        if self._beginning is not None:
            self._traffic.add(LifeBegan(self._now_ns, self._beginning))
            self._beginning = None
        first_life = self._found.lives == 1 and not isinstance(item, inputs.Resumed)
        try:
            out = core.feed(item)
        except Exception as error:
            self._found.notes.append(
                f"record {record.sequence}: the core broke there, as it did then, and the record is passed over: "
                f"{type(error).__name__}: {error}"
            )
            return
        self._expected.extend(records.encode(decided) for decided in out.decisions)
        if isinstance(item, inputs.Recovered) and first_life:
            self._recover(item)
        self._found.account.take(item, out)
        self._times(item, out)
        self._from_outside(item, out)
        self._told(item, out)

    # --- what came from outside ------------------------------------------------------------------------------------

    def _from_outside(self, item: inputs.Input, out: Outputs) -> None:
        traffic, found = self._traffic, self._found
        if isinstance(item, inputs.Arrived):
            self._arrived(item, out)
        elif isinstance(item, inputs.Aborted):
            arrival = self._arrival_by_key.get((item.frontend, item.id))
            if arrival is not None:
                traffic.add(inputs.Aborted(item.now_ns, item.frontend, id_of(arrival), item.by))
        elif isinstance(item, inputs.FinishAsked):
            choice = self._live.get(self._first_by_key.get((item.frontend, item.id), 0) + item.choice)
            if choice is not None and choice.key == (item.frontend, item.id):
                choice.finish_asked = (item.output_tokens, item.now_ns)
        elif isinstance(item, PASSED_ON):
            traffic.add(item)
            if isinstance(item, inputs.EpochBegan):
                found.epochs += 1
                found.away.back(item.now_ns)
                found.facts = item.facts
                found.geometries.append(item.geometry)
                self._flights.clear()
                self._warms_up = True
            elif isinstance(item, inputs.EpochEnded):
                found.losses += 1
                found.away.lost("ranks", item.now_ns)
                self._flights.clear()
        elif isinstance(item, inputs.Controlled):
            self._controlled(item, out)
        elif isinstance(item, inputs.Resumed):
            found.skipped["returns of front ends"] += 1

    def _controlled(self, item: inputs.Controlled, out: Outputs) -> None:
        """Draining refuses, in a replay too; what an order ended is ended there, whatever else goes on."""
        if item.order in ("drain", "flush_cache"):
            self._traffic.add(item)
        elif item.order in TOLD_TO_END:
            for number in sorted(
                {reply.message.request for reply in out.replies if isinstance(reply.message, Finished)}
            ):
                choice = self._live.get(number)
                if choice is not None:
                    arrival = self._arrival_by_key[choice.key]
                    self._traffic.add(inputs.Aborted(item.now_ns, choice.key[0], id_of(arrival), "operator"))

    def _arrived(self, item: inputs.Arrived, out: Outputs) -> None:
        answer = out.replies[0].message
        generate = item.generate
        if isinstance(answer, Accepted) and answer.first_request < self._next:
            return  # the same again, after a reconnect
        if isinstance(answer, Refused) and answer.code == RefusalCode.ID_CONFLICT:
            self._found.skipped["arrivals whose id was in use"] += 1
            return
        accepted = answer if isinstance(answer, Accepted) else None
        limit = accepted.max_tokens if accepted is not None else self._limit(generate)
        choices = accepted.n if accepted is not None else max(1, min(generate.n, 128))
        arrival = self._traffic.new_arrival(choices, limit)
        if self._found.names is not None:
            self._found.names[generate.id] = arrival
        if accepted is not None:
            self._enter(accepted, (item.frontend, generate.id), arrival, len(generate.prompt) // 8)
        named = msgspec.structs.replace(generate, id=id_of(arrival))
        self._traffic.add(msgspec.structs.replace(item, generate=named))

    def _limit(self, generate: Any) -> int:
        """Most output of a request that was refused."""
        longest = self._found.facts.max_model_len if self._found.facts is not None else 0
        room = max(longest - len(generate.prompt) // 8, 0)
        return room if generate.max_tokens is None else min(generate.max_tokens, max(room, 1))

    def _enter(self, accepted: Accepted, key: tuple[str, str], arrival: int, prompt_tokens: int) -> None:
        self._next = accepted.first_request + accepted.n
        self._arrival_by_key[key], self._first_by_key[key] = arrival, accepted.first_request
        first = self._traffic.first_slot[arrival]
        for choice in range(accepted.n):
            self._live[accepted.first_request + choice] = _Choice(
                first + choice, key, prompt_tokens, accepted.max_tokens
            )

    def _recover(self, item: inputs.Recovered) -> None:
        """What stood before the first record that can be read: each group is an arrival that has some output."""
        groups = []
        for group in item.groups:
            arrival = self._traffic.new_arrival(group.accepted.n, group.accepted.max_tokens)
            self._enter(group.accepted, (group.frontend, group.accepted.id), arrival, len(group.generate.prompt) // 8)
            for number, was in enumerate(group.choices, group.accepted.first_request):
                if was.ended is not None:
                    slot = self._live.pop(number).slot
                    self._traffic.put_output(slot, was.tokens, whole=was.ended.reason in ENDED_ITSELF)
                else:
                    self._live[number].output += was.tokens
            name = id_of(arrival)
            groups.append(
                msgspec.structs.replace(
                    group,
                    generate=msgspec.structs.replace(group.generate, id=name),
                    accepted=msgspec.structs.replace(group.accepted, id=name),
                    choices=[_renamed(was, name) for was in group.choices],
                )
            )
        self._next = max(self._next, item.next_request if not item.left else 0)
        self._found.account.adopt(groups, item.now_ns)
        self._traffic.add(msgspec.structs.replace(item, groups=groups))

    # --- what was told ---------------------------------------------------------------------------------------------

    def _told(self, item: inputs.Input, out: Outputs) -> None:
        if out.tokens is not None:
            for number, token in zip(out.tokens.requests.tolist(), out.tokens.tokens.tolist(), strict=True):
                choice = self._live[number]
                choice.output += int(token).to_bytes(8, "little", signed=True)
                choice.newest.append(item.now_ns)
        for reply in out.replies:
            if isinstance(reply.message, Finished) and reply.message.request in self._live:
                self._ended(reply.message)

    def _ended(self, message: Finished) -> None:
        choice = self._live.pop(message.request)
        output, whole = bytes(choice.output), message.reason in ENDED_ITSELF
        slot, traffic = choice.slot, self._traffic
        if message.reason == EndReason.STOP and choice.finish_asked is not None:
            at, asked_ns = choice.finish_asked
            made = len(output) // 8
            behind = made - at  # tokens that came before the daemon heard of it
            traffic.stop_at[slot] = min(at, made)
            if 0 <= behind < len(choice.newest):
                traffic.stop_lag_ns[slot] = max(0, asked_ns - choice.newest[-1 - behind])
        traffic.put_output(slot, output, whole)
        if whole and choice.limit:
            self._used += len(output) // 8
            self._allowed += choice.limit

    def _end(self) -> None:
        """What still lives has said so much; how long outputs are on the mean."""
        traffic = self._traffic
        self._found.away.back(self._now_ns)
        traffic.complete = not self._live
        for choice in self._live.values():
            traffic.put_output(choice.slot, bytes(choice.output), whole=False)
        if self._live:
            self._found.notes.append(
                f"the record ends with {len(self._live)} requests live: everything is counted up to its end"
            )
        traffic.share = self._used / self._allowed if self._allowed else 1.0
        traffic.ended_ns = max(traffic.ended_ns, self._now_ns)
        self._found.notes += [f"left out of the replays: {count} {what}" for what, count in self._found.skipped.items()]

    # --- times -----------------------------------------------------------------------------------------------------

    def _times(self, item: inputs.Input, out: Outputs) -> None:
        """Samples of forwards, and of what passes before a tick."""
        if isinstance(item, inputs.Ticked):
            if self._wants_ns >= 0:
                self._found.samples.turned(item.now_ns - self._wants_ns)
            self._wants_ns = -1
        if out.wants_tick and self._wants_ns < 0:
            self._wants_ns = item.now_ns
        elif not out.wants_tick:
            self._wants_ns = -1
        if isinstance(item, inputs.Reported) and self._flights and self._flights[0][0] == item.seq:
            _, tick_ns, work = self._flights.popleft()
            if work is not None and self._warms_up:
                self._found.samples.first(work, item.now_ns - tick_ns)
                self._warms_up = False
            elif work is not None:
                self._found.samples.add(work, tick_ns, self._reported_ns, item.now_ns)
            self._reported_ns = item.now_ns
        if out.step is not None:
            work = work_of(out.step.forward) if out.step.forward is not None else None
            self._flights.append((out.step.seq, item.now_ns, work))


def _renamed(was: inputs.RecoveredChoice, name: str) -> inputs.RecoveredChoice:
    if was.ended is None:
        return was
    return msgspec.structs.replace(was, ended=msgspec.structs.replace(was.ended, id=name))
