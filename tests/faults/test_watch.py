"""The monitor: what a fault looked like, out of looks and tokens."""

from __future__ import annotations

import itertools

from tools.faults.watch import Look, Watch


def watch(*looks: tuple[float, float, bool]) -> Watch:
    """A monitor that has seen this."""
    made = Watch("http://127.0.0.1:1")
    made.looks = [Look(*look) for look in looks]
    return made


def test_red_and_green_are_dated_by_when_they_were_known() -> None:
    """Red counts once the first answer that is not green is there, green from the look behind the last red one."""
    seen = watch(
        (9.0, 9.01, True), (10.0, 10.01, True), (10.2, 10.9, False), (11.0, 11.1, True), (11.2, 11.3, False),
        (11.5, 11.6, True), (11.7, 11.8, True),
    ).seen(10.1, 20.0, [])  # fmt: skip
    assert round(seen.red_s or 0, 3) == 0.8
    assert round(seen.green_s or 0, 3) == 1.5
    assert seen.tokens_s is None


def test_never_red_and_never_green_again() -> None:
    """What did not come is None, not zero."""
    assert watch((10.0, 10.1, True)).seen(10.0, 20.0, []).red_s is None
    still = watch((10.0, 10.1, False)).seen(10.0, 20.0, [])
    assert still.red_s is not None
    assert still.green_s is None


def test_the_longest_silence_begins_at_the_fault_at_the_earliest() -> None:
    """Tokens before the fault do not count; the time from the fault to the first token does."""
    seen = watch().seen(10.0, 20.0, [9.0, 10.5, 13.5, 13.6, 30.0])
    assert (seen.silence_s, seen.tokens_s) == (3.0, 3.5)
    early = watch().seen(10.0, 20.0, [12.0, 13.0])
    assert (early.silence_s, early.tokens_s) == (2.0, 2.0)


def test_looks_of_other_times_do_not_count() -> None:
    """A red look that ended before the fault, or began after the round, is another fault's."""
    looks = [(float(at), at + 0.1, at not in (3, 30)) for at in itertools.chain(range(9, 12), (3, 30))]
    assert watch(*sorted(looks)).seen(9.5, 20.0, []).red_s is None
