"""Micro-batches: which rows go together, so that every pipeline stage has a forward while the others compute.

Owns how many there are, which one is formed next and how rows are spread over them. Must never look at memory.
Invariants: with one stage there is one micro-batch; with S stages there are S + 1, and each has at most one forward in
flight; a row belongs to the one whose step ended its prefill until it loses the row; the partly prefilled request
belongs to none, its chunks ride in every step.

    stage 0   | m0 | m1 | m2 | m0 | m1 |       a decode row's token is known when its micro-batch is formed again,
    stage 1        | m0 | m1 | m2 | m0 |       so it is in the step; with one stage two forwards overlap on one
    reports             m0   m1   m2           micro-batch, and the newest token is still on the device

The longest idle one that has work is formed first. A new request joins the one that is formed, unless that one has its
share of all rows there will be: a burst of short prompts would fill it and leave the other stages without work.
"""

from __future__ import annotations

from collections.abc import Iterator

from daemon.core.state import CoreState, Flight


def ready(core: CoreState) -> Iterator[int]:
    """Micro-batches without a forward in flight that have something to do, the longest idle first."""
    anybody = len(core.queue) > 0 or core.resident is not None
    for seq, one in sorted(zip(core.launched, range(core.microbatches), strict=True)):
        assert seq <= core.seq, "what was launched is no newer than the newest step"
        if not core.flying[one] and (anybody or len(core.rows.decode_batch(one))):
            yield one


def launched(core: CoreState, flight: Flight) -> None:
    """The forward of the micro-batch that was formed leaves."""
    assert not core.flying[core.forming], "a micro-batch has one forward in flight"
    flight.microbatch = core.forming
    core.flying[core.forming] = True
    core.launched[core.forming] = flight.seq


def reported(core: CoreState, flight: Flight) -> None:
    """Its result came: its rows can go on, whatever the last tick found."""
    assert core.flying[flight.microbatch], "a result belongs to a forward that was launched"
    core.flying[flight.microbatch] = False
    core.blocked = False


def full(core: CoreState, new_rows: int) -> int:
    """The share of all rows that the micro-batch being formed has, if nobody may join it beside `new_rows`; else 0.

    Shares differ by one at most, and add up to all rows there will be: some micro-batch is never full.
    """
    if core.microbatches == 1:
        return 0
    rows = core.rows
    coming = rows.used_count + min(len(core.queue), rows.free_count)
    share, larger = divmod(coming, core.microbatches)
    others = sum(bound > share for one, bound in enumerate(rows.bound) if one != core.forming)
    share += others < larger
    return share if rows.bound[core.forming] + new_rows >= share else 0
