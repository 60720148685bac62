"""The closed form of capacity against brute force, in a test's size; `tools.feasibility` does the whole set."""

from __future__ import annotations

import inspect
import json
import textwrap
from itertools import product

import numpy as np
import pytest

from allocator.capacity import Extent, StageWalk
from allocator.geometry import StageGeometry
from tools.feasibility import SWEEPS, Sweep, Tally, bands_of, main, placeable, run, sweep_geometry


@pytest.mark.slow
def test_the_closed_form_is_exact() -> None:
    """No difference on all arenas of up to 5 bytes (2 to 4 bands, fixed units, 1 and 2 stages), and on random ones."""
    report = run(exhaustive=True, random_cases=1_500, seed=5, arena_max=5)
    assert report["differences"] == 0, report
    assert report["configurations"] > 500_000
    assert len(report["sets"]) == len(SWEEPS) + 3


def test_both_brute_forces_agree() -> None:
    """The one that lists placements of all counts at once equals the one that tries spans for one vector of counts."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        sizes = tuple(int(size) for size in rng.integers(1, 4, size=3))
        arena = int(rng.integers(6, 14))
        stage = StageGeometry(arena, 0, bands_of(sizes))

        class Asker(StageWalk):
            """Answers by the other brute force."""

            __slots__ = ("fixed",)

            def __init__(self, stage: StageGeometry, extents: list[Extent]) -> None:
                super().__init__(stage, extents)
                self.fixed = extents

        tally = Tally("agreement")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tools.feasibility.StageWalk", Asker)
            patch.setattr(
                Asker,
                "overlap_bytes",
                lambda self, counts, stage=stage: 0 if placeable(stage, self.fixed, counts) else 1,
            )
            sweep_geometry(tally, Sweep(3, arena, (0,), sizes, 1), sizes, arena, 0)
        assert tally.configurations > 20
        assert tally.differences == 0, tally.first


MISTAKES = {
    "a fixed unit above the walk is forgotten": ("end < high", "end < 0"),
    "a band may start above its lowest fixed byte": ("begin * unit > low", "begin * unit > high"),
    "the last band ignores its lowest fixed byte": ("begin < self.last_low", "True"),
    "starts are not aligned": ("(-(-end // unit) + units) * unit", "end + units * unit"),
    "an empty band still aligns": ("elif units:", "else:"),
    "the end of the arena is not aligned": (
        "(self.last_top - units) * self.last_unit_bytes",
        "self.arena_bytes - units",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_closed_form_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small change of the walk gives differences in a small part of the sets."""
    right, wrong = MISTAKES[mistake]
    source = textwrap.dedent(inspect.getsource(StageWalk.overlap_bytes))
    assert right in source
    scope: dict[str, object] = {"Sequence": list}
    exec("from __future__ import annotations\n" + source.replace(right, wrong), scope)
    monkeypatch.setattr(StageWalk, "overlap_bytes", scope["overlap_bytes"])
    tally = Tally(mistake)
    for sizes in product((1, 2, 3), repeat=3):
        sweep_geometry(tally, Sweep(3, 5, (0,), (1, 2, 3), -1), sizes, 5, 0)
    assert tally.differences > 0


def test_the_command_reports_and_fails_on_a_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON on stdout, exit code 0; 1 where the two differ, with the first difference in words."""
    assert main(["--no-exhaustive", "--random", "50", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["configurations"] == 50
    assert report["differences"] == 0
    monkeypatch.setattr(StageWalk, "overlap_bytes", lambda self, counts: 0)
    assert main(["--no-exhaustive", "--random", "50"]) == 1
    assert "closed form True, brute force False" in capsys.readouterr().out.replace("\n", " ")
