"""The step worker over real chains: digests, effects before forwards, divergence, refused steps."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from allocator.columns import i32
from allocator.errors import InvariantBroken
from allocator.physical.chain import PhysicalChain
from daemon.rank.errors import StepRefused
from daemon.rank.rows import RowTable
from ipc.digests import SAMPLED_START, sampled_digest
from tools.rank_driver import Driver, settings


def churn(driver: Driver, steps: int, seed: int) -> dict[int, list[tuple[list[int], list[int]]]]:
    """Random starts, chunks, decodes, ends and flushes; prompt and output of each ended generation, per row."""
    rng = random.Random(seed)
    ended: dict[int, list[tuple[list[int], list[int]]]] = {row: [] for row in driver.rows}
    prompts: dict[int, list[int]] = {}
    running: dict[int, int] = {}
    for _ in range(steps):
        work: list[tuple[int, list[int] | None, bool]] = []
        for row in driver.rows:
            if row not in running and rng.random() < 0.3:
                prompts[row] = [rng.randrange(40, 4000) for _ in range(rng.randint(1, 30))]
                driver.start(row)
                running[row] = 0
            elif row in running and running[row] >= len(prompts[row]) and rng.random() < 0.12:
                driver.end(row)
                ended[row].append((prompts[row], driver.rows[row].tokens[len(prompts[row]) :]))
                del running[row]
            if row in running:
                given = running[row]
                left = prompts[row][given : given + rng.randint(1, 12)]
                if left:
                    running[row] += len(left)
                    work.append((row, left, running[row] == len(prompts[row])))
                elif given:
                    work.append((row, None, True))
        if rng.random() < 0.2:
            driver.flush(rng.randint(1, 4))
        if rng.random() < 0.9:
            driver.step(work)
        elif work:
            driver.step(work)
            driver.step([])
    for row in running:
        driver.end(row)
    driver.step([])
    driver.step([])
    return ended


@pytest.mark.parametrize("seed", range(4))
def test_churn_keeps_every_sequence_whole(seed: int) -> None:
    """Pages reused, moved and zeroed under 200 steps: each ended sequence is what the same prompt gives alone."""
    driver = Driver(settings(arena_bytes=1 << 17))
    ended = churn(driver, 200, seed)
    assert sum(map(len, ended.values())) > 20
    moved = [step.seq for step in driver.steps for op in step.ops if type(op).__name__ == "Flush"]
    assert moved
    alone = Driver(settings())
    for sequences in ended.values():
        for prompt, tokens in sequences:
            assert alone.generate(0, prompt, len(tokens)) == tokens
    driver.worker.mirror.check_idle()
    driver.worker.chain.check_idle()
    assert [report.logical for report in driver.reports] == [step.logical for step in driver.steps]


def test_a_second_rank_agrees_on_every_digest() -> None:
    """Two workers fed the same steps report equal digests; a physical chain alone repeats the layout digests."""
    driver = Driver(settings())
    churn(driver, 60, 7)
    other = Driver(settings())
    chain = PhysicalChain(driver.geometry, 0)
    rows = RowTable(8, 4096)
    sampled = SAMPLED_START
    for step, report in zip(driver.steps, driver.reports, strict=True):
        mine = other.worker.finish(other.worker.launch(step))
        assert msgspec.structs.replace(mine, forward_us=0) == msgspec.structs.replace(report, forward_us=0)
        chain.begin_step(step.seq, step.processed_through)
        chain.apply(step.ops)
        assert chain.end_step() == report.layout
        if step.forward is not None:
            rows.apply(step.forward)
            chain.launched(step.seq, {driver.owner: rows.written_pages(step.forward, 4)})
        sampled = sampled_digest(sampled, step.seq, report.rows, report.generations, report.tokens)
        assert report.sampled == sampled


def test_a_different_logical_digest_is_reported() -> None:
    """The rank reports its own digest and notes the first step that differs; it does not copy the daemon's."""
    driver = Driver(settings())
    driver.start(0)
    driver.step([(0, [40, 41], True)])
    step = driver.make([(0, None, True)])
    report = driver.worker.finish(driver.worker.launch(msgspec.structs.replace(step, logical=bytes(16))))
    assert report.logical == step.logical
    assert driver.worker.diverged_at == 2


def ended_row(level: int) -> Driver:
    """A driver whose only row has ended; its free is in no step yet."""
    driver = Driver(settings(invariants=level))
    driver.generate(0, [40, 41, 42, 43, 44], 3)
    return driver


@pytest.mark.parametrize("level", [1, 2])
def test_a_unit_lost_by_the_layout_is_found_at_idle(level: int) -> None:
    """The first step with nothing live and nothing in flight recounts the layout, and says what leaked."""
    driver = ended_row(level)
    driver.step([])  # nothing is wrong: no fault
    driver = ended_row(level)
    step = driver.make([])
    forgets = driver.worker.chain.apply
    driver.worker.chain.apply = lambda ops, ends: forgets([], ends)  # type: ignore[method-assign]
    with pytest.raises(InvariantBroken, match="2 units live, 0 pending at idle"):
        driver.worker.launch(step)


def test_a_damaged_count_is_found_at_idle_only() -> None:
    """While something is live the default level does not recount; the first idle step does."""
    driver = Driver(settings(invariants=1))
    driver.start(0)
    driver.step([(0, [40, 41], True)])
    driver.worker.chain._stored[0].units.live += 1
    driver.step([(0, None, True)])
    driver.step([])
    driver.end(0)
    with pytest.raises(InvariantBroken, match="byte_conservation"):
        driver.step([])


def test_idle_is_not_checked_while_a_forward_is_in_flight() -> None:
    """Units that pend behind a forward that is not processed are no leak."""
    driver = ended_row(1)
    driver.worker.launch(driver.make([], processed=driver.newest_forward - 1))
    driver.step([])


def test_no_idle_check_at_level_0() -> None:
    """Level 0 recounts nothing."""
    driver = ended_row(0)
    forgets = driver.worker.chain.apply
    driver.worker.chain.apply = lambda ops, ends: forgets([], ends)  # type: ignore[method-assign]
    driver.step([])


def test_an_op_that_cannot_be_stops_the_rank() -> None:
    """Taking a live id breaks an invariant, loudly."""
    driver = Driver(settings())
    driver.start(0)
    driver.step([(0, [40, 41], True)])
    again = msgspec.structs.replace(driver.make([]), ops=driver.steps[0].ops)
    with pytest.raises(InvariantBroken):
        driver.worker.launch(again)


def test_the_next_step_may_be_launched_before_the_last_is_finished() -> None:
    """With a delayed device, step N+1 uses N's tokens although N was not reported yet."""
    plain, overlapped = Driver(settings()), Driver(settings(options={"delay_us": "2000"}))
    want = plain.generate(0, [50, 51, 52], 6)
    overlapped.start(0)
    flights = [overlapped.worker.launch(overlapped.make([(0, [50, 51, 52], True)]))]
    for _ in range(5):
        flights.append(overlapped.worker.launch(overlapped.make([(0, None, True)], overlapped.seq - 1)))
        overlapped.take(overlapped.worker.finish(flights.pop(0)))
    overlapped.take(overlapped.worker.finish(flights.pop(0)))
    assert overlapped.rows[0].tokens[3:] == want


def test_pages_are_zero_when_handed_out_again() -> None:
    """What an ended row left in its pages is gone before another row can read it."""
    driver = Driver(settings())
    driver.generate(0, list(range(100, 140)), 2)
    driver.step([])
    driver.step([])
    driver.start(1)
    driver.step([(1, [60], True)])
    unit = driver.worker.executor.tables[driver.owner][driver.rows[1].pages[0]]
    page = driver.runner.device.arena.units(driver.owner)[unit]  # type: ignore[attr-defined]
    assert np.count_nonzero(page[8:]) == 0
    assert np.count_nonzero(page[:8]) > 0


def test_the_sink_stays_zero() -> None:
    """No step writes the bytes below the chain."""
    driver = Driver(settings())
    churn(driver, 80, 3)
    assert not driver.runner.device.arena.data[: driver.prepared.geometry.chain_start_bytes].any()  # type: ignore[attr-defined]


REFUSED = {
    "a gap in seq": ({"seq": 9}, "came after step 2"),
    "another epoch": ({"epoch": 2}, "epoch 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_out_of_order_are_refused(name: str) -> None:
    """Seq is dense and the epoch fixed."""
    changes, text = REFUSED[name]
    driver = Driver(settings())
    driver.start(0)
    driver.step([(0, [40], True)])
    driver.step([])
    step = msgspec.structs.replace(driver.make([]), **changes)
    with pytest.raises(StepRefused, match=text):
        driver.worker.launch(step)


def test_band_counts_are_reported() -> None:
    """Live units in the report are the pages held."""
    driver = Driver(settings())
    driver.start(0)
    report = driver.step([(0, list(range(40, 50)), True)])
    assert i32(report.bands).reshape(-1, 4)[driver.owner][0] == len(driver.rows[0].pages) == 3


def test_a_row_must_have_sampled_before_it_is_carried_on() -> None:
    """A row whose input is its last sampled token, but which never sampled in this generation, is refused."""
    driver = Driver(settings())
    driver.generate(0, [40, 41], 3)
    driver.start(0)
    driver.step([(0, [40, 41], False)])
    with pytest.raises(StepRefused, match="no sampled token yet"):
        driver.step([(0, None, True)])


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    """The rank does not trust the daemon's check of token ids."""
    driver = Driver(settings())
    driver.start(0)
    with pytest.raises(StepRefused, match="token 49152 of 49152 ids"):
        driver.step([(0, [40, 49152], True)])
