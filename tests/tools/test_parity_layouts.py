"""`parity --family --tp --pp`: a whole engine whose worker is a group of ranks, beside transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.rank.errors import RankError
from tools.parity import main
from tools.parity_models import Plan, run_family, tiny_family

SLICE = Plan(pairs=((16, 100),), prompt_tokens=(1, 17, 64, 255), output_tokens=6, together=5, stages=2, ranks=2)


@pytest.mark.parametrize("name", ["lara_mini", "falcon_h1"])
def test_every_round_on_two_stages_of_two_ranks_equals_transformers(tmp_path: Path, name: str) -> None:
    """Cold, moved, hit, branched, continued, cut, retracted on four ranks: equal token for token."""
    result = run_family(tiny_family(name, SLICE, tmp_path))
    wrong = [row for row in result.rows if row.verdict == "different"]
    assert not wrong, wrong[0]
    assert sum(row.verdict == "flip" for row in result.rows) <= 1
    assert result.retractions > 0
    assert sum(row.cached_tokens > 0 for row in result.rows) > 0


def test_stages_that_the_model_has_no_layers_for_are_refused(tmp_path: Path) -> None:
    """Three layers make three stages at most."""
    with pytest.raises((RankError, ValueError), match="3 layers"):
        run_family(tiny_family("llama", SLICE._replace(stages=4, ranks=1), tmp_path))


def test_layouts_belong_to_the_server_and_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere, and below one, they are refused by name."""
    for wrong in (["--tp", "0"], ["--toy", "--tp", "2"], ["--url", "http://x", "--pp", "2"]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert "--tp" in capsys.readouterr().err


def test_ranks_that_cannot_share_a_model_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Code 2 and the numbers that can, no traceback."""
    assert main(["--family", "lara_mini", "--tp", "5", "--slice"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bandmaster parity: ")]
    assert len(said) == 1
    assert "--tp 5" in said[0]
