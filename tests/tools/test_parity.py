"""The judgement of parity: equal, a listed tie, or a difference that fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tools.own_server import OwnServer, ServerFailed
from tools.parity import main
from tools.parity_judge import judge, trimmed
from tools.parity_prompts import CASES

EOS = 2
THEIRS = [10, 11, 12, EOS]


class FixedReference:
    """A reference whose best logit beats the chosen token by given margins."""

    def __init__(self, margins: Sequence[float]) -> None:
        self.eos_ids = [EOS]
        self._margins = list(margins)
        self.end_margin = 0.0

    def margins(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """The margins given, one per output token; `end_margin` of an end token that stands behind them."""
        if len(output) == len(self._margins) + 1 and output[-1] == EOS:
            return [*self._margins, self.end_margin]
        assert len(self._margins) == len(output)
        return self._margins


@pytest.mark.parametrize(
    ("ours", "margins", "verdict"),
    [
        ([10, 11, 12, EOS], [], "equal"),
        ([10, 11, 12], [], "equal"),
        ([10, 99, 98], [0.0, 5e-5, 0.0], "flip"),
        ([10, 99, 98], [0.0, 2e-4, 0.0], "different"),
        ([10, 99, 98], [0.0, 5e-5, 0.5], "different"),
        ([], [], "different"),
        ([10, 11], [0.0, 0.0], "different"),
    ],
)
def test_each_judgement(ours: list[int], margins: list[float], verdict: str) -> None:
    """Ties up to the limit are flips and are listed; everything beyond, and a short output, is a difference."""
    judged = judge(
        FixedReference(margins),  # type: ignore[arg-type]
        [1],
        ours,
        THEIRS,
        1e-4,
        limit=3,
        finish_reason="length",
    )
    assert judged.verdict == verdict
    if verdict == "flip":
        assert judged.notes == [{"position": 1, "token": 99, "margin": 5e-5}]
    assert bool(judged.why) is (verdict == "different")


@pytest.mark.parametrize(
    ("finish_reason", "end_margin", "limit", "verdict"),
    [
        ("length", 0.0, 3, "flip"),
        ("length", 0.0, 4, "different"),
        ("", 0.0, 4, "different"),
        ("stop", 5e-5, 4, "flip"),
        ("stop", 0.5, 4, "different"),
    ],
)
def test_an_output_that_ends_early_behind_a_tie(
    finish_reason: str, end_margin: float, limit: int, verdict: str
) -> None:
    """Below the limit only an end token that is the reference's choice too excuses the end."""
    reference = FixedReference([0.0, 5e-5, 0.0])
    reference.end_margin = end_margin
    judged = judge(
        reference,  # type: ignore[arg-type]
        [1],
        [10, 99, 98],
        THEIRS,
        1e-4,
        limit=limit,
        finish_reason=finish_reason,
    )
    assert judged.verdict == verdict
    assert bool(judged.why) is (verdict == "different")


def test_only_a_trailing_end_token_is_trimmed() -> None:
    """An end token inside an output stays."""
    assert trimmed([EOS, 5, EOS], [EOS]) == [EOS, 5]
    assert trimmed([], [EOS]) == []


def test_the_prompts_are_what_they_promise() -> None:
    """Thirty distinct names, lengths from 1 to 1,500 tokens, several scripts, and shared beginnings."""
    assert len({case.name for case in CASES}) == 30
    lengths = [case.tokens for case in CASES if case.tokens]
    assert (min(lengths), max(lengths)) == (1, 1500)
    assert sum(not case.text.isascii() for case in CASES) >= 8
    starts = [case.text[:120] for case in CASES if len(case.text) >= 120]
    assert sum(starts.count(start) > 1 for start in set(starts)) >= 3


@pytest.mark.parametrize(
    ("argv", "why"), [(["--toy", "--schedules", "0"], "--schedules 0"), (["--jobs", "0"], "--jobs 0")]
)
def test_a_run_of_nothing_is_refused(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No schedule, or no process to run one, is a mistake and no clean run."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert why in capsys.readouterr().err


def test_an_unknown_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With those that there are."""
    assert main(["--family", "llama,loom"]) == 2
    said = capsys.readouterr().err
    assert "'loom'" in said
    assert "lara_mini" in said


def test_a_server_that_is_not_there_is_said_so() -> None:
    """The address and the cause, instead of a document that could not be read."""
    server = OwnServer([])
    server.url = "http://127.0.0.1:1"
    with pytest.raises(ServerFailed, match=r"http://127\.0\.0\.1:1 does not answer: .*refused"):
        server.model()
