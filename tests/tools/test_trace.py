"""bandmaster trace: a recording is equal to itself, and a planted change is named where it happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allocator.capacity import CapacityForm
from allocator.columns import i32
from allocator.effects import Zero
from allocator.free_set import FreeSet
from allocator.physical.chain import PhysicalChain
from tools import allocator_trace
from tools.pagesafety.shapes import SHAPES
from tools.tracing.rows import Call, Stage, effects_of, read


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run per shape, page size 16."""
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    assert (
        allocator_trace.main(["record", "--out", str(file), "--seeds", "3:4", "--ops", "150", "--shapes", "all"]) == 0
    )
    return file


def compare(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a comparison."""
    code = allocator_trace.main(["compare", str(file), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_same_code_decides_the_same(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every call, step and launch of a recording comes out as recorded."""
    code, report = compare(recorded, capsys)
    assert code == 0
    assert report["runs"] == len(SHAPES)
    assert report["steps"] > 100
    assert report["divergences"] == []


def test_a_recording_holds_refusals_and_all_kinds_of_decisions(recorded: Path) -> None:
    """Refusals, takes, uses, steps and launches are in it, so that a change in any of them shows."""
    rows = [row for _, row in read(recorded)]
    names = {row.name for row in rows if isinstance(row, Call)}
    assert {"refusal", "take", "free", "step_digest", "publish", "end_uses"} <= names
    assert any(isinstance(row, Call) and row.name == "refusal" and row.answer for row in rows)
    assert any(isinstance(row, Stage) and row.effects for row in rows)


def test_another_choice_of_holes_is_named_at_its_step(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the highest hole taken instead of the lowest, the first such take is named: step, band, both sides."""
    original = PhysicalChain.apply
    inside = False

    def apply(chain: PhysicalChain, ops: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return original(chain, ops)
        finally:
            inside = False

    lowest = FreeSet.take_lowest

    def highest(holes: FreeSet, k: int) -> Any:
        if not inside:
            return lowest(holes, k)  # virtual ids stay as they are
        chosen = holes.members()[-k:].copy()
        holes.remove(chosen)
        return chosen

    monkeypatch.setattr(PhysicalChain, "apply", apply)
    monkeypatch.setattr(FreeSet, "take_lowest", highest)
    code, report = compare(recorded, capsys)
    assert code == 1
    first = report["divergences"][0]
    assert first["where"] == "stage 0"
    assert first["op"].startswith("take ")
    assert first["recorded"][0] != first["present"][0]
    assert first["recorded"][0].split(" units ")[0] == first["present"][0].split(" units ")[0], "only the units differ"
    assert first["band"] in first["recorded"][0]
    assert first["state_before"]
    assert any(each["recorded_state"] != each["present_state"] for each in report["divergences"])
    # By hand: the recorded step really zeroes the units that are named.
    rows = dict(read(recorded))
    row = rows[first["line"]]
    assert isinstance(row, Stage)
    assert row.seq == first["step"]
    zeroed = [e for e in effects_of(row.effects) if isinstance(e, Zero)]
    assert any(" ".join(map(str, i32(e.units).tolist())) in first["recorded"][0] for e in zeroed)


def test_another_capacity_answer_is_named_as_the_logical_chains(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capacity form that wants a byte more than it needs is found at the first question whose answer changes."""
    original = CapacityForm.refusal

    def stingy(form: CapacityForm, live: Any, demand: Any, *rest: Any) -> Any:
        return original(form, [count + 1 for count in live], demand, *rest)

    monkeypatch.setattr(CapacityForm, "refusal", stingy)
    code, report = compare(recorded, capsys)
    assert code == 1
    first = report["divergences"][0]
    assert first["where"] == "logical chain"
    assert first["op"].startswith(("refusal(", "take(", "never_fits("))


def test_what_is_no_complete_trace_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged, cut, empty, continued or missing file ends with exit code 2 and says what it is and what to do."""
    whole = recorded.read_bytes().splitlines(keepends=True)
    files = {
        "damaged": (b'{"row":"run"}\n', "line 1"),
        "empty": (b"", "is empty"),
        "cut": (b"".join(whole[:50]), "ends after line 50"),
        "half a line": (b"".join(whole)[:-10], f"line {len(whole)}"),
        "one row missing": (b"".join([*whole[:40], *whole[41:]]), "the end row counts"),
        "twice": (b"".join(whole * 2), "more behind the end row"),
    }
    for name, (content, words) in files.items():
        file = tmp_path / name
        file.write_bytes(content)
        assert allocator_trace.main(["compare", str(file)]) == 2, name
        assert words in capsys.readouterr().err, name
    for file in (tmp_path, tmp_path / "missing"):
        assert allocator_trace.main(["compare", str(file)]) == 2
        assert "bandmaster trace record" in capsys.readouterr().err


def test_a_recording_is_there_only_once_it_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be written it says so at once; a failing program or Ctrl-C leaves the old file alone."""
    arguments = ["--seeds", "0:1", "--ops", "20", "--shapes", "full"]
    assert allocator_trace.main(["record", "--out", str(tmp_path / "no" / "file"), *arguments]) == 2
    assert "--out" in capsys.readouterr().err
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"before")
    for error, code in ((ValueError("planted"), 1), (KeyboardInterrupt(), 130)):

        def fails(*rest: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(allocator_trace, "record", fails)
        assert allocator_trace.main(["record", "--out", str(file), *arguments]) == code
        assert "nothing was recorded" in capsys.readouterr().err
    assert file.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_divergence_is_printed_with_both_sides(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text form names run, step, op, what was recorded and what is decided now."""
    monkeypatch.setattr(PhysicalChain, "launched", lambda chain, seq, writes: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        allocator_trace.main(["compare", str(recorded)])  # what is no error of the allocator is not hidden

    original = PhysicalChain.begin_step

    def late(chain: PhysicalChain, seq: int, processed: int, released: Any = ()) -> None:
        if seq == 5:
            assert processed < 0, "planted"
        original(chain, seq, processed, released)

    monkeypatch.undo()
    monkeypatch.setattr(PhysicalChain, "begin_step", late)
    assert allocator_trace.main(["compare", str(recorded)]) == 1
    text = capsys.readouterr().out
    assert "step 5" in text
    assert "planted" in text
    assert f"of {len(SHAPES)} runs differ" in text
