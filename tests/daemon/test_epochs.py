"""Epochs: what follows a loss, in which order, and when nothing does. Ranks are a script, time is mocked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import trio

from allocator.geometry import Geometry, StageGeometry
from daemon.blame import Mark, RankLost
from daemon.core.inputs import EpochBegan
from daemon.epochs import Epochs, LastLoss
from daemon.exits import DaemonError, Exit
from daemon.metrics import Metrics
from daemon.ranks import Epoch, Loss
from daemon.restarts import Restarts
from daemon.results import Difference, DigestMismatch
from ipc.messages import ModelFacts, Step
from ipc.rank_id import RankId
from journal.records import Digested, Divergence, Readied
from tests.daemon.doubles import Event, TrioClock
from tests.daemon.test_observe import NotedLog

FACTS = ModelFacts("m", "modeled", 100, 64, "uint8")
LOST = RankLost((0, 0), "was killed by SIGKILL")


class Scripted:
    """Ranks, results and engine in one: every epoch ends as the script says, everything is noted."""

    def __init__(self, script: list[tuple[bool, DaemonError]], live: int, spawns: bool = True) -> None:
        self.script = script
        self.events: list[Event] = []
        self.ranks: tuple[RankId, ...] = ((0, 0),)
        self.spawns = spawns
        self.missing: list[RankId] = []
        self.losing = ""
        self.ending = ""
        self.reported_seq = 1
        self.mark = Mark.KILLED
        self._live = live

    def live(self) -> int:
        return self._live

    async def run(self, epoch: int, arenas: tuple[int, ...], began: Callable[[Epoch], None]) -> Loss:
        self.events.append(("run", (epoch, arenas, trio.current_time())))
        if not self.script:
            await trio.sleep_forever()
        boots, error = self.script.pop(0)
        if boots:
            geometry = Geometry(16, 4, 1, [StageGeometry(1000 + epoch, 0, [])])
            began(Epoch(epoch, geometry, FACTS, {(0, 0): {}}))
        await trio.sleep(1)
        return Loss(error, self.mark, trio.current_time())

    async def end(self, why: str) -> None:
        self.events.append(("reaped", why))

    def begin_epoch(self, began: Any, readied: list[Readied] | None = None) -> None:
        if isinstance(began, EpochBegan):
            self.events.append(("began", began.epoch))
        else:
            self.events.append(("collator", began.epoch))

    def end_epoch(self, epoch: int = 0, why: str = "", records: list[Digested | Divergence] | None = None) -> None:
        if epoch:
            self.events.append(("ended", (epoch, why, records)))
        else:
            self.events.append(("reports dropped", None))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def epochs(scripted: Scripted, most: int = 5) -> Epochs:
    world: Any = scripted
    log = NotedLog()
    return Epochs(world, world, world, Restarts(most, 600), TrioClock(), Metrics(), log, on_began=lambda epoch: None)


async def run_to_the_end(scripted: Scripted, most: int = 5) -> Epochs:
    """Until the script is over and a day has passed, or it raises."""
    made = epochs(scripted, most)
    with trio.move_on_after(86_400):
        await made.run()
    return made


async def test_what_happens_between_two_epochs(autojump_clock: trio.testing.MockClock) -> None:
    """Reports are dropped, the epoch ends in the journal, ranks are reaped, a pause, and only then new ones start."""
    scripted = Scripted([(True, LOST), (True, LOST)], live=1)
    made = await run_to_the_end(scripted)
    one = ["run", "collator", "began", "reports dropped", "ended", "reaped"]
    assert scripted.names() == [*one, *one, "run"]
    starts = [value[2] for name, value in scripted.events if name == "run"]
    assert starts == pytest.approx([0, 1.1, 2.2])
    assert (made.number, made.restarts.total) == (3, 2)
    assert "recovering: rank 0.0 was killed" in made.trouble
    assert made.status()["last_loss"] == str(LOST)


async def test_memory_is_as_large_again_unless_it_does_not_fit(autojump_clock: trio.testing.MockClock) -> None:
    """The arena of the last epoch is asked for; after a boot that failed with it ranks measure."""
    scripted = Scripted([(True, LOST), (False, LOST), (True, LOST)], live=1)
    await run_to_the_end(scripted)
    assert [value[1] for name, value in scripted.events if name == "run"] == [(), (1001,), (), (1003,)]
    assert scripted.names().count("ended") == 2, "an epoch that never began does not end"


async def test_a_first_boot_that_fails_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    """With nothing to lose it is not tried again; with requests of an earlier life, or remote ranks, it is."""
    bad = RankLost((0, 0), "failed", Exit.BOOT)
    with pytest.raises(LastLoss, match="failed") as caught:
        await run_to_the_end(Scripted([(False, bad)], live=0))
    assert caught.value.code == Exit.BOOT
    for scripted in (Scripted([(False, bad)], live=1), Scripted([(False, bad)], live=0, spawns=False)):
        made = await run_to_the_end(scripted)
        assert made.number == 2
    lost_idle = await run_to_the_end(Scripted([(True, LOST)], live=0))
    assert lost_idle.number == 2, "an idle daemon recovers too"


async def test_settings_that_a_placed_rank_cannot_use_are_a_failed_boot(autojump_clock: trio.testing.MockClock) -> None:
    """Before or after the first epoch began, but before any report: its code at once, nothing is tried again."""
    cases = ((False, Exit.BOOT, Exit.USAGE), (True, Exit.RANK, Exit.USAGE), (False, Exit.BOOT, Exit.BOOT))
    for boots, code, refused in cases:
        bad = RankLost((0, 0), "BadOption: no place to meet", code, refused)
        scripted = Scripted([(boots, bad)], live=0, spawns=False)
        scripted.mark, scripted.reported_seq = Mark.FAULT, 0
        with pytest.raises(LastLoss, match="no place to meet") as caught:
            await run_to_the_end(scripted)
        assert caught.value.code == refused
        assert scripted.names().count("run") == 1
    waits = Scripted([(False, bad)], live=1, spawns=False)
    assert (await run_to_the_end(waits)).number == 2, "requests of an earlier life are not given up for a setting"


async def test_the_last_loss_brings_its_records(autojump_clock: trio.testing.MockClock) -> None:
    """A divergence that is one too many: the record and the digests are in the error, for the journal."""
    digests = [Digested(1, 7, 0, 0, b"a" * 16, b"b" * 16, b"")]
    step = Step(1, 7, 0, 0, [], [], None, b"t" * 16)
    mismatch = DigestMismatch(step, Difference("layout", (0, 0), (0, 1), ("left", "right")), digests)
    scripted = Scripted([(True, mismatch), (True, mismatch)], live=1)
    with pytest.raises(LastLoss, match=r"layout digests differ first at step 7.*used up") as caught:
        await run_to_the_end(scripted, most=1)
    record, *rest = caught.value.records
    assert isinstance(record, Divergence)
    assert rest == digests
    ended = [value for name, value in scripted.events if name == "ended"]
    assert len(ended) == 1, "the last one is ended by the engine, without another to follow"
    assert ended[0][2][1:] == digests


async def test_a_first_epoch_that_cannot_work_is_a_failed_boot(autojump_clock: trio.testing.MockClock) -> None:
    """Ranks that were ready and raise before their first report: said at once, unless requests wait for them. A rank
    that somebody kills, or one that fails later, is no failed boot.
    """
    raised = RankLost((0, 0), "failed at step 0: RuntimeError: no group")
    for live, mark, reported, tried in ((0, Mark.FAULT, 0, 1), (1, Mark.FAULT, 0, 2), (0, Mark.KILLED, 0, 2)):
        scripted = Scripted([(True, raised)], live=live)
        scripted.mark, scripted.reported_seq = mark, reported
        if tried == 1:
            with pytest.raises(LastLoss, match="no group") as caught:
                await run_to_the_end(scripted)
            assert caught.value.code == Exit.BOOT
        else:
            assert (await run_to_the_end(scripted)).number == tried


async def test_no_epoch_follows_an_order_that_came_in_the_pause(autojump_clock: trio.testing.MockClock) -> None:
    """Between two epochs it is looked once more: no rank is started, or told to come, only to end."""
    scripted = Scripted([(True, LOST), (True, LOST)], live=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_to_the_end, scripted)
        while "reaped" not in scripted.names():
            await trio.sleep(0.01)
        scripted.ending = "stop"
    assert scripted.names().count("run") == 1
    assert trio.current_time() < 2


@pytest.mark.parametrize("ending", ["stop", "fault", "failed"])
async def test_no_epoch_follows_where_the_end_was_ordered(autojump_clock: trio.testing.MockClock, ending: str) -> None:
    """Ranks that are lost while the daemon ends are reaped, no others start, and no restart is used up."""
    scripted = Scripted([(True, LOST)], live=1)
    scripted.ending = ending
    made = await run_to_the_end(scripted)
    assert scripted.names()[-1] == "reaped"
    assert made.restarts.total == 0
    assert ("ended" in scripted.names()) == (ending == "stop")


async def test_pauses_grow_while_nothing_comes_of_it(autojump_clock: trio.testing.MockClock) -> None:
    """Boots that fail one after the other are further and further apart, up to five seconds."""
    scripted = Scripted([(True, LOST), *[(False, LOST)] * 8], live=1)
    await run_to_the_end(scripted, most=100)
    starts = [value[2] for name, value in scripted.events if name == "run"]
    pauses = [later - first - 1 for first, later in itertools.pairwise(starts)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5])
