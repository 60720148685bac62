"""Results: skewed ranks give one report per step, in order; whatever differs is named and stops there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import trio

from allocator.columns import pack_i32, pack_i64
from daemon.core.inputs import Reported
from daemon.exits import Exit
from daemon.mailbox import BandCounts, BecameIdle, Collated, StepSent
from daemon.results import Collator, DigestMismatch, ReportRefused, ResultProcessor
from ipc.digests import SAMPLED_START, sampled_digest
from ipc.messages import Report, Step
from tests.daemon.doubles import TrioClock

RANKS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def digest(*parts: Any) -> bytes:
    return repr(parts).encode().ljust(16, b"_")[:16]


def step(seq: int) -> Step:
    return Step(1, seq, 0, 0, [], [], None, digest("logical", seq))


def reports_of(steps: int) -> list[list[Report]]:
    """Per step the reports of all ranks: layouts equal within a stage, tokens and their digest from the last stage."""
    sampled, made = SAMPLED_START, []
    for seq in range(1, steps + 1):
        rows, generations, tokens = pack_i32([seq, seq + 1]), pack_i32([1, 1]), pack_i64([seq * 10, seq * 10 + 1])
        sampled = sampled_digest(sampled, seq, rows, generations, tokens)
        made.append(
            [
                Report(
                    1, seq, stage, rank,
                    *((rows, generations, tokens) if stage == 1 else (b"", b"", b"")),
                    digest("logical", seq), digest("layout", stage, seq), sampled if stage == 1 else b"",
                    [], seq * 100 + rank, pack_i32([stage + 1, 2, 3, 4]),
                )
                for stage, rank in RANKS
            ]
        )  # fmt: skip
    return made


def collator(steps: int) -> Collator:
    made = Collator(1, RANKS)
    for seq in range(1, steps + 1):
        made.expect(step(seq))
    return made


def add_all(made: Collator, reports: Iterable[Report], done: list[Collated]) -> None:
    for report in reports:
        done += made.add(report, 9)


def test_every_interleaving_of_two_steps() -> None:
    """However far ranks drift apart, steps come out once, whole and in order."""
    reports = reports_of(2)
    tried = 0
    for order in itertools.permutations(range(8)):
        sequence = [reports[index // 4][index % 4] for index in order]
        if any(order.index(rank) > order.index(rank + 4) for rank in range(4)):
            continue  # a rank reports its own steps in order
        tried += 1
        made = collator(2)
        done = [collated for report in sequence for collated in made.add(report, 9)]
        assert [collated.reported.seq for collated in done] == [1, 2]
        assert [len(collated.digests) for collated in done] == [4, 4]
    assert tried == 2520


def test_what_the_core_is_told() -> None:
    """The tokens are the last stage's, bands are told by stage, the time is the slowest rank's."""
    made = collator(1)
    done = [collated for report in reports_of(1)[0] for collated in made.add(report, 9)]
    assert done[0].reported == Reported(9, 1, 1, pack_i32([1, 2]), pack_i32([1, 1]), pack_i64([10, 11]), [])
    assert done[0].bands == [[(1, 2, 3, 4)], [(2, 2, 3, 4)]]
    assert done[0].forward_us == 101
    assert [(entry.stage, entry.rank) for entry in done[0].digests] == RANKS


@pytest.mark.parametrize(
    ("index", "field"), [*itertools.product(range(4), ["logical", "layout"]), (2, "sampled"), (3, "sampled")]
)
def test_R_a_differing_digest_stops_at_its_step(index: int, field: str) -> None:
    """One digest of one rank differs at step 2: step 1 comes out, step 2 never, and both sides are named."""
    reports = reports_of(3)
    bad = reports[1][index]
    reports[1][index] = msgspec.structs.replace(bad, **{field: b"!" * 16})
    done: list[Collated] = []
    with pytest.raises(DigestMismatch, match=f"{field} digests differ at step 2") as caught:
        add_all(collator(3), itertools.chain(*reports), done)
    assert [collated.reported.seq for collated in done] == [1]
    assert caught.value.step.seq == 2
    assert caught.value.code == Exit.RANK
    assert len(caught.value.digests) == 4
    other = {"logical": "the daemon", "layout": f"rank {bad.stage}.", "sampled": "the tokens told by rank 1.0"}[field]
    assert other in str(caught.value)
    assert (b"!" * 16).hex() in str(caught.value)


def test_tokens_that_were_not_sampled_are_found() -> None:
    """Tokens altered on the way, with the digest as sampled, differ: the digest is over what the core is told."""
    reports = reports_of(1)[0]
    reports[2] = msgspec.structs.replace(reports[2], tokens=pack_i64([10, 12]))
    with pytest.raises(DigestMismatch, match="sampled"):
        add_all(collator(1), reports, [])


@pytest.mark.parametrize(
    ("change", "what"),
    [({"seq": 7}, "never sent"), ({"rank": 5}, "no such rank"), ({}, "a second time")],
)
def test_impossible_reports_are_refused(change: dict[str, int], what: str) -> None:
    """A step never sent, a rank that does not take part, a second report: each is refused by rank and step."""
    made = collator(1)
    first = reports_of(1)[0][0]
    made.add(first, 9)
    with pytest.raises(ReportRefused, match=what):
        made.add(msgspec.structs.replace(first, **change), 9)


def test_another_epoch_is_dropped() -> None:
    """A report of an old epoch changes nothing."""
    made = collator(1)
    assert made.add(msgspec.structs.replace(reports_of(1)[0][0], epoch=0), 9) == []
    done = [collated for report in reports_of(1)[0] for collated in made.add(report, 9)]
    assert len(done) == 1


async def test_the_actor_forwards_in_order_under_skew() -> None:
    """50 steps of four ranks, each at its own pace: the engine gets 50 steps in order, with hints beside."""
    rng = random.Random(5)
    queues = [list(rank) for rank in zip(*reports_of(50), strict=True)]
    reports_in, reports = trio.open_memory_channel[Report](1000)
    got: list[int] = []
    to_hints, hints = trio.open_memory_channel[StepSent | BecameIdle | BandCounts](4)
    processor = ResultProcessor(
        TrioClock(), reports, lambda item: got.append(item.reported.seq), to_hints, accuse=lambda error: None
    )
    processor.begin_epoch(collator(50))
    while any(queues):
        await reports_in.send(rng.choice([queue for queue in queues if queue]).pop(0))
    reports_in.close()
    await processor.run()
    assert got == list(range(1, 51))
    assert hints.statistics().current_buffer_used == 4, "hints beyond the mailbox are dropped, steps are not"
