"""A slice of the model matrix: every family on a whole engine, cached, retracted and moved, beside `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.parity_models import Plan, run_family, tiny_family
from tools.tiny_models import HYBRID

SLICE = Plan(pairs=((16, 100),), prompt_tokens=(1, 17, 64, 255, 700), output_tokens=6, together=6)
FULL_ONLY = ("llama", "qwen3_moe")
ONE_BAND = ("mistral-window", *FULL_ONLY)  # nothing moves aside for anything


@pytest.mark.parametrize("name", [*HYBRID, *FULL_ONLY])
def test_every_round_of_an_engine_equals_transformers(tmp_path: Path, name: str) -> None:
    """Cold, moved, hit, branched, continued, cut, retracted: equal token for token, but for ties that are listed."""
    result = run_family(tiny_family(name, SLICE, tmp_path))
    wrong = [row for row in result.rows if row.verdict == "different"]
    assert not wrong, wrong[0]
    assert sum(row.verdict == "flip" for row in result.rows) <= 1
    rounds: dict[str, int] = {}
    for row in result.rows:
        rounds[row.round] = rounds.get(row.round, 0) + (row.cached_tokens > 0)
    assert {"cold", "moves", "hit", "branch", "turn", "retract"} <= set(rounds)
    assert rounds["cold"] == 0
    assert min(rounds["hit"], rounds["turn"]) > 0, rounds
    assert result.retractions > 0
    assert (result.relief_moves > 0) is (name not in ONE_BAND)
