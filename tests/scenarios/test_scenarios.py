"""Every scenario file says what happens; `bandmaster scenario --rewrite FILE` writes it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.worlds.scenario import BadScenario, difference, main, parse, rewritten

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    """The decisions, their order and their numbers are those that the file tells; every check of a world holds."""
    text = path.read_text(encoding="utf-8")
    changed = difference(text, rewritten(text))
    assert not changed, f"{changed}\n\nif this is meant: bandmaster scenario --rewrite {path}"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_scenario_says_what_it_shows_and_shows_something(path: Path) -> None:
    """A file begins with a sentence, and its logs are not empty."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert any(block.expected for block in parse(text))


EXAMPLE = """# An example.
world pages=4
send a prompt=5 max=2
run
----
"""


def test_a_wrong_log_is_seen_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what differs, writes it when asked to, and is content afterwards; comments stay."""
    path = tmp_path / "example.txt"
    path.write_text(EXAMPLE, encoding="utf-8")
    assert main([str(path)]) == 1
    assert "+1 admitted a" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == EXAMPLE, "nothing is written unasked"
    assert main(["--rewrite", str(path)]) == 0
    assert path.read_text(encoding="utf-8").startswith(EXAMPLE)
    assert main([str(path)]) == 0
    path.write_text(path.read_text(encoding="utf-8").replace("ended a (length", "ended a (stop"), encoding="utf-8")
    assert main([str(path)]) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("send a\n----\n", "line 1.*there is no world yet"),
        ("world pages=4\nfly\n----\n", "line 2.*no command 'fly'"),
        ("world wings=2\n----\n", "a world has no wings; it has pages, model_len, windows, state, stages, page_size, "),
        ("world\nsend a wings=2\n----\n", "line 2.*a request has no wings; it has prompt, fe, max, min, "),
        ("world pages=4\n----\n\nuntil retracted\n----\n", "line 4.*never happens"),
        ("world page_size=none\n----\n", "line 1"),
        ("# nothing\n", "at its end"),
    ],
)
def test_what_is_no_scenario_is_told_with_its_line(text: str, why: str) -> None:
    """A command that means nothing names its line."""
    with pytest.raises(BadScenario, match=why):
        rewritten(text)
