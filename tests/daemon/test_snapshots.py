"""Snapshots of a core: whatever it is doing, one that was written down and read again goes on exactly alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from allocator import graph
from allocator.checks import STRICT, Checks
from allocator.graph import GraphError
from daemon.core.limits import CoreConfig
from daemon.core.scheduler import SchedulerCore
from daemon.snapshots import EXTERNAL, core_state, find, restore_core
from journal.records import encode
from tools.worlds.cases import draw
from tools.worlds.run import Player

EVERY_ACTIONS = 12
SEEDS = 8


class Twins:
    """A core, and one that was made out of its state; they must never differ."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.other = restore_core(core_state(core), Checks(STRICT))

    def feed(self, item: Any) -> Any:
        """Both, compared in everything that they say."""
        ours, theirs = self.core.feed(item), self.other.feed(item)
        assert [encode(one) for one in ours.decisions] == [encode(one) for one in theirs.decisions]
        assert [(one.frontend, one.message) for one in ours.replies] == [
            (one.frontend, one.message) for one in theirs.replies
        ]
        assert (ours.wants_tick, ours.due_ns) == (theirs.wants_tick, theirs.due_ns)
        assert (ours.step is None) == (theirs.step is None)
        if ours.step is not None:
            assert encode(ours.step) == encode(theirs.step)
        assert (ours.tokens is None) == (theirs.tokens is None)
        if ours.tokens is not None:
            assert ours.tokens.requests.tolist() == theirs.tokens.requests.tolist()
            assert ours.tokens.tokens.tolist() == theirs.tokens.tokens.tolist()
        return ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_core_that_was_written_down_goes_on_alike(seed: int) -> None:
    """In random workloads with every policy, every kind of memory, lost epochs and restarts: same words, same state."""
    case = draw(9000 + seed, actions=80)
    player = Player(case, ())
    kinds: Counter[str] = Counter()
    for place, action in enumerate(case.actions):
        player.act(*action)
        core: Any = player.world.core
        if isinstance(core, Twins):
            assert core_state(core.core) == core_state(core.other)
            core = core.core
        if place % EVERY_ACTIONS == 0:
            player.world.core = Twins(core)  # type: ignore[assignment]
            kinds["twins"] += 1
    player.rest()
    assert kinds["twins"] > 5


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("os", "system", "not part of any state"),
        ("daemon.snapshots", "find", "not part of any state"),
        ("allocator.graph", "msgspec.msgpack", "only imports"),
        ("daemon.core.state", "Nothing", "does not have"),
        ("daemon.core.state", "np", "only imports"),
    ],
)
def test_a_state_names_nothing_but_states(module: str, name: str, words: str) -> None:
    """Classes and functions of the pure rooms, by the module that they are written in."""
    with pytest.raises(GraphError, match=words):
        find(module, name)


def test_the_state_of_something_else_is_no_core() -> None:
    """Sound bytes of another object."""
    with pytest.raises(GraphError, match="a CoreState, not a list"):
        restore_core(graph.encode([1], EXTERNAL))


def test_a_state_that_lacks_a_field_is_no_core() -> None:
    """What an older version wrote down is refused by name; a core made of half a state would break much later."""
    core = SchedulerCore(CoreConfig())
    del core.state.kept_logprobs
    with pytest.raises(GraphError, match="of another version: kept_logprobs"):
        restore_core(core_state(core))
