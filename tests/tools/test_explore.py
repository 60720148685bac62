"""bandmaster explore: small depths are clean, names of ids do not count, and planted faults are found."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from allocator.errors import AllocatorError
from allocator.geometry import BandGeometry, StageGeometry
from allocator.logical.freeze import Freeze
from allocator.logical.uses import Uses
from allocator.physical.band import Band
from allocator.physical.ledger import StageLedger
from allocator.physical.relief import Relief
from tools import explore as command
from tools.pagesafety.mutants import applied
from tools.smallscope.canon import KNOWN, canonical_form, canonical_hash
from tools.smallscope.checks import Moved, check
from tools.smallscope.copies import clone
from tools.smallscope.device import SymbolFault
from tools.smallscope.exact import ExactStage
from tools.smallscope.search import Walk, explore, replay
from tools.smallscope.step import perform
from tools.smallscope.words import cause_of, grouped
from tools.smallscope.workers import Job, Progress, WorkerLost, explore_all
from tools.smallscope.world import SHAPES, Limits, Shape, State, World

STATE_FULL, THREE = SHAPES[2][2], SHAPES[3][0]


def walk(shape: Shape, depth: int, ops: str = "all", units: int = 3, findings: int = 1) -> Walk:
    """The search of one world in this process."""
    return explore(shape, Limits(units), depth, command.OP_SETS[ops], findings, lambda *progress: None)


@pytest.mark.parametrize("shape", [*SHAPES[2], *SHAPES[3]], ids=lambda shape: shape.name)
def test_every_sequence_of_two_actions_is_clean(shape: Shape) -> None:
    """No finding, and no relief moves more than the exact least, over every shape and every kind of action."""
    seen = walk(shape, 2)
    assert seen.findings == []
    assert seen.max_ratio == 1.0
    assert seen.states > 50
    assert seen.by_depth[0] == 1
    assert sum(seen.by_depth) == seen.states


@pytest.mark.parametrize(("shape", "least"), [(STATE_FULL, 900), (THREE, 2000)], ids=["two bands", "three bands"])
def test_every_sequence_of_three_actions_is_clean(shape: Shape, least: int) -> None:
    """One action deeper, on two shapes."""
    seen = walk(shape, 3)
    assert seen.findings == []
    assert seen.states > least
    assert seen.moved_bytes == seen.least_bytes > 0


def test_without_forwards_all_states_of_a_world_are_reached() -> None:
    """Takes, frees, retirements and flushes close on themselves: what was seen is all there is."""
    seen = walk(SHAPES[2][0], 30, "memory")
    assert seen.closed
    assert seen.findings == []
    assert seen.reliefs > 0
    assert seen.by_depth[-1] == 0
    deeper = walk(SHAPES[2][0], 60, "memory")
    assert deeper.states == seen.states


@pytest.mark.parametrize(("units", "least"), [(1, 40), (2, 500)])
def test_with_forwards_all_states_of_one_band_are_reached(units: int, least: int) -> None:
    """Two forwards in flight, frees under them, flushes: every history of any length over one or two pages."""
    seen = walk(SHAPES[1][0], 60, "forwards", units)
    assert seen.closed
    assert seen.findings == []
    assert seen.states > least


def successors(state: State) -> set[bytes]:
    """The forms of all next states."""
    out = set()
    for action in state.actions():
        after = state.copy()
        perform(after, action, Moved())
        out.add(canonical_hash(after))
    return out


def test_states_of_one_form_have_the_same_future() -> None:
    """What the form leaves out decides nothing: two states with one form lead to the same forms, however reached."""
    first: dict[bytes, set[bytes]] = {}
    layer = [State(World(THREE, Limits(2)))]
    again = 0
    for _ in range(2):
        found = []
        for state in layer:
            for action in state.actions():
                after = state.copy()
                perform(after, action, Moved())
                form = canonical_hash(after)
                if form not in first:
                    first[form] = successors(after)
                    found.append(after)
                elif again < 60:
                    again += 1
                    assert successors(after) == first[form]
        layer = found
    assert again > 20


def test_renamed_pages_are_one_state() -> None:
    """The order in which equal layouts were reached does not count: ids are names only."""
    one, two = (State(World(SHAPES[2][1], Limits(3))) for _ in range(2))
    for state, kept in ((one, 1), (two, 2)):
        for text in ("take[(0, 1), ((), ())]", "take[(0, 1), ((), ())]"):
            perform(state, next(a for a in state.actions() if a.text() == text), Moved())
        perform(state, next(a for a in state.actions() if a.text() == f"free[{3 - kept}]"), Moved())
        perform(state, next(a for a in state.actions() if a.text() == "flush[8]"), Moved())
    assert list(one.pages) != list(two.pages)
    assert canonical_form(one) == canonical_form(two)


def test_a_copy_goes_on_by_itself() -> None:
    """Nothing that happens to a copy shows in the original, and both go on alike."""
    state = State(World(THREE, Limits(3)))
    for text in ("take[(1, 1, 1), ((), (), ())]", "launch['all']", "backup[((1, 1), (2, 1))]"):
        perform(state, next(a for a in state.actions() if a.text() == text), Moved())
    before, digest = canonical_form(state), state.logical.state_digest()
    for action in state.actions():
        copies = [state.copy(), state.copy()]
        for copy in copies:
            perform(copy, action, Moved())
        assert canonical_form(copies[0]) == canonical_form(copies[1])
        assert canonical_form(state) == before
        assert state.logical.state_digest() == digest
    check(state)


def test_copies_keep_shared_memory_shared() -> None:
    """A view and its array are a view and its array in the copy; a bound method belongs to the copied object."""
    whole = np.arange(6, dtype=np.int32)
    both = clone([whole, whole[2:4], whole.reshape(2, 3)])
    both[1][0] = 77
    assert both[0].tolist() == [0, 1, 77, 3, 4, 5]
    assert both[2].tolist() == [[0, 1, 77], [3, 4, 5]]
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    state = State(World(STATE_FULL, Limits(2)))
    chain = clone(state.chains[0])
    band = chain._stored[0]
    assert band._stage_wait.__self__ is chain
    assert band._steps is chain._steps is not state.chains[0]._steps


def test_a_field_that_the_form_does_not_know_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with a field that nobody explained is refused, instead of merging states that differ."""
    state = State(World(STATE_FULL, Limits(2)))
    kind = type(state.chains[0]._steps)
    monkeypatch.setitem(KNOWN, kind, KNOWN[kind].replace("waited_through", ""))
    monkeypatch.setattr("tools.smallscope.canon._checked", set())
    with pytest.raises(TypeError, match="waited_through"):
        canonical_form(state)


def stage(*sizes: int, arena: int, start: int) -> StageGeometry:
    """A stage of bands with these unit bytes."""
    kinds = ("state", "window", "full")[-len(sizes) :]
    bands = [BandGeometry(kind, kind, size) for kind, size in zip(kinds, sizes, strict=True)]  # type: ignore[arg-type]
    return StageGeometry(arena, start, bands)


def test_the_yardstick_by_hand() -> None:
    """Layouts and least moves of an arena that fits in the head: bytes 4 to 12, units of 2 (up) and 3 (down)."""
    exact = ExactStage(stage(2, 3, arena=12, start=4))
    none = (None, None)
    assert exact.fits((4, 0), none)
    assert exact.fits((2, 1), none)
    assert not exact.fits((3, 1), none)  # bytes 4..10 and 9..12
    assert exact.fits((0, 2), none)
    assert not exact.fits((2, 1), (None, (6, 9)))
    # Units 2 and 4 of the first band (bytes 4..6, 8..10) are live: one unit of 3 bytes at 9 needs unit 4 to move.
    assert exact.least_bytes((2, 1), none, (1 << 2 | 1 << 4, 0)) == 2
    assert exact.least_bytes((2, 0), none, (1 << 2 | 1 << 4, 0)) == 0
    assert exact.least_bytes((2, 1), ((8, 10), None), (1 << 2 | 1 << 4, 0)) is None


@pytest.mark.parametrize(
    ("mutant", "shape", "depth", "names"),
    [
        ("skip_zeroing", SHAPES[2][0], 1, {"lost_write"}),
        ("skip_forward_wait", SHAPES[2][0], 4, {"unordered_overlap"}),
        ("launch_without_waits", SHAPES[2][2], 4, {"unordered_overlap"}),
        ("publish_before_forward_ends", SHAPES[2][0], 3, {"unordered_overlap"}),
        ("capacity_one_unit_too_many", SHAPES[2][0], 2, {"wrong_refusal"}),
    ],
)
def test_planted_faults_are_found(mutant: str, shape: Shape, depth: int, names: set[str]) -> None:
    """Deliberate faults of the page-safety harness are found here too, each by a sequence that replays."""
    with applied(mutant):
        seen = walk(shape, depth)
        assert {finding.name for finding in seen.findings} <= names
        found = seen.findings[0]
        assert len(found.actions) <= depth
        with pytest.raises((SymbolFault, AllocatorError), match=found.name):
            list(replay(shape, Limits(3), found.actions))
    assert len(list(replay(shape, Limits(3), found.actions))) == len(found.actions), "without the fault it is clean"


def test_a_relief_that_moves_too_much_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that pays more than the exact least is told from one that does not."""
    original = Relief._search

    def wasteful(relief: Relief, wanted: Any, keep_transfers: bool) -> Any:
        """The layout for one unit more of the last band, where there is one."""
        more = original(relief, [*wanted[:-1], wanted[-1] + 1], keep_transfers)
        return more or original(relief, wanted, keep_transfers)

    monkeypatch.setattr(Relief, "_search", wasteful)
    seen = walk(THREE, 4, "memory", findings=50)
    assert "too_many_moves" in {finding.name for finding in seen.findings}
    assert seen.max_ratio > 1


def test_the_command_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is one object with the totals and a row per world; exit code 0 without findings."""
    assert command.main(["--bands", "2", "--shape", "1,1", "--depth", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["states"] == sum(world["states"] for world in report["worlds"]) > 50
    assert report["findings"] == []
    assert report["max_ratio"] == 1.0
    assert report["unrealizable"] == 0
    assert command.main(["--shape", "no such shape"]) == 2


def test_options_out_of_range_name_option_value_and_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Each bad number is refused with its option, its value and what is allowed."""
    for option, value in (("--depth", "0"), ("--depth", "-1"), ("--units", "-2"), ("--jobs", "0"), ("--uses", "-1")):
        with pytest.raises(SystemExit) as ended:
            command.main([option, value])
        assert ended.value.code == 2
        text = capsys.readouterr().err
        assert f"{option} {value}: it must be at least" in text


def test_a_lost_process_is_named_and_leaves_none_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """A killed worker ends the command with exit code 3 and one sentence; the other workers end too."""
    jobs = [Job(shape, Limits(3), 6, None, 1) for shape in SHAPES[2][:2]]

    def kill_one(number: int, progress: Progress) -> None:
        multiprocessing.active_children()[0].kill()

    with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
        explore_all(jobs, 2, kill_one, lambda number, walk: None)
    assert multiprocessing.active_children() == []


def test_findings_of_one_cause_are_one_in_words() -> None:
    """Numbers do not make a cause; the shortest case is shown, in words, with how often it was met."""
    with applied("launch_without_waits"):
        seen = [asdict(each) for each in walk(STATE_FULL, 4, findings=3).findings]
    shown = grouped(seen)
    assert len({cause_of(each["name"], each["detail"]) for each in shown}) == len(shown)
    first = shown[0]
    assert first["count"] > 1
    assert first["words"] == [
        "take 1 page of full",
        "back up page 1 to the host",
        "launch a forward that writes all it may write",
    ]
    assert len(first["words"]) == len(first["actions"])


def test_two_uses_of_one_unit_are_explored() -> None:
    """With two uses at a time every pair begins on one unit, and the second keeps what the end of the first frees."""
    seen = explore(SHAPES[2][0], Limits(1, 2), 5, None, 1, lambda *progress: None)
    assert seen.findings == []
    assert seen.states > 1000


def test_a_unit_that_another_use_still_touches_stays_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the end of one use frees units that a second one still touches. Two uses at a time find it."""
    original = Band.use_over

    def careless(band: Band, use: Any) -> None:
        touched = band.ledger.touched
        band.ledger = _Blind(band.ledger)  # type: ignore[assignment]
        try:
            original(band, use)
        finally:
            band.ledger = band.ledger.inner  # type: ignore[attr-defined]
        assert touched is not None

    monkeypatch.setattr(Band, "use_over", careless)
    seen = explore(SHAPES[2][0], Limits(1, 2), 6, None, 1, lambda *progress: None)
    assert {finding.name for finding in seen.findings} <= {"unordered_overlap", "chain.byte_conservation"}
    assert seen.findings


class _Blind:
    """A ledger that sees nothing touched."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def touched(self, positions: Any) -> None:
        """Nothing."""
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Uses, "check_readable", lambda uses, columns, what: None),
        (Freeze, "begin", lambda freeze, use, counts: None),
        (StageLedger, "fix", lambda ledger, number: None),
    ],
    ids=["reads of received units", "no freeze", "a fix that is forgotten"],
)
def test_faults_of_transfers_are_found(owner: type, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what keeps received units unread, bands frozen, and stuck sends in place is left out."""
    monkeypatch.setattr(owner, name, value)
    assert walk(STATE_FULL, 4).findings


def test_feasibility_is_part_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`explore --feasibility` compares the closed form with brute force and reports no difference."""
    arguments = ["--feasibility", "--no-exhaustive", "--random", "200", "--json"]
    assert command.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["differences"] == 0
    assert report["configurations"] >= 200
