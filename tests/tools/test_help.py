"""`--help` of the commands that measure and simulate: sentences that end, and a word on every option."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import pytest

from tools import bench_core, bench_hits, bench_oversubscription, bench_pressure, replay
from tools.simulate import command as simulate
from tools.top import command as top
from tools.worlds import command as worlds
from tools.worlds import scenario

COMMANDS: list[Callable[[list[str]], object]] = [
    bench_core.main,
    bench_hits.main,
    bench_oversubscription.main,
    bench_pressure.main,
    replay.main,
    scenario.main,
    simulate.main,
    top.main,
    worlds.main,
]


@pytest.mark.parametrize("main", COMMANDS, ids=lambda main: main.__module__)
def test_help_is_whole(
    main: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description is a sentence; each option says what it is; no text ends in the middle of one."""
    seen: list[argparse.ArgumentParser] = []
    print_help = argparse.ArgumentParser.print_help
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self, file=None: seen.append(self))
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    (parser,) = seen
    print_help(parser)
    assert parser.description is not None
    assert re.fullmatch(r"[^\n]+[.\w\])]", parser.description)
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action.dest
        if action.help is None:
            continue
        assert not re.search(r"( (on|of|the|a|and|or|with|as)|[,;:])$", action.help), action.help
        assert action.help.count("(") == action.help.count(")"), action.help
    assert capsys.readouterr().out
