"""Replay: whole journals are reproduced, cut ones up to their last record, and any false record is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from daemon.core.inputs import Arrived, Reported, Ticked
from daemon.core.outputs import Decided
from ipc.messages import Step
from journal import records, segment
from journal.errors import JournalError
from journal.reader import Record, read_records
from journal.records import MAY_SKIP, Closed, Digested, Kind, Opened, Readied
from journal.replay import Divergence, Verdict, check
from journal.segment import segment_name
from journal.writer import JournalSettings
from tests.journal.modeled_disk import Inode, ModeledDisk
from tests.journal.world import World
from tools.replica import factories

SMALL = JournalSettings(segment_bytes=16 << 10)


def replay(disk: ModeledDisk) -> Verdict:
    return check(read_records(disk), factories())


def journal(iterations: int = 120, seed: int = 1, closing: bool = True) -> list[Record]:
    """Records of one life."""
    disk = ModeledDisk()
    world = World(disk, seed)
    for _ in range(iterations):
        world.iterate()
    if closing:
        world.close()
    return list(read_records(disk))


@pytest.mark.parametrize("seed", range(6))
def test_a_whole_journal_is_reproduced(seed: int) -> None:
    """Every step, decision and digest of three lives comes out as recorded, over segments and an epoch's end."""
    disk = ModeledDisk()
    steps = 0
    for life in range(3):
        world = World(disk, 10 * seed + life, f"life {life}", SMALL)
        for iteration in range(150):
            world.iterate()
            if iteration == 100 and life == 1:
                world.end_epoch(1)
                world.begin_epoch(2)
        if life == 2:
            world.close()
        else:
            disk = disk.killed()
        steps += world.steps
    verdict = replay(disk)
    assert verdict.divergence is None, verdict.divergence
    assert verdict.counts.lives == 3
    assert verdict.counts.steps == steps > 100
    assert verdict.counts.digests > 100
    assert verdict.counts.decisions > 50
    assert verdict.counts.unfinished == 0


def test_what_the_ranks_run_on_decides_nothing() -> None:
    """Records of the ranks' builds and threads, wherever they stand, change no verdict; an older reader passes over."""
    disk = ModeledDisk()
    world = World(disk, 7)
    for _ in range(20):
        world.writer.append(Readied(1, 1, 0, 0, {"threads": "2"}))
        world.iterate()
    world.close()
    verdict = replay(disk)
    assert verdict.divergence is None, verdict.divergence
    assert [record.kind for record in read_records(disk)].count(Kind.READIED) == 20
    assert Kind.READIED in MAY_SKIP


def test_counts_are_of_what_was_recorded() -> None:
    """The summary counts each record once."""
    found = journal()
    counts = check(found, factories()).counts
    kinds = [record.kind for record in found]
    assert counts.records == len(found)
    assert counts.steps == kinds.count(Kind.STEPPED)
    assert counts.decisions == kinds.count(Kind.DECIDED)
    assert counts.digests == kinds.count(Kind.DIGESTED)
    assert counts.last_sequence == found[-1].sequence


def test_a_journal_cut_anywhere_passes() -> None:
    """After kill -9 at any byte, everything up to the last whole record is reproduced."""
    disk = ModeledDisk()
    world = World(disk, 5)
    for _ in range(12):
        world.iterate(arrivals=0.8)
    name = segment_name(1)
    data = disk.read(name)
    cuts = 0
    for length in range(len(data), len(data) - 6000, -13):
        killed = ModeledDisk()
        killed.files = {name: Inode(bytearray(data[:length]), data[:length])}
        verdict = replay(killed)
        assert verdict.divergence is None, f"cut at {length}: {verdict.divergence}"
        cuts += verdict.counts.unfinished > 0
    assert cuts > 5, "no cut fell between an input and its outputs"


def test_the_next_life_replays_after_a_cut() -> None:
    """A torn journal that was opened again is reproduced over both lives, and numbers of requests go on."""
    disk = ModeledDisk()
    world = World(disk, 3, "first", SMALL)
    for _ in range(80):
        world.iterate()
    last = sorted(name for name in disk.files if name.endswith(".kvj"))[-1]
    disk = disk.killed()
    del disk.files[last].data[-11:]
    world = World(disk, 4, "second", SMALL)
    assert any(choice.ended is None for group in world.recovery.groups for choice in group.choices), "nothing was left"
    assert (world.recovery.how, world.recovery.notes) == ("replayed", [])
    for _ in range(80):
        world.iterate()
    world.close()
    verdict = replay(disk)
    assert verdict.divergence is None, verdict.divergence
    accepted = [
        record.decode().request  # type: ignore[attr-defined]
        for record in read_records(disk)
        if record.kind == Kind.DECIDED and record.decode().verdict == "accepted"  # type: ignore[attr-defined]
    ]
    assert len(accepted) == len(set(accepted))


# --- false records ---------------------------------------------------------------------------------------------------


def changed(found: list[Record], kind: Kind, nth: int, change: Callable[[Any], msgspec.Struct | None]) -> list[Record]:
    """The records with the nth of a kind replaced, or left out where the change gives None."""
    place = [at for at, record in enumerate(found) if record.kind == kind][nth]
    fresh = change(found[place].decode())
    middle = [] if fresh is None else [found[place]._replace(payload=records.encode(fresh))]
    return [*found[:place], *middle, *found[place + 1 :]]


def with_fields(**fields: object) -> Callable[[Any], msgspec.Struct]:
    return lambda item: msgspec.structs.replace(item, **fields)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def other_start(step: Step) -> Step:
    assert step.forward is not None
    starts = bytearray(step.forward.starts)
    starts[0] ^= 1
    return msgspec.structs.replace(step, forward=msgspec.structs.replace(step.forward, starts=bytes(starts)))


def without_op(step: Step) -> Step:
    assert step.ops
    return msgspec.structs.replace(step, ops=step.ops[:-1])


def other_token(report: Reported) -> Reported:
    assert report.tokens
    return msgspec.structs.replace(report, tokens=flipped(report.tokens))


FALSE: list[tuple[str, Kind, int, Callable[[Any], msgspec.Struct | None], str]] = [
    ("decision changed", Kind.DECIDED, 3, with_fields(reason="other"), "DECIDED differs"),
    ("decision missing", Kind.DECIDED, 3, lambda _: None, "DECIDED that input 13 led to was never written"),
    ("step changed", Kind.STEPPED, 8, other_start, "STEPPED differs"),
    ("op missing", Kind.STEPPED, 0, without_op, "STEPPED differs"),
    ("step missing", Kind.STEPPED, 9, lambda _: None, "was never written"),
    ("logical digest", Kind.DIGESTED, 8, lambda d: with_fields(logical=flipped(d.logical))(d), "the logical digest"),
    ("layout digest", Kind.DIGESTED, 8, lambda d: with_fields(layout=flipped(d.layout))(d), "the layout digest"),
    (
        "token digest",
        Kind.DIGESTED,
        9,
        lambda d: with_fields(sampled=flipped(d.sampled))(d),
        "the digest of the tokens",
    ),
    ("no token digest", Kind.DIGESTED, 9, with_fields(sampled=b""), "the digest of the tokens"),
    ("token digest of a stage", Kind.DIGESTED, 8, with_fields(sampled=bytes(16)), "the digest of the tokens"),
    ("reported token", Kind.REPORTED, 6, other_token, "the digest of the tokens"),
    ("report missing", Kind.REPORTED, 6, lambda _: None, ""),
    ("arrival missing", Kind.ARRIVED, 2, lambda _: None, ""),
    ("state at the end", Kind.CLOSED, 0, with_fields(state=bytes(16)), "state digest"),
    ("totals at the end", Kind.CLOSED, 0, with_fields(totals={"accepted_total": 1}), "totals"),
]


@pytest.mark.parametrize(("kind", "nth", "change", "what"), [row[1:] for row in FALSE], ids=[row[0] for row in FALSE])
def test_a_false_record_is_found(kind: Kind, nth: int, change: Callable[[Any], Any], what: str) -> None:
    """One record that is not what happened stops the replay, at it or at a record it contradicts."""
    found = journal()
    verdict = check(changed(found, kind, nth, change), factories())
    assert verdict.divergence is not None
    assert what in verdict.divergence.what
    place = [record for record in found if record.kind == kind][nth]
    # The digests of a step stand right before its report, which may be what is false.
    assert verdict.divergence.sequence >= place.sequence - 2
    assert verdict.divergence.recorded


def test_both_sides_and_the_place_are_told() -> None:
    """The divergence names step, op and request, and the first differing field with both values."""
    found = journal()

    def other_page(step: Step) -> Step:
        part = step.ops[0].parts[0]  # type: ignore[union-attr]
        ids = (77).to_bytes(4, "little") + part.ids[4:]
        op = msgspec.structs.replace(step.ops[0], parts=[msgspec.structs.replace(part, ids=ids)])
        return msgspec.structs.replace(step, ops=[op, *step.ops[1:]])

    divergence = check(changed(found, Kind.STEPPED, 0, other_page), factories()).divergence
    assert divergence is not None
    assert (divergence.epoch, divergence.step, divergence.op) == (1, 1, 0)
    assert divergence.path == "ops[0].parts[0].ids[0]: recorded 77, replayed 1"
    assert "ids=[77" in divergence.recorded
    assert "ids=[1" in divergence.replayed
    decision = check(changed(found, Kind.DECIDED, 5, with_fields(numbers={})), factories()).divergence
    assert isinstance(decision, Divergence)
    recorded = [record.decode() for record in found if record.kind == Kind.DECIDED][5]
    assert isinstance(recorded, Decided)
    assert decision.request == recorded.request


def test_outputs_missing_before_the_end_are_found() -> None:
    """A daemon that stopped writing its decisions is not taken for one that was killed."""
    found = journal(closing=False)
    silent = [record for record in found if record.kind not in (Kind.DECIDED, Kind.DIGESTED)]
    divergence = check(silent, factories()).divergence
    assert divergence is not None
    assert "never written" in divergence.what


def test_other_decision_version_compares_digests_only() -> None:
    """Decisions of another version are not compared, and a note says so; the chains still are."""
    found = journal()
    other = changed(found, Kind.OPENED, 0, with_fields(decision_version=records.DECISION_VERSION + 1))
    verdict = check(changed(other, Kind.DECIDED, 3, with_fields(reason="other")), factories())
    assert verdict.divergence is None
    assert "decisions are not compared" in verdict.notes[0]
    broken = changed(other, Kind.DIGESTED, 8, lambda d: with_fields(layout=flipped(d.layout))(d))
    assert check(broken, factories()).divergence is not None


def test_newer_schema_is_refused() -> None:
    """Records with fields that this version cannot know are not guessed at."""
    found = changed(journal(), Kind.OPENED, 0, with_fields(schema_version=records.SCHEMA_VERSION + 1))
    with pytest.raises(JournalError, match="record schema"):
        check(found, factories())


def test_a_life_begins_with_opened() -> None:
    """Without its first record a life cannot be replayed, and what stands there is shown."""
    divergence = check(journal()[1:], factories()).divergence
    assert divergence is not None
    assert "does not begin with Opened" in divergence.what


def test_a_core_that_breaks_here_and_not_there_is_found() -> None:
    """When the replayed core raises, the recorded one must have raised too: its epoch ends next, or nothing follows."""

    class Breaking:
        def __init__(self, config: object) -> None:
            self.core = factories().core(config)  # type: ignore[arg-type]
            self.ticks = 0

        def feed(self, item: Any) -> Any:
            self.ticks += isinstance(item, Ticked)
            if self.ticks == 20:
                raise RuntimeError("the modeled defect")
            return self.core.feed(item)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.core, name)

    made = factories()
    broken = dataclasses.replace(made, core=Breaking)  # type: ignore[arg-type]
    divergence = check(journal(), broken).divergence
    assert divergence is not None
    assert "the modeled defect" in divergence.replayed
    found = journal(closing=False)
    ticks = [at for at, record in enumerate(found) if record.kind == Kind.TICKED]
    assert check(found[: ticks[19] + 1], broken).divergence is None


def test_until_stops_behind_a_record() -> None:
    """The state is that behind the record: requests that arrived later are not there."""
    found = journal(closing=False)
    arrivals = [record for record in found if record.kind == Kind.ARRIVED]
    verdict = check(found, factories(), until=arrivals[3].sequence)
    assert verdict.counts.last_sequence == arrivals[3].sequence
    assert verdict.replay.core is not None
    assert verdict.replay.core.gauges()["received_total"] >= 4
    before = check(found, factories(), until=arrivals[3].sequence - 1)
    assert before.replay.core is not None
    assert before.replay.core.gauges()["received_total"] < verdict.replay.core.gauges()["received_total"]


def test_payloads_are_decoded_on_demand() -> None:
    """Reading and checking a journal decodes no payload: verify works on records of any schema."""
    disk = ModeledDisk()
    world = World(disk, 1)
    for _ in range(10):
        world.iterate()

    def walk() -> Iterator[Record]:
        return read_records(disk)

    assert all(isinstance(record.payload, bytes) for record in walk())
    kinds = {Kind(record.kind): type(record.decode()) for record in walk()}
    assert kinds[Kind.OPENED] is Opened
    assert kinds[Kind.STEPPED] is Step
    assert {Arrived, Reported, Decided, Digested} <= set(kinds.values())
    assert Closed not in kinds.values()
    assert segment.load(disk, segment_name(1)).header is not None
