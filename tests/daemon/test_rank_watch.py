"""Rank watch: who is silent, stopped or behind, at which time, and who is forgiven."""

from __future__ import annotations

from daemon.blame import Mark, judge
from daemon.exits import Exit
from daemon.rank_watch import BOOT_SILENCE_S, SILENT_S, RankWatch
from daemon.settings_table import Settings
from ipc.messages import Fault, ModelFacts, Ready
from ipc.rank_id import RankId

RANKS = ((0, 0), (0, 1), (1, 0))


def watch(ready: bool = True) -> RankWatch:
    """Ranks heard at 0, with the timeouts 10 s for silence and 300 s for a step."""
    made = RankWatch(Settings(), 3, RANKS)
    made.heard = dict.fromkeys(RANKS, 0.0)
    facts = ModelFacts("m", "modeled", 100, 64, "uint8")
    for stage, rank in RANKS if ready else RANKS[:2]:
        made.note_ready((stage, rank), Ready(stage, rank, None, 4, 1, facts))  # type: ignore[arg-type]
    return made


def marks(made: RankWatch) -> list[tuple[Mark, RankId]]:
    return [(sign.mark, sign.error.rank) for sign in made.signs]  # type: ignore[attr-defined]


async def test_silence_is_found_at_its_time() -> None:
    """Just within the timeout nobody is, beyond it exactly those that were not heard."""
    made = watch()
    made.heard[0, 0] = made.heard[1, 0] = 5.0
    made.check(10.0, ())
    assert marks(made) == []
    made.check(10.1, ())
    assert marks(made) == [(Mark.SILENT, (0, 1))]
    assert "10.1 s (--rank-timeout 10)" in made.losing
    assert made.signs[0].error.code == Exit.RANK


async def test_a_rank_that_loads_may_be_silent_but_not_stopped() -> None:
    """While not all are ready: a minute of silence, but no more than the timeout in the state "stopped"."""
    made = watch(ready=False)
    made.check(BOOT_SILENCE_S, ())
    assert marks(made) == []
    made.check(20.0, [(1, 0)])
    made.check(25.0, [])  # it ran again: the time starts afresh
    made.check(28.0, [(1, 0)])
    made.check(38.0, [(1, 0)])
    assert marks(made) == []
    made.check(38.1, [(1, 0)])
    assert marks(made) == [(Mark.SILENT, (1, 0))]
    assert made.signs[0].error.code == Exit.BOOT


async def test_a_step_that_is_overdue_names_everybody_behind() -> None:
    """The oldest step that not all have reported counts; ranks that reported it are not named."""
    made = watch()
    for seq in (1, 2):
        made.note_sent(seq, float(seq))
    for rank in RANKS:
        made.note_report(rank, 1)
    made.note_report((0, 1), 2)
    for now in (301.9, 302.1):
        made.heard = dict.fromkeys(RANKS, now)
        made.check(now, ())
    assert marks(made) == [(Mark.LATE, (0, 0))]
    assert made.losing == "rank 0.0 did not report step 2 within --step-timeout 300 s (nor did 1.0)"


async def test_nobody_is_blamed_for_our_own_sleep() -> None:
    """After `forgive` silence, steps and stops are counted from that moment."""
    made = watch()
    made.note_sent(1, 0.0)
    made.forgive(1000.0)
    made.check(1009.0, ())
    assert marks(made) == []
    made.check(1010.5, ())
    assert [mark for mark, _ in marks(made)] == [Mark.SILENT] * 3


async def test_a_rank_that_cannot_do_what_it_was_told_refuses() -> None:
    """A wrong setting is told from a death by the error that it names."""
    cases = (("BadOption: rendezvous", Exit.USAGE), ("UnsupportedModel: x", Exit.BOOT), ("RuntimeError: y", None))
    for what, refused in cases:
        made = watch()
        made.fault((0, 1), Fault(0, 1, 0, what, ""))
        assert judge(made.signs).error.refused is refused  # type: ignore[attr-defined]


async def test_of_ranks_that_fail_together_the_silent_one_is_to_blame() -> None:
    """Two say that a peer is gone; the third said nothing for three heartbeats and is frozen."""
    made = watch()
    made.heard[0, 0] = made.heard[0, 1] = 5.0
    for rank in range(2):
        made.fault((0, rank), Fault(0, rank, 9, "GroupBroken: rank 1.0 is late", ""))
    made.check_among_failing(SILENT_S + 0.5, RANKS)
    assert judge(made.signs).error.rank == (1, 0)  # type: ignore[attr-defined]
    assert made.over.is_set()
