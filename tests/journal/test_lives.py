"""Lives: whatever moment a daemon dies at, the next one goes on with what was accepted, behind what was committed."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from allocator.columns import i64, pack_i64
from daemon.core.inputs import Arrived, RecoveredGroup, Ticked
from daemon.core.outputs import Outputs
from daemon.core.scheduler import SchedulerCore
from daemon.recovery import Recovery, recover
from daemon.snapshots import core_state, restore_core
from ipc.messages import Generate, Sampling
from journal import frame, segment
from journal.errors import JournalDamaged
from journal.opening import open_journal
from journal.reader import read_records
from journal.records import Kind, Opened
from journal.records import encode as encode_record
from journal.replay import check
from journal.segment import segment_names
from journal.writer import JournalSettings
from tests.journal.helpers import ID
from tests.journal.modeled_disk import ModeledDisk
from tests.journal.world import World
from tools.replica import factories

SMALL = JournalSettings(segment_bytes=16 << 10)


def reopened(disk: ModeledDisk) -> Recovery:
    """What a daemon would find that starts now; the disk stays as it is."""
    copy = disk.killed()
    _, found = open_journal(copy, SMALL, ID)
    return recover(copy, found)


def lived(iterations: int = 80, seed: int = 1, **options: Any) -> tuple[ModeledDisk, World]:
    """A world that did so many iterations, all written, and its disk."""
    disk = ModeledDisk()
    world = World(disk, seed, "a", SMALL, **options)
    for _ in range(iterations):
        world.iterate()
    return disk, world


def live(groups: list[RecoveredGroup]) -> dict[int, list[int]]:
    """Output by number of every choice that goes on."""
    found = {}
    for group in groups:
        for place, choice in enumerate(group.choices):
            if choice.ended is None:
                found[group.accepted.first_request + place] = i64(choice.tokens).tolist()
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_life_leaves_exactly_what_its_core_knew(seed: int) -> None:
    """Groups, outputs, ends that nobody acknowledged and the next number: as the core had them when it was killed."""
    disk = ModeledDisk()
    world = World(disk, seed, "a", SMALL)
    for at in range(90):
        world.iterate()
        if at % 15 == 14:
            recovery = reopened(disk)
            assert recovery.groups == world.core.recoverable()
            assert recovery.next_request == world.core.next_request
            assert (recovery.how, recovery.notes) == ("replayed", [])
    assert live(recovery.groups), "nothing was live at the end"
    assert any(live(recovery.groups).values()), "nothing had output"


@pytest.mark.parametrize("seed", range(3))
def test_many_lives_in_a_row(seed: int) -> None:
    """Over six lives, each killed, with epochs lost in between: numbers are given once, output only grows, and replay
    reproduces all of it."""
    disk = ModeledDisk()
    rng, before = random.Random(seed), dict[int, list[int]]()
    for life in range(6):
        world = World(disk, 100 * seed + life, f"life {life}", SMALL)
        taken = live(world.recovery.groups)
        for number, tokens in before.items():
            assert taken.get(number) == tokens, f"request {number}"
        for at in range(rng.randrange(20, 60)):
            world.iterate()
            if at == 15:
                world.end_epoch(1)
                world.begin_epoch(2)
        before = live(world.core.recoverable())
        for number in taken:
            assert before.get(number, taken[number])[: len(taken[number])] == taken[number]
        disk = disk.killed()
    accepted: list[int] = []
    for record in read_records(disk):
        decided: Any = record.decode() if record.kind == Kind.DECIDED else None
        if decided is not None and decided.verdict == "accepted":
            accepted.append(decided.request)
    assert len(accepted) == len(set(accepted)) > 20
    verdict = check(read_records(disk), factories())
    assert verdict.divergence is None, verdict.divergence
    assert verdict.counts.lives == 6


def test_killed_at_every_record() -> None:
    """Cut behind each record in turn: what is found is what a core knows that was fed the inputs up to there."""
    disk, _ = lived(60, seed=4)
    names = list(segment_names(sorted(disk.files)).values())
    core = SchedulerCore(next(read_records(disk)).decode().core)  # type: ignore[attr-defined]
    for record in list(read_records(disk)):
        if 16 <= record.kind < 64:
            core.feed(record.decode())  # type: ignore[arg-type]
        elif record.kind == Kind.OPENED:
            continue
        whole = segment.load(disk, record.file)
        found = frame.decode(whole.data, record.offset)
        assert isinstance(found, frame.Frame)
        copy = ModeledDisk()
        for name in names[: names.index(record.file) + 1]:
            handle = copy.create(name)
            copy.write(handle, bytes(disk.files[name].data)[: found.end if name == record.file else None])
        if record.sequence % 7 and record.kind != Kind.REPORTED:
            continue
        recovery = reopened(copy)
        assert recovery.groups == core.recoverable(), f"behind record {record.sequence}"
        assert recovery.next_request == core.next_request


def test_a_life_that_died_at_once_takes_nothing_away() -> None:
    """Two lives that only wrote their `Opened` lie in between, and a third that took over and did nothing."""
    disk, world = lived()
    expected = world.core.recoverable()
    for life in ("b", "c"):
        disk = disk.killed()
        writer, _ = open_journal(disk, SMALL, ID)
        writer.append(Opened(1, life, 1, 1, world.core.state.config, {}, {}))
        writer.flush()
    disk = disk.killed()
    fourth = World(disk, 5, "d", SMALL)
    assert fourth.recovery.groups == expected
    fourth.writer.flush()
    fifth = World(disk.killed(), 6, "e", SMALL)
    assert live(fifth.recovery.groups) == live(expected)


def test_a_life_that_died_within_what_it_took_over_takes_nothing_away() -> None:
    """What is taken over comes in parts; with any of them missing the life before is read."""
    disk, world = lived()
    expected = world.core.recoverable()
    parts = reopened(disk).taken_over(1, 2000)
    assert len(parts) > 3
    assert [part.left for part in parts] == list(range(len(parts)))[::-1]
    assert max(len(encode_record(part)) for part in parts) < 2000 + 2000
    for written in range(1, len(parts) + 1):
        copy = disk.killed()
        writer, _ = open_journal(copy, SMALL, ID)
        opened = next(read_records(disk)).decode()
        writer.append(opened)
        writer.append_all(parts[:written])
        writer.flush()
        writer, found = open_journal(copy.killed(), SMALL, ID)
        assert (found.life_segment > 1) == (written == len(parts))
        names = segment_names(sorted(copy.files))
        assert found.life_segment in (1, *names)
        if written < len(parts):
            assert recover(writer.storage, found).groups == expected


def loses_a_token(groups: list[RecoveredGroup]) -> list[RecoveredGroup]:
    at, group = next((at, one) for at, one in enumerate(groups) if one.choices[0].tokens)
    choices = [msgspec.structs.replace(group.choices[0], tokens=group.choices[0].tokens[:-8]), *group.choices[1:]]
    return [*groups[:at], msgspec.structs.replace(group, choices=choices), *groups[at + 1 :]]


@pytest.mark.parametrize("change", [loses_a_token, lambda groups: groups[1:], lambda groups: groups[:-1], None])
def test_replay_holds_a_life_to_what_the_one_before_left(change: Any) -> None:
    """A token less, or a request, is a divergence at the record that should have taken it over; in parts or whole."""
    disk, _ = lived()
    recovery = reopened(disk)
    groups = change(recovery.groups) if change else recovery.groups
    for part_bytes in (1000, 8 << 20):
        copy = disk.killed()
        writer, _ = open_journal(copy, SMALL, ID)
        opened = next(read_records(disk)).decode()
        parts = Recovery(groups, recovery.next_request).taken_over(1, part_bytes)
        writer.append(opened)  # a life that dies within what it takes over, then one that does not
        writer.append_all(parts[:-1])
        writer.flush()
        writer, _ = open_journal(copy.killed(), SMALL, ID)
        writer.append(opened)
        taken = writer.append_all(parts)
        writer.flush()
        verdict = check(read_records(writer.storage), factories())
        if change is None:
            assert verdict.divergence is None, verdict.divergence
        else:
            assert verdict.divergence is not None, "nobody noticed"
            assert verdict.divergence.sequence == taken
            assert "took over" in verdict.divergence.what
            assert "request" in verdict.divergence.replayed


def test_a_closed_life_leaves_only_ends() -> None:
    """Nothing goes on behind `Closed`; who has not acknowledged an end is still told of it."""
    disk, world = lived()
    known = len(world.core.recoverable())
    world.close()
    recovery = reopened(disk)
    assert known
    assert not live(recovery.groups)
    assert recovery.groups == world.core.recoverable() != []


def test_nothing_was_left_by_nobody() -> None:
    """The first life of a journal takes nothing over."""
    assert reopened(ModeledDisk()) == Recovery()


class Poisoned(SchedulerCore):
    """A core with a bug that one request brings out, half-way through."""

    def feed(self, item: Any) -> Outputs:
        """Raises when the request arrives, after it was taken."""
        outputs = super().feed(item)
        if isinstance(item, Arrived) and item.generate.id == "poison":
            raise RuntimeError("a bug")
        return outputs


def test_an_input_at_which_the_core_raises_is_passed_over() -> None:
    """The state before it counts, what came before it goes on, and the note names the record and the error."""
    disk, world = lived(40)
    expected = world.core.recoverable()
    world.core = Poisoned(world.core.state.config, state=world.core.state)
    request = Generate("poison", pack_i64([1, 2, 3]), Sampling())
    with pytest.raises(RuntimeError):
        world.feed(Arrived(world.now(), "front0", request, 1))
    poison = world.writer.last_sequence
    world.writer.flush()
    copy = disk.killed()
    _, found = open_journal(copy, SMALL, ID)
    recovery = recover(copy, found, Poisoned)
    assert [group.accepted.id for group in recovery.groups] == [group.accepted.id for group in expected]
    assert live(recovery.groups) == live(expected)
    assert f"record {poison}" in recovery.notes[0]
    assert "a bug" in recovery.notes[0]


def rewritten(disk: ModeledDisk, change: Any) -> ModeledDisk:
    """The same records, but one: `change` gives another payload struct for it, or None."""
    copy = ModeledDisk()
    writer, _ = open_journal(copy, JournalSettings(), ID)
    for record in read_records(disk):
        other = change(record)
        payload = record.payload if other is None else encode_record(other)
        writer.append_encoded(Kind(record.kind), payload)
    writer.close()
    return copy


def other_version(record: Any) -> Any:
    """As if another decision version had written the life."""
    return msgspec.structs.replace(record.decode(), decision_version=999) if record.kind == Kind.OPENED else None


def other_decision(record: Any) -> Any:
    """As if a step had been decided otherwise."""
    step = record.decode() if record.kind == Kind.STEPPED else None
    return msgspec.structs.replace(step, logical=bytes(16)) if step is not None and step.seq == 30 else None


@pytest.mark.parametrize("change", [other_version, other_decision])
def test_what_this_core_would_have_decided_otherwise_starts_from_its_prompt(change: Any) -> None:
    """Nothing accepted and not acknowledged is lost; no output is believed; the next life takes it."""
    disk, world = lived()
    recovery = reopened(rewritten(disk, change))
    expected = world.core.recoverable()
    assert recovery.how == "records"
    assert recovery.notes
    found = {group.accepted.first_request: group for group in recovery.groups}
    for group in expected:
        if any(choice.ended is None for choice in group.choices):
            left = found[group.accepted.first_request]
            assert (left.accepted, left.generate, left.frontend) == (group.accepted, group.generate, group.frontend)
    assert not any(choice.tokens or choice.ended for group in recovery.groups for choice in group.choices)
    assert recovery.next_request == world.core.next_request
    core = SchedulerCore(world.core.state.config)
    for part in recovery.taken_over(1, 500):
        core.feed(part)
    assert [group.accepted for group in core.recoverable()] == [group.accepted for group in recovery.groups]


def test_damage_is_refused_not_passed_over() -> None:
    """What was on disk and is damaged ends the start with the place, however much could be guessed."""
    disk, world = lived()
    _, found = open_journal(disk.killed(), SMALL, ID)
    world.writer.sync()
    name = segment_names(sorted(disk.files))[1]
    disk.files[name].data[4000] ^= 1
    with pytest.raises(JournalDamaged, match="damaged_inside"):
        recover(disk, found)


def test_reading_does_not_change_the_state() -> None:
    """Questions that a daemon asks between inputs leave no trace that replay would not have."""
    _, world = lived()
    before = core_state(world.core)
    world.core.gauges(), world.core.view(5), world.core.state_digest(), world.core.recoverable()
    for number in world.core.state.requests:
        world.core.request_view(number, 5), world.core.passed_over(number)
    assert core_state(world.core) == before
    restored = restore_core(before)
    assert core_state(restored) == before
    assert restored.state_digest() == world.core.state_digest()
    tick = Ticked(world.now())
    assert restored.feed(tick) == world.core.feed(tick)
