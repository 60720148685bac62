"""Graph: a state comes back as it was and to the same bytes; what has no canonical bytes is refused by name."""

from __future__ import annotations

import enum
import importlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from allocator import graph
from allocator.checks import Checks
from allocator.graph import GraphError


class Colour(enum.StrEnum):
    """A string that is a member."""

    RED = "red"


class Pair(NamedTuple):
    """A tuple with names."""

    left: object
    right: object


class Packet(msgspec.Struct, frozen=True):
    """A message."""

    number: int
    items: list[int]


@dataclass(slots=True, eq=False)
class Node:
    """A mutable object that others share, in circles."""

    name: str
    parent: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Key:
    """A frozen object, hashed by its fields."""

    number: int


class Bare:
    """Attributes without slots, a slot that is never set in its base, a bound method and a function."""

    def __init__(self) -> None:
        self.method = self.double
        self.function = outside

    def double(self, number: int) -> int:
        """Twice."""
        return 2 * number


class Slotted:
    """A slot without a value."""

    __slots__ = ("given", "never")

    def __init__(self) -> None:
        self.given = 1


def outside(number: int) -> int:
    """A function with a name."""
    return number


def find(module: str, name: str) -> Any:
    """What a name stands for."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def again(value: object) -> Any:
    """Encoded and decoded; encoding that once more gives the same bytes."""
    data = graph.encode(value, {Checks: "checks"})
    checks = Checks(2)
    decoded = graph.decode(data, find, {"checks": checks})
    assert graph.encode(decoded, {Checks: "checks"}) == data
    return decoded


PLAIN = [
    None,
    True,
    -(2**63),
    2**64 - 1,
    2**70,
    -(2**90),
    1.5,
    "x",
    b"\x00",
    (),
    (1, (2, [3])),
    [],
    [1, [2]],
    {},
    {1: "a", "b": (2,)},
    {(1, 2): {3}},
    {3, 1, 2},
    frozenset({2, 1}),
    bytearray(b"ab"),
    deque([1, 2], maxlen=3),
    Colour.RED,
    Pair(1, [2]),
    Packet(1, [2, 3]),
    np.int64(7),
    np.dtype("int32"),
    Key,
    outside,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: getattr(value, "__name__", repr(value)))
def test_every_kind_of_value_comes_back(value: object) -> None:
    """Equal, and of the same type, for each kind of value that a state may hold."""
    decoded = again(value)
    assert type(decoded) is type(value)
    assert decoded == value


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "float32", "uint64"])
def test_arrays_come_back(dtype: str) -> None:
    """With dtype, shape, contents and whether they may be written."""
    array = np.arange(12).reshape(3, 4).astype(dtype)
    frozen = array.copy()
    frozen.flags.writeable = False
    decoded = again([array, frozen, array[:0].copy()])
    for left, right in zip(decoded, [array, frozen, array[:0]], strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert (left == right).all()
    assert [one.flags.writeable for one in decoded[:2]] == [True, False]


def test_what_is_shared_stays_shared() -> None:
    """Circles, a list that two hold and an array that two hold are one object again."""
    root = Node("root")
    for name in ("a", "b"):
        root.children[name] = Node(name, root)
    column, shared = np.zeros(3), [1]
    decoded = again([root, shared, {"x": shared, "y": column}, (column,)])
    assert decoded[0].children["a"].parent is decoded[0]
    assert list(decoded[0].children) == ["a", "b"]
    assert decoded[2]["x"] is decoded[1]
    decoded[3][0][1] = 5
    assert decoded[2]["y"][1] == 5


def test_a_long_chain_needs_no_deep_stack() -> None:
    """Ten thousand nodes in a row come back."""
    first = last = Node("0")
    for number in range(1, 10_000):
        last.parent = Node(str(number))
        last = last.parent
    decoded, length = again(first), 0
    while decoded is not None:
        decoded, length = decoded.parent, length + 1
    assert length == 10_000


def test_objects_come_back() -> None:
    """Frozen ones as keys, slots without a value, attributes, methods of what was decoded, and what is only named."""
    checks = Checks(0)
    bare = Bare()
    decoded = again([{Key(1): 2}, Slotted(), bare, checks, checks])
    assert decoded[0] == {Key(1): 2}
    assert decoded[1].given == 1
    assert not hasattr(decoded[1], "never")
    assert decoded[2].method(4) == 8
    assert decoded[2].method.__self__ is decoded[2]
    assert decoded[2].function is outside
    assert decoded[3] is decoded[4]
    assert decoded[3].level == 2, "the reader's own, not the writer's"


def test_equal_states_have_equal_bytes() -> None:
    """However a set, the attributes or an array's memory came about; the order of a dict is state."""
    one, two = Bare(), Bare.__new__(Bare)
    two.function, two.method = outside, two.double
    assert graph.encode(one) == graph.encode(two)
    assert graph.encode({8, 1}) == graph.encode({1, 8})
    column = np.arange(10)
    assert graph.encode(column[::2]) == graph.encode(column[::2].copy())
    assert graph.encode({1: 1, 2: 2}) != graph.encode({2: 2, 1: 1})


class Words(dict[str, int]):
    """A subclass of a container."""


def closure() -> Callable[[], int]:
    """A function that has no name outside."""
    number = 1
    return lambda: number


COLUMN = np.arange(4)
REFUSED = {
    "lambda": (closure(), "a function needs a name"),
    "generator": ((number for number in [1]), "generator"),
    "objects": (np.array([object()]), "array of object"),
    "subclass": (Words(), "Words"),
    "builtin": (len, "builtin_function_or_method"),
    "shared memory": ([COLUMN, COLUMN[1:]], "share memory"),
    "a field": (Node("x", parent=closure()), "Node.parent"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_canonical_bytes_is_refused(name: str) -> None:
    """And the refusal says what it was about."""
    value, words = REFUSED[name]
    with pytest.raises(GraphError, match=words):
        graph.encode(value)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([2, [], [], None]), msgspec.msgpack.encode(3)])
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    """Torn, of another format, or something else altogether."""
    with pytest.raises(GraphError):
        graph.decode(data, find)


@pytest.mark.parametrize(
    ("fields", "differs"), [(["children", "name"], "parent"), (["children", "name", "parent", "uncle"], "uncle")]
)
def test_an_object_with_other_fields_is_refused_by_name(fields: list[str], differs: str) -> None:
    """A class that got or lost a field since: nothing is made that lacks one, and none is dropped in silence."""
    form, [[module, name, _]], [record, *others], root = msgspec.msgpack.decode(graph.encode(Node("a")))
    record = [record[0], *[None] * len(fields)]
    data = msgspec.msgpack.encode([form, [[module, name, fields]], [record, *others], root])
    with pytest.raises(GraphError, match=f"Node of another version: {differs}"):
        graph.decode(data, find)
