"""Story: the life of a request, followed through a journal record by record.

Owns what belongs to a story: the decisions about the request, those about all that fell into its life, every pass that
gave it no tokens, and what befell the daemon and its ranks meanwhile. Decisions are those that were recorded. Passes,
first tokens, what a client was told and whose pages were evicted are not recorded: the inputs are fed to a core, as in
`replay check`, and it is asked. Must never tell anything of a core that decides otherwise: from the first decision that
differs on, only what was recorded is told, and a note says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from daemon.core import inputs
from daemon.core.inputs import Arrived, EpochBegan, EpochEnded, Recovered, RecoveredGroup, Ticked
from daemon.core.outputs import Decided, Outputs
from daemon.core.passes import PassedOver
from daemon.core.reasons import Verdict
from daemon.core.requests import HOLDING
from daemon.core.scheduler import SchedulerCore
from ipc.messages import Finished, Refused
from journal import records
from journal.reader import Record
from journal.records import DECISION_VERSION, INPUT_KINDS, Closed, Kind, Opened
from tools.why.causes import after, cause_of, closed
from tools.why.ends import asks_of, narrow_stages
from tools.why.nouns import Bands, milliseconds, units
from tools.why.pages import Pages
from tools.why.words import NOTHING, Aside

MOVES = frozenset({Verdict.ADMITTED, Verdict.RETRACTED, Verdict.REQUEUED, Verdict.RECOVERED, Verdict.RESUMED})
"""Decisions that give a request its place in the batch, or take it."""

CONTEXT = frozenset({Verdict.STALLED, Verdict.DRAINING, Verdict.FLUSHED})
"""Decisions about the whole core that a story tells too, when they fall into the request's life."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which request is asked for: by number, or by its answer's id or its front end's, all that ever had it."""

    request: int = 0
    id: str = ""

    def means(self, arrived: Arrived) -> bool:
        """Whether an arrival is the one: by its id, or by the client's, behind which the prompt's number is put."""
        answer, _, prompt = arrived.generate.id.rpartition("-")
        return bool(self.id) and (arrived.generate.id == self.id or (answer == self.id and prompt.isdecimal()))


@dataclass(frozen=True, slots=True)
class Told:
    """A decision of the story, as recorded at `sequence`, and what is known beside it."""

    sequence: int
    decided: Decided
    aside: Aside = NOTHING


@dataclass(frozen=True, slots=True)
class Passed:
    """A pass behind record `sequence`, in which `step` was formed (0: none), that gave the request no tokens.

    Behind it `running` requests held memory, and the prompt of `resident` (0: none) was computed in part. `blocker` is
    why the request waits at which the pass stopped before it came to this one, with the numbers of that.
    """

    sequence: int
    now_ns: int
    step: int
    over: PassedOver
    running: int = 0
    resident: int = 0
    blocker: tuple[str, dict[str, int]] = ("", {})


@dataclass(frozen=True, slots=True)
class Noted:
    """What happened to the request that is no decision.

    `what` is `first_token`, `stopped`, `lost_ranks`, `ranks`, `ended` or `left`.

    `numbers` go with it; `text` says it.
    """

    sequence: int
    now_ns: int
    what: str
    text: str
    numbers: dict[str, int] = field(default_factory=dict)


Event = Told | Passed | Noted


@dataclass(frozen=True, slots=True)
class Beginning:
    """A snapshot behind record `behind`: what lived there, the next free number, and the core (None: not readable)."""

    behind: int
    groups: Sequence[RecoveredGroup]
    next_request: int
    core: SchedulerCore | None


@dataclass(slots=True)
class Story:
    """One request: what it asked for, and what happened to it, oldest first. `request` is 0 for one that was refused.

    `ended`: its end is among the events. `bands` are the names of bands by stage and place. `known_from`: the sequence
    behind which the journal that is there begins, for a request that lived before that.
    """

    request: int
    choice: int
    arrived: Arrived
    bands: Bands = ()
    events: list[Event] = field(default_factory=list)
    ended: bool = False
    known_from: int = 0
    ready: bool = True  # there were ranks when it came
    answered: bool = False  # it has a first token of its present start
    replayed: bool = True  # passes are told all along


class Follower:
    """Takes the records of a journal in order, over all its lives; the stories are complete when they are all taken.

    `asked` are all that are told of. The records start at the first one of the journal, or behind a `beginning`.
    Without `replay` no core is fed.
    """

    def __init__(self, asked: Sequence[Asked], beginning: Beginning | None = None, replay: bool = True) -> None:
        self.stories: list[Story] = []
        self.notes: list[str] = []
        self.requests = 0  # the highest number that was given
        self.records = 0
        self._asked = list(asked)
        self._live: list[Story] = []
        self._core = beginning.core if beginning is not None and replay else None
        self._replay = replay
        self._life = ""
        self._expected: deque[bytes] = deque()  # decisions of the replayed core that the journal must name next
        self._arrived: Arrived | None = None
        self._passed: list[tuple[Story, Passed]] = []  # of the newest pass; told behind the decisions of its input
        self._about: list[Story] = []  # stories that a decision of the newest input was about
        self._bands: Bands = ()
        self._narrow: tuple[int, ...] = ()  # stages that hold the fewest pages
        self._pages = Pages()
        self._out = Outputs()  # what the replayed core said to the newest input
        self._input: inputs.Input | None = None
        self._now_ns = 0
        self._ready = beginning is not None  # there are ranks
        self._closed: Closed | None = None
        self._before = ""  # how the life before ended
        self._orphans: list[Story] = []  # stories of the life before that this one has not taken over yet
        if beginning is not None:
            self._begin_at(beginning)

    @property
    def done(self) -> bool:
        """Nothing more can come of those that are asked for: they were asked for by number, and have ended."""
        told = {story.request for story in self.stories if story.ended}
        return all(asked.request in told and asked.request > 0 for asked in self._asked) and not self._live

    def take(self, record: Record) -> None:
        """Follow one record."""
        self.records += 1
        if record.kind == Kind.OPENED:
            self._opened(record)
        elif record.kind in INPUT_KINDS:
            self._take_input(record)
        elif record.kind == Kind.DECIDED:
            self._decided(record)
        elif record.kind == Kind.CLOSED:
            decoded: Any = record.decode()
            self._closed = decoded

    def end(self) -> None:
        """The journal ends here."""
        self._tell_passed()

    # --- records -------------------------------------------------------------------------------------------------

    def _opened(self, record: Record) -> None:
        self._tell_passed()
        opened: Any = record.decode()
        assert isinstance(opened, Opened)
        if self._now_ns:
            self._before = closed(self._closed)
            text = f"the daemon's process stops here: {self._before}{after(opened.now_ns - self._now_ns)}"
            for story in self._live:
                story.events.append(Noted(record.sequence, self._now_ns, "stopped", text))
        self._life, self._core, self._closed, self._ready = opened.life, None, None, False
        self._orphans = list(self._live)
        self._expected.clear()
        if opened.decision_version == DECISION_VERSION and self._replay:
            self._core = SchedulerCore(opened.core)
        elif self._replay:
            versions = f"{opened.decision_version}, ours is {DECISION_VERSION}"
            self.notes.append(f"life {self._life}: its decisions are of version {versions}: passes are not told")

    def _take_input(self, record: Record) -> None:
        self._tell_passed()
        item: Any = record.decode()
        self._about, self._out, self._input, self._now_ns = [], Outputs(), item, item.now_ns
        self._pages.forget()
        if isinstance(item, Arrived):
            self._arrived = item
        elif isinstance(item, Recovered):
            self._recovered(record, item)
        elif isinstance(item, EpochBegan):
            self._epoch_began(record, item)
        elif isinstance(item, EpochEnded):
            self._epoch_ended(record, item)
        core = self._core
        if core is None:
            return
        passes = core.passes
        try:
            self._out = core.feed(item)
        except Exception as error:
            self._give_up(record, f"the replayed core broke: {type(error).__name__}: {error}")
            return
        self._expected.extend(records.encode(decided) for decided in self._out.decisions)
        if isinstance(item, Ticked):
            self._pages.stepped(core, self._out)
            if core.passes > passes:
                self._note_passes(core, record, item.now_ns)
        elif self._out.tokens is not None:
            self._note_first_tokens(record, item.now_ns)

    def _decided(self, record: Record) -> None:
        decided: Any = record.decode()
        assert isinstance(decided, Decided)
        if self._core is not None and (not self._expected or self._expected.popleft() != record.payload):
            self._give_up(record, "the replayed core decided otherwise")
        if decided.verdict == Verdict.ACCEPTED:
            self._accepted(record, decided)
        elif decided.verdict == Verdict.REFUSED:
            self._refused(record, decided)
        else:
            for story in self._concerned(decided):
                self._tell(story, record, decided)

    # --- what a life begins with ---------------------------------------------------------------------------------

    def _begin_at(self, beginning: Beginning) -> None:
        """The journal begins at a snapshot: who lives there is told of from there on."""
        self.requests = beginning.next_request - 1
        memory = self._core.state.memory if self._core is not None else None
        if memory is not None:
            self._bands, self._narrow = _band_names(memory.geometry), narrow_stages(memory.geometry)
            self._pages.begin(memory.geometry.virtual_pages, memory.owner)
        for group in beginning.groups:
            arrived = Arrived(group.arrived_ns, group.frontend, group.generate, group.seed)
            for choice, left in enumerate(group.choices):
                number = group.accepted.first_request + choice
                asked = any(number == one.request or one.means(arrived) for one in self._asked)
                if left.ended is None and asked:
                    story = Story(number, choice, arrived, self._bands, known_from=beginning.behind)
                    story.replayed = self._core is not None
                    self.stories.append(story)
                    self._live.append(story)

    def _recovered(self, record: Record, item: Recovered) -> None:
        """Ends that the life before reached and did not come to write stand in what the next one took over."""
        for group in item.groups:
            for choice, left in enumerate(group.choices):
                number = group.accepted.first_request + choice
                self.requests = max(self.requests, number)
                for story in [one for one in self._live if one.request == number]:
                    self._orphans = [one for one in self._orphans if one is not story]
                    if left.ended is None:
                        continue
                    said = f"{left.ended.reason}: {left.ended.detail}" if left.ended.detail else left.ended.reason
                    text = f"ended ({said}) with {units(left.ended.output_tokens, 'output token')}: the next process of"
                    text += " the daemon found that in the journal, whose last decisions were not written any more"
                    counts = {"output_tokens": left.ended.output_tokens}
                    self._leave(story, Noted(record.sequence, item.now_ns, "ended", text, counts))

    def _epoch_began(self, record: Record, item: EpochBegan) -> None:
        self._bands, self._narrow = _band_names(item.geometry), narrow_stages(item.geometry)
        self._ready = True
        self._pages.begin(item.geometry.virtual_pages, len(item.geometry.stages[0].bands) - 1)
        for story in self._orphans:
            text = "the new process of the daemon did not take it over: the journal did not have it in time"
            self._leave(story, Noted(record.sequence, item.now_ns, "left", text))
        self._orphans = []
        for story in self._live:
            story.bands = self._bands
            text = f"ranks are ready: epoch {item.epoch} begins, with empty memory and an empty prefix cache"
            story.events.append(Noted(record.sequence, item.now_ns, "ranks", text, {"epoch": item.epoch}))

    def _epoch_ended(self, record: Record, item: EpochEnded) -> None:
        """Who held memory is told by a decision that it lost it; who waits goes on waiting, now for ranks."""
        self._ready = False
        for story in self._live:
            if not _holds(story):
                cause = f': "{item.why}"' if item.why else ""
                text = f"the ranks (the processes that run the model) were lost, epoch {item.epoch} ended{cause}"
                story.events.append(Noted(record.sequence, item.now_ns, "lost_ranks", text, {"epoch": item.epoch}))

    # --- what replay says ----------------------------------------------------------------------------------------

    def _note_passes(self, core: SchedulerCore, record: Record, now_ns: int) -> None:
        step = self._out.step
        seq = step.seq if step is not None and step.forward is not None else 0
        for story in self._live:
            over = core.passed_over(story.request)
            if over is not None:
                running = sum(core.state.counts[state] for state in HOLDING)
                resident = core.state.resident.number if core.state.resident is not None else 0
                stopped_at = over.numbers.get("stopped_at", 0) if over.reason == "queue" else 0
                blocker = core.state.skipped.get(stopped_at, ("", {}))
                passed = Passed(record.sequence, now_ns, seq, over, running, resident, blocker)
                self._passed.append((story, passed))

    def _note_first_tokens(self, record: Record, now_ns: int) -> None:
        assert self._out.tokens is not None, "asked where there are tokens"
        for story in self._live:
            if story.answered or not (self._out.tokens.requests == story.request).any():
                continue
            story.answered = True
            took_ns = now_ns - _started_ns(story, now_ns)
            text = f"the first output token since this start, {milliseconds(took_ns)} after it"
            story.events.append(Noted(record.sequence, now_ns, "first_token", text, {"took_ns": took_ns}))

    # --- decisions -----------------------------------------------------------------------------------------------

    def _accepted(self, record: Record, decided: Decided) -> None:
        arrived, count = self._arrived, decided.numbers.get("n", 1)
        self.requests = max(self.requests, decided.request + count - 1)
        if arrived is None:
            return
        for choice in range(count):
            number = decided.request + choice
            if any(number == asked.request or asked.means(arrived) for asked in self._asked):
                story = Story(number, choice, arrived, self._bands, ready=self._ready, replayed=self._core is not None)
                self.stories.append(story)
                self._live.append(story)
                self._tell(story, record, decided)

    def _refused(self, record: Record, decided: Decided) -> None:
        if self._arrived is not None and any(asked.means(self._arrived) for asked in self._asked):
            said = [reply.message.message for reply in self._out.replies if isinstance(reply.message, Refused)]
            aside = Aside(detail=said[0] if said else "", asks=asks_of(self._arrived.generate, self._narrow))
            told = Told(record.sequence, decided, aside)
            self.stories.append(Story(0, 0, self._arrived, self._bands, [told], ended=True))

    def _concerned(self, decided: Decided) -> Iterator[Story]:
        """The live stories that a decision belongs to."""
        for story in list(self._live):
            number = story.request
            if decided.request == number or (decided.by == number and decided.verdict != Verdict.ENDED):
                if decided.verdict != Verdict.WAITS:
                    self._about.append(story)
                yield story
            elif not decided.request and self._surrounds(story, decided):
                yield story

    def _surrounds(self, story: Story, decided: Decided) -> bool:
        """Whether a decision about the whole core is told too: some always; evictions where they were for it, in a step
        with others of its decisions, or of what it had left in the cache and would have come back for.
        """
        if decided.verdict != Verdict.EVICTED:
            return decided.verdict in CONTEXT
        mine, _ = self._pages.took(story.request)
        lost = any(number == story.request for number, _ in self._pages.left_by)
        return mine > 0 or lost or any(story is about for about in self._about)

    def _tell(self, story: Story, record: Record, decided: Decided) -> None:
        story.events.append(Told(record.sequence, decided, self._aside(story, decided)))
        if decided.request != story.request:
            return
        if decided.verdict == Verdict.RECOVERED:
            self._orphans = [one for one in self._orphans if one is not story]
        if decided.verdict == Verdict.ADMITTED:
            story.answered = False
        if decided.verdict == Verdict.ENDED:
            story.ended = True
            self._live.remove(story)

    def _aside(self, story: Story, decided: Decided) -> Aside:
        """What is known beside a decision."""
        if decided.verdict == Verdict.EVICTED:
            return Aside(left_by=self._pages.left_by, took=self._pages.took(story.request), own=story.request)
        if decided.verdict == Verdict.RECOVERED:
            return Aside(cause=self._before)
        if decided.verdict == Verdict.ENDED:
            ends = [reply.message for reply in self._out.replies if isinstance(reply.message, Finished)]
            detail = next((one.detail for one in ends if one.request == decided.request), "")
            return Aside(detail, cause_of(self._input))
        if decided.verdict == Verdict.REQUEUED:
            had = len(story.arrived.generate.prompt) // 8 + decided.numbers["output_tokens"]
            return Aside(cause=cause_of(self._input), had_tokens=had)
        return NOTHING

    def _leave(self, story: Story, noted: Noted) -> None:
        """It ends without a decision."""
        story.events.append(noted)
        story.ended = True
        self._live.remove(story)

    def _tell_passed(self) -> None:
        """The decisions of the newest input are told; now its pass is."""
        for story, passed in self._passed:
            if not story.ended:
                story.events.append(passed)
        self._passed = []

    def _give_up(self, record: Record, why: str) -> None:
        self._core, self._out = None, Outputs()
        self._expected.clear()
        self._pages.forget()
        for story in self._live:
            story.replayed = False
        self.notes.append(f"life {self._life}, sequence {record.sequence}: {why}; from here on no passes are told")


def _holds(story: Story) -> bool:
    """Whether it has a place in the batch, by its newest start or loss."""
    for event in reversed(story.events):
        if isinstance(event, Noted) and event.what == "stopped":
            return False
        if isinstance(event, Told) and event.decided.request == story.request and event.decided.verdict in MOVES:
            return event.decided.verdict == Verdict.ADMITTED
    return story.known_from > 0  # not known: should it have one, a decision says that it lost it


def _band_names(geometry: Any) -> Bands:
    return [[band.name for band in stage.bands] for stage in geometry.stages]


def _started_ns(story: Story, now_ns: int) -> int:
    """When it got its place, by its newest start; now, where the story has none."""
    for event in reversed(story.events):
        if isinstance(event, Told) and event.decided.verdict == Verdict.ADMITTED:
            return event.decided.now_ns
    return now_ns


def follow(
    journal: Iterable[Record],
    asked: Asked | Sequence[Asked],
    progress: Callable[[Record], None] | None = None,
    beginning: Beginning | None = None,
    replay: bool = True,
) -> Follower:
    """Follow a journal until nothing more can come; `progress` hears of each record.

    With a `beginning` records that it covers are passed over. Without `replay` only what was recorded is told, much
    faster.
    """
    follower = Follower([asked] if isinstance(asked, Asked) else asked, beginning, replay)
    for record in journal:
        if beginning is not None and record.sequence <= beginning.behind:
            continue
        if progress is not None:
            progress(record)
        follower.take(record)
        if follower.done:
            break
    follower.end()
    return follower
