"""Story: the life of one request, followed through a journal record by record.

Owns what belongs to a story: the decisions about the request, those about all that fell into its life, and every pass
that gave it no tokens. Decisions are those that were recorded. Passes are not recorded: the inputs are fed to a fresh
core, as in `replay check`, and it is asked after each pass. Must never tell a pass of a core that decides otherwise:
from the first decision that differs on, only what was recorded is told, and a note says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from daemon.core.inputs import Arrived, EpochBegan, Ticked
from daemon.core.outputs import Decided
from daemon.core.passes import PassedOver
from daemon.core.reasons import Verdict
from daemon.core.scheduler import SchedulerCore
from journal import records
from journal.reader import Record
from journal.records import DECISION_VERSION, INPUT_KINDS, Kind, Opened
from tools.why.words import Bands

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
    """A decision of the story, as recorded at `sequence`."""

    sequence: int
    decided: Decided


@dataclass(frozen=True, slots=True)
class Passed:
    """A pass behind record `sequence`, in which `step` was formed (0: none), that gave the request no tokens."""

    sequence: int
    now_ns: int
    step: int
    over: PassedOver


@dataclass(slots=True)
class Story:
    """One request: what it asked for, and what happened to it, oldest first. `request` is 0 for one that was refused.

    `ended`: its end is among the events. `bands` are the names of bands by stage and place.
    """

    request: int
    choice: int
    arrived: Arrived
    bands: Bands = ()
    events: list[Told | Passed] = field(default_factory=list)
    ended: bool = False


class Follower:
    """Takes the records of a journal in order, over all its lives; the stories are complete when they are all taken."""

    def __init__(self, asked: Asked) -> None:
        self.stories: list[Story] = []
        self.notes: list[str] = []
        self.requests = 0  # the highest number that was given
        self.records = 0
        self._asked = asked
        self._live: list[Story] = []
        self._core: SchedulerCore | None = None
        self._life = ""
        self._expected: deque[bytes] = deque()  # decisions of the replayed core that the journal must name next
        self._arrived: Arrived | None = None
        self._passed: list[tuple[Story, Passed]] = []  # of the newest pass; told behind the decisions of its input
        self._about: list[Story] = []  # stories that a decision of the newest input was about
        self._bands: Bands = ()

    def take(self, record: Record) -> None:
        """Follow one record."""
        self.records += 1
        if record.kind == Kind.OPENED:
            self._opened(record)
        elif record.kind in INPUT_KINDS:
            self._input(record)
        elif record.kind == Kind.DECIDED:
            self._decided(record)

    def end(self) -> None:
        """The journal ends here."""
        self._tell_passed()

    # --- records -------------------------------------------------------------------------------------------------

    def _opened(self, record: Record) -> None:
        self._tell_passed()
        opened: Any = record.decode()
        assert isinstance(opened, Opened)
        self._life, self._core = opened.life, None
        self._expected.clear()
        if opened.decision_version == DECISION_VERSION:
            self._core = SchedulerCore(opened.core)
        else:
            versions = f"{opened.decision_version}, ours is {DECISION_VERSION}"
            self.notes.append(f"life {self._life}: its decisions are of version {versions}: passes are not told")

    def _input(self, record: Record) -> None:
        self._tell_passed()
        item: Any = record.decode()
        self._about = []
        if isinstance(item, Arrived):
            self._arrived = item
        if isinstance(item, EpochBegan):
            self._bands = [[band.name for band in stage.bands] for stage in item.geometry.stages]
            for story in self._live:
                story.bands = self._bands
        core = self._core
        if core is None:
            return
        passes = core.passes
        try:
            out = core.feed(item)
        except Exception as error:
            self._give_up(record, f"the replayed core broke: {type(error).__name__}: {error}")
            return
        self._expected.extend(records.encode(decided) for decided in out.decisions)
        if isinstance(item, Ticked) and core.passes > passes:
            step = out.step.seq if out.step is not None and out.step.forward is not None else 0
            for story in self._live:
                over = core.passed_over(story.request)
                if over is not None:
                    self._passed.append((story, Passed(record.sequence, item.now_ns, step, over)))

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

    # --- inside --------------------------------------------------------------------------------------------------

    def _accepted(self, record: Record, decided: Decided) -> None:
        arrived, count = self._arrived, decided.numbers.get("n", 1)
        self.requests = max(self.requests, decided.request + count - 1)
        if arrived is None:
            return
        for choice in range(count):
            number = decided.request + choice
            if number == self._asked.request or self._asked.means(arrived):
                story = Story(number, choice, arrived, self._bands)
                self.stories.append(story)
                self._live.append(story)
                self._tell(story, record, decided)

    def _refused(self, record: Record, decided: Decided) -> None:
        if self._arrived is not None and self._asked.means(self._arrived):
            story = Story(0, 0, self._arrived, self._bands, [Told(record.sequence, decided)], ended=True)
            self.stories.append(story)

    def _concerned(self, decided: Decided) -> Iterator[Story]:
        """The live stories that a decision belongs to."""
        for story in list(self._live):
            number = story.request
            if decided.request == number or (decided.by == number and decided.verdict != Verdict.ENDED):
                self._about.append(story)
                yield story
            elif not decided.request and self._surrounds(story, decided):
                yield story

    def _surrounds(self, story: Story, decided: Decided) -> bool:
        """Whether a decision about the whole core is told too: some always, evictions in a step with others of ours."""
        if decided.verdict == Verdict.EVICTED:
            return any(story is about for about in self._about)
        return decided.verdict in CONTEXT

    def _tell(self, story: Story, record: Record, decided: Decided) -> None:
        story.events.append(Told(record.sequence, decided))
        if decided.verdict == Verdict.ENDED and decided.request == story.request:
            story.ended = True
            self._live.remove(story)

    def _tell_passed(self) -> None:
        """The decisions of the newest input are told; now its pass is."""
        for story, passed in self._passed:
            if not story.ended:
                story.events.append(passed)
        self._passed = []

    def _give_up(self, record: Record, why: str) -> None:
        self._core = None
        self._expected.clear()
        self.notes.append(f"life {self._life}, sequence {record.sequence}: {why}; from here on no passes are told")


def follow(journal: Iterable[Record], asked: Asked, progress: Callable[[Record], None] | None = None) -> Follower:
    """Follow a whole journal; `progress` hears of each record."""
    follower = Follower(asked)
    for record in journal:
        if progress is not None:
            progress(record)
        follower.take(record)
    follower.end()
    return follower
