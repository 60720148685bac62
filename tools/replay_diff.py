"""`bandmaster replay diff`: two journals, or two lives of one, side by side: the first thing that differs.

    bandmaster replay diff A B [--life N[,M]] [--times] [--names] [--context 5] [--json]
    bandmaster replay diff DIR --life N,M

Owns what counts as the same. Compared are inputs, decisions and steps, in their order, and each of the three by itself.
What is only time is no difference without `--times`: when something happened, ticks, how long somebody waited, when
ends were acknowledged. Nor are, without `--names`, ids and front ends that are only called otherwise throughout, nor
drawn seeds of greedy requests, which decide nothing. Configuration and arena are told beside. Must never replay
anything: what was recorded is compared. Exit codes: `tools.ends`.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from allocator.columns import i32
from allocator.geometry import Geometry
from daemon.core import inputs
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from ipc.messages import Generate, Sampling, Step
from journal.difference import describe, first_difference
from journal.divergence import diverged, requests_in_words
from journal.holders import Holders
from journal.reader import Record, Walk
from journal.records import INPUT_KINDS, Kind, Opened
from tools.ends import DONE, NO, Refused, ended
from tools.journal_files import ReadingProgress, open_directory, refuse_foreign
from tools.output import tell
from tools.reading_flags import DIRECTORY, add_json, few, reading_parser

INPUTS, DECISIONS, STEPS = "inputs", "decisions", "steps"
STREAMS = (INPUTS, DECISIONS, STEPS)
ONLY_TIME = frozenset({Kind.TICKED, Kind.ACKNOWLEDGED})
NO_GEOMETRY = Geometry(0, 0, 0, [])
BEHIND_MAX = 100_000  # records by which one side of a stream may be ahead of the other
OF_ROWS = ("rows[", "generations[", "tokens[")  # columns of a report with an entry for each row
AHEAD = 64  # records that are looked through for one that came in another order
TIME_ENDINGS = ("_ms", "_ns")


class Rules(NamedTuple):
    """What is compared beside what decides."""

    times: bool = False
    names: bool = False


class Item(NamedTuple):
    """A record as it is compared: its stream, and itself without what is no difference; `true` is as it was read."""

    record: Record
    stream: str
    plain: msgspec.Struct
    true: msgspec.Struct


@dataclass(slots=True)
class Names:
    """One side's names by what stands for them: the place at which each came up first, forgotten with its request."""

    known: dict[tuple[str, str], str] = field(default_factory=dict)
    made: int = 0

    def of(self, kind: str, name: str) -> str:
        """What stands for a name."""
        found = self.known.get((kind, name))
        if found is None:
            self.made += 1
            found = self.known[kind, name] = f"{kind}{self.made}"
        return found

    def forget(self, kind: str, name: str) -> None:
        """A name does not come up again."""
        self.known.pop((kind, name), None)


@dataclass(slots=True)
class Side:
    """One of the two: its records of one life, or of all, and who holds what at the newest of them."""

    directory: str
    life: int
    rules: Rules
    walk: Walk
    opened: Opened | None = None
    lives: int = 0
    trimmed: bool = False
    holders: Holders | None = None
    geometry: Geometry = NO_GEOMETRY
    names: Names = field(default_factory=Names)
    recent: deque[Item] = field(default_factory=lambda: deque(maxlen=64))

    def items(self, seen: Any) -> Iterator[Item]:
        """What is compared, in order."""
        for place, record in enumerate(self.walk.records()):
            seen(record)
            if record.kind == Kind.OPENED:
                self.lives += 1
            elif place == 0:
                self.trimmed, self.lives = True, 1
            if self.life and self.lives != self.life:
                if self.lives > self.life:
                    return
                continue
            item = self._item(record)
            if item is not None:
                self.recent.append(item)
                yield item

    def _item(self, record: Record) -> Item | None:
        if record.kind == Kind.OPENED:
            opened = record.decode()
            assert isinstance(opened, Opened)
            self.opened, self.holders = opened, None
            return None
        if record.kind in INPUT_KINDS:
            if record.kind in ONLY_TIME and not self.rules.times:
                if record.kind == Kind.ACKNOWLEDGED:
                    self._forget(record.decode())
                return None
            stream = INPUTS
        elif record.kind in (Kind.DECIDED, Kind.STEPPED):
            stream = DECISIONS if record.kind == Kind.DECIDED else STEPS
        else:
            return None
        true = record.decode()
        self._follow(true)
        return Item(record, stream, self._plain(true), true)

    def _forget(self, item: Any) -> None:
        for id in item.ids:
            self.names.forget("id", id)

    def _follow(self, item: msgspec.Struct) -> None:
        """Who holds what."""
        if isinstance(item, inputs.EpochBegan):
            rows = self.opened.core.max_running_requests if self.opened is not None else 1024
            self.holders, self.geometry = Holders(item.geometry, rows), item.geometry
        elif self.holders is not None and isinstance(item, Decided) and item.verdict == Verdict.ADMITTED:
            self.holders.admitted(item)
        elif self.holders is not None and isinstance(item, Step):
            self.holders.step(item)

    def _plain(self, item: Any) -> msgspec.Struct:
        """The record without what is no difference."""
        change: dict[str, Any] = {}
        if isinstance(item, inputs.EpochBegan):
            change["geometry"] = NO_GEOMETRY  # a setting: told beside
        if not self.rules.times:
            if hasattr(item, "now_ns"):
                change["now_ns"] = 0
            if isinstance(item, Decided):
                change["numbers"] = {n: 0 if n.endswith(TIME_ENDINGS) else v for n, v in item.numbers.items()}
            if isinstance(item, inputs.Recovered):
                change["groups"] = [msgspec.structs.replace(group, arrived_ns=0) for group in item.groups]
        if not self.rules.names:
            change |= self._named(item)
        if isinstance(item, Step) and item.forward is not None and item.forward.sampling:
            sampling = [msgspec.structs.replace(one, sampling=_seedless(one.sampling)) for one in item.forward.sampling]
            change["forward"] = msgspec.structs.replace(item.forward, sampling=sampling)
        plain: msgspec.Struct = msgspec.structs.replace(item, **change) if change else item
        return plain

    def _named(self, item: Any) -> dict[str, Any]:
        """Fields with what stands for their names."""
        change: dict[str, Any] = {}
        if isinstance(item, inputs.Arrived):
            generate: Generate = msgspec.structs.replace(item.generate, id=self.names.of("id", item.generate.id))
            change["generate"] = generate
            if generate.sampling.seed is not None or generate.sampling.temperature == 0:
                change["seed"] = 0  # not the one that counts, or none does
        elif isinstance(getattr(item, "id", None), str):
            change["id"] = self.names.of("id", item.id)
        if isinstance(getattr(item, "frontend", None), str):
            change["frontend"] = self.names.of("frontend", item.frontend)
        if isinstance(item, inputs.Recovered):
            groups = change.get("groups", item.groups)
            change["groups"] = [self._named_group(group) for group in groups]
        return change

    def _named_group(self, group: inputs.RecoveredGroup) -> inputs.RecoveredGroup:
        """A request that a life took over."""
        id, replace = self.names.of("id", group.generate.id), msgspec.structs.replace
        ends = [
            replace(one, ended=replace(one.ended, id=id)) if one.ended is not None else one for one in group.choices
        ]
        return replace(
            group,
            frontend=self.names.of("frontend", group.frontend),
            generate=replace(group.generate, id=id),
            accepted=replace(group.accepted, id=id),
            choices=ends,
            seed=0,
        )

    def about(self, item: Item, op: int, row: int) -> list[int]:
        """The requests that a place in a record is about."""
        if isinstance(item.true, Decided):
            return [item.true.request] if item.true.request else []
        if self.holders is None:
            return []
        if isinstance(item.true, Step):
            return self.holders.of_op(item.true.seq, op) if op >= 0 else self.holders.of_row(row)
        if isinstance(item.true, inputs.Reported):
            numbers = self.holders.of_rows(i32(item.true.rows), i32(item.true.generations))
            return [number for number in numbers[row : row + 1] if number] if row >= 0 else []
        return []


def _seedless(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, seed=None) if sampling.temperature == 0 else sampling


@dataclass(slots=True)
class Difference:
    """One place where two sides differ; a sequence of 0: that side has nothing more there."""

    stream: str
    left_sequence: int
    right_sequence: int
    left_place: str
    right_place: str
    path: str
    left: str
    right: str
    epoch: int = 0
    step: int = 0
    op: int = -1
    left_requests: list[int] = field(default_factory=list)
    right_requests: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Comparison:
    """What was found: the first difference of all three streams together, that of each, and what stood before."""

    first: Difference | None = None
    means: str = ""
    by_stream: dict[str, Difference | None] = field(default_factory=lambda: dict.fromkeys(STREAMS))
    equal: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    settings: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    left_story: list[str] = field(default_factory=list)
    right_story: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Streams:
    """The three streams, each compared by itself as far as both sides have come."""

    def __init__(self, found: Comparison, sides: tuple[Side, Side]) -> None:
        self._found, self._sides = found, sides
        self._wait: dict[str, tuple[deque[Item], deque[Item]]] = {name: (deque(), deque()) for name in STREAMS}
        self._open = set(STREAMS)

    def take(self, at: int, item: Item | None) -> None:
        """One side's next."""
        if item is None or item.stream not in self._open:
            return
        queues = self._wait[item.stream]
        queues[at].append(item)
        while queues[0] and queues[1]:
            left, right = queues[0].popleft(), queues[1].popleft()
            if left.plain != right.plain:
                self._close(item.stream, left, right)
                return
            self._found.equal[item.stream] += 1
        if len(queues[at]) > BEHIND_MAX:
            self._found.notes.append(f"{item.stream}: one side is {BEHIND_MAX:,} ahead, not compared further")
            self._open.discard(item.stream)

    def end(self) -> None:
        """Both sides are through: what waits has no counterpart."""
        for name in sorted(self._open):
            left, right = self._wait[name]
            if left or right:
                self._close(name, left[0] if left else None, right[0] if right else None)

    @property
    def settled(self) -> bool:
        """Whether every stream has its first difference."""
        return not self._open

    def _close(self, name: str, left: Item | None, right: Item | None) -> None:
        self._found.by_stream[name] = difference(left, right, *self._sides)
        self._open.discard(name)


def difference(left: Item | None, right: Item | None, one: Side, other: Side) -> Difference:
    """Where two records differ, with the requests that it is about on either side."""
    given = left or right
    assert given is not None, "one side has something"
    path, op, row, epoch, step = "", -1, -1, 0, 0
    if left is not None and right is not None:
        place = first_difference(left.plain, right.plain)
        if place is not None:
            path = f"{place.path}: {place.recorded} | {place.replayed}"
            found = diverged(left.record, "", "", "", left.plain, right.plain).divergence
            op, row = found.op, found.row
            if isinstance(left.true, inputs.Reported) and place.path.startswith(OF_ROWS):
                row = int(place.path[place.path.index("[") + 1 : place.path.index("]")])
    if isinstance(given.true, Step | inputs.Reported):
        epoch, step = given.true.epoch, given.true.seq
    return Difference(
        given.stream,
        left.record.sequence if left else 0,
        right.record.sequence if right else 0,
        f"{left.record.file} at byte {left.record.offset}" if left else "its end",
        f"{right.record.file} at byte {right.record.offset}" if right else "its end",
        path,
        describe(left.true) if left else "nothing more",
        describe(right.true) if right else "nothing more",
        epoch,
        step,
        op,
        one.about(left, op, row) if left else [],
        other.about(right, op, row) if right else [],
    )


def settings_that_differ(left: Side, right: Side) -> list[str]:
    """Configuration, arena, versions and what else was recorded of a life, where they differ: `name: left | right`."""
    tables = [_settings(side) for side in (left, right)]
    names = list(dict.fromkeys(chain(*tables)))
    return [
        f"{name}: {tables[0].get(name, 'not there')} | {tables[1].get(name, 'not there')}"
        for name in names
        if tables[0].get(name) != tables[1].get(name)
    ]


def _settings(side: Side) -> dict[str, Any]:
    opened, shape = side.opened, side.geometry
    table: dict[str, Any] = {}
    if opened is not None:
        table |= {"decision version": opened.decision_version}
        table |= msgspec.structs.asdict(opened.core) | opened.versions | opened.settings
    for place, stage in enumerate(shape.stages):
        bands = ", ".join(f"{band.name} {band.unit_bytes}" for band in stage.bands)
        table |= {f"stage {place}: arena bytes": stage.arena_bytes, f"stage {place}: bands and bytes": bands}
    return table


def compare(left: Side, right: Side, context: int, seen: Any = lambda record: None) -> Comparison:
    """Go through both until every stream has its first difference, or both are over."""
    found, sides = Comparison(), (left, right)
    readers = [left.items(seen), right.items(seen)]
    streams = _Streams(found, sides)
    _align(found, sides, readers)
    before: deque[str] = deque(maxlen=context)
    while not streams.settled:
        pair = [next(reader, None) for reader in readers]
        if pair == [None, None]:
            break
        if found.first is None and _differ(pair):
            found.first = difference(pair[0], pair[1], *sides)
            found.before = list(before)
            found.left_story, found.right_story = (
                _story(side, numbers, context)
                for side, numbers in ((left, found.first.left_requests), (right, found.first.right_requests))
            )
            ahead = [[one for _, one in zip(range(AHEAD), reader, strict=False)] for reader in readers]
            found.settings = settings_that_differ(left, right)
            found.means = _means(found, pair, ahead)
            readers = [chain(some, reader) for some, reader in zip(ahead, readers, strict=True)]
        elif found.first is None and pair[0] is not None:
            before.append(f"{pair[0].record.sequence} | {_sequence(pair[1])}: {describe(pair[0].true)}")
        for at, item in enumerate(pair):
            streams.take(at, item)
    streams.end()
    for side in sides:
        found.notes += [f"{side.directory}: the end is torn: {cut.text()}" for cut in side.walk.cuts()]
    if not found.settings:
        found.settings = settings_that_differ(left, right)
    return found


def _align(found: Comparison, sides: tuple[Side, Side], readers: list[Iterator[Item]]) -> None:
    """Where one side's beginning was trimmed, both begin at the first step that both have."""
    heads = [next(reader, None) for reader in readers]
    if any(side.trimmed for side in sides):
        steps = [_first_step(head, reader) for head, reader in zip(heads, readers, strict=True)]
        for at, other in ((0, 1), (1, 0)):
            mine, theirs = steps[at], steps[other]
            while mine is not None and theirs is not None and _step(mine) < _step(theirs):
                mine = _first_step(None, readers[at])
            steps[at] = mine
        heads = steps
        if heads[0] is not None:
            epoch, step = _step(heads[0])
            found.notes.append(f"one side's beginning was trimmed: compared from epoch {epoch}, step {step} on")
    for at, head in enumerate(heads):
        if head is not None:
            readers[at] = chain([head], readers[at])


def _first_step(head: Item | None, reader: Iterator[Item]) -> Item | None:
    return next((item for item in chain([head] if head else [], reader) if item.stream == STEPS), None)


def _step(item: Item) -> tuple[int, int]:
    assert isinstance(item.true, Step), "steps are compared"
    return item.true.epoch, item.true.seq


def _differ(pair: list[Item | None]) -> bool:
    left, right = pair
    return left is None or right is None or left.plain != right.plain


def _sequence(item: Item | None) -> str:
    return str(item.record.sequence) if item is not None else "-"


def _story(side: Side, numbers: list[int], context: int) -> list[str]:
    """The newest decisions of a side: about the requests in question, or else whatever they were about."""
    told = [item for item in side.recent if isinstance(item.true, Decided)]
    about = [item for item in told if isinstance(item.true, Decided) and item.true.request in numbers]
    return [f"{item.record.sequence}: {describe(item.true)}" for item in (about or told)[-context:]] if context else []


def _means(found: Comparison, pair: list[Item | None], ahead: list[list[Item]]) -> str:
    """What follows of the first difference."""
    left, right = pair
    if left is None or right is None:
        return f"the {'left' if left is None else 'right'} side ends here, and the other goes on"
    crossed = ((ahead[1], _nameless(left)), (ahead[0], _nameless(right)))
    if all(any(_nameless(item) == other for item in some) for some, other in crossed):
        return "both sides have both records, in another order: only the moment differs, and what follows from it"
    if INPUTS in (left.stream, right.stream):
        return "the two were fed differently here: what they decide from here on need not be the same"
    if found.settings:
        return "fed alike, they decided differently: their settings or versions are not the same"
    return "fed alike and set alike, they decided differently: another version, or a decision that read something else"


def _nameless(item: Item) -> msgspec.Struct:
    """A record without its id, which stands for the place at which it came up first."""
    if isinstance(item.plain, inputs.Arrived):
        return msgspec.structs.replace(item.plain, generate=msgspec.structs.replace(item.plain.generate, id=""))
    return msgspec.structs.replace(item.plain, id="") if hasattr(item.plain, "id") else item.plain


# --- command ---------------------------------------------------------------------------------------------------------


def show(found: Comparison, names: tuple[str, str]) -> None:
    """The comparison as text."""
    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    for note in found.notes:
        say(f"note: {note}")
    equal = ", ".join(f"{count:,} {name}" for name, count in found.equal.items())
    if found.first is None:
        say(f"no difference: {equal} are the same")
        _list(say, "settings that differ", found.settings)
        return
    first = found.first
    say(f"DIFFER in {first.stream}: {found.means}")
    step = f", epoch {first.epoch}, step {first.step}" if first.step else ""
    op = f", op {first.op}" if first.op >= 0 else ""
    sides = ((names[0], first.left_sequence, first.left_place, first.left_requests, first.left),
             (names[1], first.right_sequence, first.right_place, first.right_requests, first.right))  # fmt: skip
    for name, sequence, place, requests, text in sides:
        about = f", {requests_in_words(requests)}" if requests else ""
        say(f"  {name}: sequence {sequence or '-'}, {place}{step}{op}{about}")
        say(f"    {text}")
    if first.path:
        say(f"  first difference: {first.path}")
    _list(say, "settings that differ", found.settings)
    _list(say, "the last that is the same (sequences left | right)", found.before)
    _list(say, f"newest decisions, {names[0]}", found.left_story)
    _list(say, f"newest decisions, {names[1]}", found.right_story)
    say("each stream by itself:")
    for name, one in found.by_stream.items():
        where = f"then sequence {one.left_sequence or '-'} | {one.right_sequence or '-'}: {one.path}" if one else "all"
        say(f"  {name}: {found.equal[name]:,} are the same, {where}")


def _list(say: Any, title: str, lines: list[str]) -> None:
    if lines:
        say(f"  {title}:")
        for line in lines:
            say(f"    {line}")


def _parser() -> argparse.ArgumentParser:
    parser = reading_parser("replay diff", "Two journals side by side: the first thing that differs.")
    parser.add_argument("left", metavar="A", help=DIRECTORY)
    parser.add_argument("right", metavar="B", nargs="?", help="another one [A itself, for two of its lives]")
    parser.add_argument("--life", metavar="N[,M]", default="", help="only this life of both, or N of A and M of B")
    parser.add_argument("--times", action="store_true", help="times, ticks and acknowledgements count too")
    parser.add_argument("--names", action="store_true", help="ids and front ends count too")
    parser.add_argument("--context", type=few, default=5, metavar="N", help="records that are shown around it [5]")
    add_json(parser)
    return parser


def _lives(parser: argparse.ArgumentParser, text: str) -> tuple[int, int]:
    parts = text.split(",") if text else ["0"]
    if len(parts) > 2 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        parser.error(f"--life {text!r} is neither N nor N,M")
    return int(parts[0]), int(parts[-1])


def main(argv: list[str] | None = None) -> int:
    """`bandmaster replay diff`."""
    parser = _parser()
    options = parser.parse_args(argv)
    lives = _lives(parser, options.life)
    other = options.right or options.left
    if not options.right and lives[0] == lives[1]:
        parser.error("one journal: name two of its lives, as in --life 1,2")
    return ended("replay diff", lambda: _run(options, other, lives))


def _run(options: argparse.Namespace, other: str, lives: tuple[int, int]) -> int:
    rules = Rules(options.times, options.names)
    storages = [open_directory(directory) for directory in (options.left, other)]
    left, right = (
        Side(directory, life, rules, Walk(storage))
        for directory, life, storage in zip((options.left, other), lives, storages, strict=True)
    )
    with ReadingProgress(storages[0], "comparing") as seen:
        found = compare(left, right, options.context, seen)
    for side in (left, right):
        refuse_foreign(side.walk)
        if side.life > side.lives:
            raise Refused(f"{side.directory} has {side.lives} lives; there is no life {side.life}")
    names = tuple(f"{side.directory}{f' life {side.life}' if side.life else ''}" for side in (left, right))
    document = {"left": names[0], "right": names[1], **asdict(found)}
    tell(options.json, lambda: document, lambda: show(found, (names[0], names[1])))
    return DONE if found.first is None and not any(found.by_stream.values()) else NO


if __name__ == "__main__":
    raise SystemExit(main())
