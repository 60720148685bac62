"""Journal actor: acceptances get their sync at once, quiet writes within a second, failures stop admission."""

from __future__ import annotations

from collections.abc import Callable

import structlog
import structlog.testing
import trio

from daemon.core.inputs import Input, JournalDegraded, Ticked
from daemon.journal_actor import JournalActor
from journal.storage import Storage
from journal.writer import JournalSettings, JournalWriter
from tests.daemon.doubles import TrioClock, writer_on
from tests.journal.modeled_disk import ModeledDisk


class Door:
    """The gateway's side: notes when what became durable."""

    def __init__(self) -> None:
        self.through: list[tuple[float, int]] = []

    def durable(self, synced_through: int) -> None:
        self.through.append((trio.current_time(), synced_through))


async def here(work: Callable[[], object]) -> object:
    """The worker thread, in this task: a mocked clock does not wait for threads."""
    await trio.lowlevel.checkpoint()
    return work()


class Scene:
    """An actor over a modeled disk."""

    def __init__(self, disk: Storage, policy: str = "group") -> None:
        self.writer: JournalWriter = writer_on(disk, JournalSettings(policy))  # type: ignore[arg-type]
        self.writer.sync()
        self.door = Door()
        self.syncs: list[float] = []
        to_engine, self.mailbox = trio.open_memory_channel[Input](16)
        log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])
        self.actor = JournalActor(self.writer, to_engine, self.door, TrioClock(), log, self.syncs.append, here)

    def write(self, urgent: bool) -> int:
        sequence = self.writer.append(Ticked(1))
        self.writer.flush()
        self.actor.written(urgent)
        return sequence


async def test_an_acceptance_is_synced_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """No time passes between the write of an acceptance and its durability."""
    scene = Scene(ModeledDisk())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.actor.run)
        await trio.sleep(5)
        sequence = scene.write(urgent=True)
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    assert [through for _, through in scene.door.through] == [sequence]
    assert scene.door.through[0][0] < 5.1
    assert len(scene.syncs) == 1


async def test_what_nobody_waits_for_is_synced_within_a_second(autojump_clock: trio.testing.MockClock) -> None:
    """Many quiet writes share one sync, a second after the first; then the actor sleeps without syncing again."""
    scene = Scene(ModeledDisk())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.actor.run)
        await trio.sleep(5)
        last = [scene.write(urgent=False) for _ in range(10)][-1]
        await trio.sleep(600)
        nursery.cancel_scope.cancel()
    assert [through for _, through in scene.door.through] == [last]
    assert 5.9 < scene.door.through[0][0] < 6.5


async def test_policy_os_needs_no_sync() -> None:
    """With policy `os` what is written may be acknowledged at once."""
    scene = Scene(ModeledDisk(), "os")
    sequence = scene.write(urgent=True)
    assert scene.door.through[-1][1] == sequence


async def test_policy_os_at_idle_does_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """What the policy leaves to the system is no sync in the metrics, and nobody wakes for it; much of it is synced."""
    scene = Scene(ModeledDisk(), "os")
    woken: list[float] = []

    class Wakes(trio.abc.Instrument):
        def after_io_wait(self, timeout: float) -> None:
            woken.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.actor.run)
        scene.write(urgent=False)
        await trio.sleep(5)
        trio.lowlevel.add_instrument(Wakes())
        await trio.sleep(600)
        assert scene.syncs == []
        assert [at for at in woken if 6 < at < 604] == [], "a timer"
        scene.writer._settings = JournalSettings("os", os_sync_bytes=1)
        scene.write(urgent=False)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert len(scene.syncs) == 1
    assert scene.writer.unsynced_bytes == 0


async def test_a_disk_that_fails_stops_admission_until_it_works(autojump_clock: trio.testing.MockClock) -> None:
    """When neither fsync nor a new segment works the core is told once; when it works again the core is told again."""
    disk = ModeledDisk()
    scene = Scene(disk)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.actor.run)
        sequence = scene.write(urgent=True)
        disk.fail_at, disk.forever = disk.operations + 1, True
        await trio.sleep(4.5)
        first = scene.mailbox.receive_nowait()
        assert isinstance(first, JournalDegraded)
        assert not first.durable
        assert scene.mailbox.statistics().current_buffer_used == 0, "told once, not with every try"
        assert scene.door.through == []
        assert scene.writer.degraded
        disk.fail_at = 0
        await trio.sleep(2)
        second = scene.mailbox.receive_nowait()
        assert isinstance(second, JournalDegraded)
        assert second.durable
        assert scene.door.through[-1][1] == sequence, "what waited was written again and is durable"
        nursery.cancel_scope.cancel()


async def test_a_disk_that_failed_is_told_of_though_nothing_was_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A write and an fsync that a new segment made good: one warning each, with the error's own words, and a count."""
    for failing in (1, 2):
        disk = ModeledDisk()
        scene = Scene(disk)
        log = structlog.testing.CapturingLogger()
        scene.actor._log = log
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.actor.run)
            await trio.sleep(5)
            disk.fail_at = disk.operations + failing  # the write, or the fsync behind it
            sequence = scene.write(urgent=True)
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
        assert scene.writer.synced_through == sequence
        assert scene.actor.repairs == 1
        (call,) = [call for call in log.calls if call.args == ("SegmentReplaced",)]
        assert "modeled failure" in call.kwargs["error"]
