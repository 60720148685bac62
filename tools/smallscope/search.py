"""The search: every sequence of actions up to a depth, state by state, each distinct state once.

Owns the walk over one world. Must never sample. Breadth first, so a finding's sequence is a shortest one; a state is
remembered by 16 bytes, and one that is still to be expanded by its path of action numbers, from which it is made again:
neighbours share most of their path, so that costs about one step each. What a finding leads to is not explored.
"""

from __future__ import annotations

import gc
import traceback
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.smallscope.canon import canonical_hash
from tools.smallscope.checks import Moved, check
from tools.smallscope.device import SymbolFault
from tools.smallscope.step import perform
from tools.smallscope.words import cause_of, in_words
from tools.smallscope.world import Action, Limits, Shape, State, World

GARBAGE = 50_000  # a chain is a cycle of objects: they are collected in large batches
REPORT_EVERY = 256  # expanded states between two calls of `tell`


@dataclass
class Finding:
    """Something that must not happen: what, a shortest sequence of actions that leads to it, and how often it was met.

    `actions` are in the form that `replay` reads, `words` the same for people.
    """

    world: str
    name: str
    detail: str
    actions: list[str]
    words: list[str]
    count: int = 1


@dataclass
class Walk:
    """What the search of one world saw. `closed`: no state was left to expand, so these are all that exist."""

    world: str
    units: int
    depth: int = 0
    states: int = 0
    transitions: int = 0
    by_depth: list[int] = field(default_factory=list)
    closed: bool = False
    reliefs: int = 0
    moved_bytes: int = 0
    least_bytes: int = 0
    max_ratio: float = 1.0
    findings: list[Finding] = field(default_factory=list)


Tell = Callable[[int, int, int, int], None]
"""Called now and then with: depth, states, transitions, and percent of this depth's states that are expanded."""


def explore(
    shape: Shape, limits: Limits, depth: int, kinds: frozenset[str] | None, findings_max: int, tell: Tell
) -> Walk:
    """Every sequence of up to `depth` actions (of these kinds, None: of all) from the empty world.

    It ends early with `findings_max` causes, or a hundred times as many findings.
    """
    gc.set_threshold(GARBAGE)
    search = _Search(World(shape, limits), kinds, Walk(shape.name, limits.units), findings_max, tell)
    for _ in range(depth):
        if not search.expand_layer():
            break
    walk, moved = search.walk, search.moved
    walk.closed = not search.layer and not walk.findings
    walk.reliefs, walk.moved_bytes, walk.least_bytes = moved.reliefs, moved.moved, moved.least
    walk.max_ratio = moved.ratio
    return walk


class _Search:
    def __init__(self, world: World, kinds: frozenset[str] | None, walk: Walk, findings_max: int, tell: Tell) -> None:
        self.world, self.kinds, self.walk, self.findings_max, self.tell = world, kinds, walk, findings_max, tell
        self._causes: dict[str, Finding] = {}
        self._found = 0
        self.moved = Moved()
        root = State(world)
        check(root)
        self.seen = {canonical_hash(root)}
        self.layer: list[array[int]] = [array("H")]
        self._stack: list[State] = [root]  # the states along `_path`
        self._path = array("H")
        self._again = Moved()  # of steps that are only made again
        walk.states = 1
        walk.by_depth.append(1)

    def expand_layer(self) -> bool:
        """One more action for every state of the last depth; False when there is nothing to go on with."""
        found: list[array[int]] = []
        walk = self.walk
        walk.depth += 1
        for number, path in enumerate(self.layer):
            state = self._state_at(path)
            for place, action in enumerate(self._actions(state)):
                if self._try(state, action, path):
                    found.append(array("H", [*path, place]))
                if len(walk.findings) >= self.findings_max or self._found >= 100 * self.findings_max:
                    self.layer = found
                    return False
            if number % REPORT_EVERY == 0:
                self.tell(walk.depth, walk.states, walk.transitions, 100 * number // len(self.layer))
        self.layer = found
        walk.by_depth.append(len(found))
        self.tell(walk.depth, walk.states, walk.transitions, 100)
        return bool(found)

    def _try(self, state: State, action: Action, path: array[int]) -> bool:
        """Takes one action from a state; whether it leads to a state not seen before."""
        walk = self.walk
        walk.transitions += 1
        after = state.copy()
        try:
            perform(after, action, self.moved)
            known = canonical_hash(after)
            if known in self.seen:
                return False
            check(after)
        except Exception as error:  # whatever it is, it is a finding; the search goes on without this state
            self._record(error, path, action)
            return False
        self.seen.add(known)
        walk.states += 1
        return True

    def _record(self, error: Exception, path: array[int], action: Action) -> None:
        """A finding: the first of its cause keeps its sequence, of the others there is a count."""
        self._found += 1
        name, detail = _name_of(error)
        known = self._causes.get(cause_of(name, detail))
        if known is not None:
            known.count += 1
            return
        actions = [*self._along(path), action]
        texts, words = [a.text() for a in actions], [in_words(self.world, a) for a in actions]
        finding = self._causes[cause_of(name, detail)] = Finding(self.walk.world, name, detail, texts, words)
        self.walk.findings.append(finding)

    def _along(self, path: array[int]) -> list[Action]:
        """A path's actions, found by walking it again."""
        state = State(self.world)
        actions = []
        for place in path:
            actions.append(self._actions(state)[place])
            perform(state, actions[-1], self._again)
        return actions

    def _state_at(self, path: array[int]) -> State:
        """The state that a path leads to, from the nearest state at hand."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        del self._stack[shared + 1 :]
        for place in path[shared:]:
            state = self._stack[-1].copy()
            perform(state, self._actions(state)[place], self._again)
            self._stack.append(state)
        self._path = path
        return self._stack[-1]

    def _actions(self, state: State) -> list[Action]:
        actions = state.actions()
        return actions if self.kinds is None else [action for action in actions if action.kind in self.kinds]


def replay(shape: Shape, limits: Limits, actions: list[str]) -> Iterator[tuple[str, Any]]:
    """Walks a finding's actions again, in words as it lists them; yields each with the state behind it."""
    state = State(World(shape, limits))
    for text in actions:
        action = next((each for each in state.actions() if each.text() == text), None)
        if action is None:
            raise ValueError(f"{text} is not possible here")
        perform(state, action, Moved())
        check(state)
        yield text, state


def _name_of(error: Exception) -> tuple[str, str]:
    name = getattr(error, "name", type(error).__name__)
    if isinstance(error, SymbolFault):
        return error.name, str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return str(name), f"{error or type(error).__name__} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
