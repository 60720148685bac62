"""Differences: the first differing place by its path, with columns as numbers."""

from __future__ import annotations

import msgspec
import pytest

from allocator.columns import pack_i32, pack_i64
from allocator.ops import Flush, Free, Part, Take
from daemon.core.inputs import Ticked
from daemon.core.outputs import Decided
from ipc.messages import Forward, Generate, RowSampling, Step
from journal.difference import COLUMNS, describe, first_difference
from journal.records import PAYLOADS
from tests.golden.make import structs_of


def step(**fields: object) -> Step:
    base = Step(1, 2, 0, 1, [], [Take([Part(0, pack_i32([1, 2, 3]))]), Flush(4)], None, bytes(16))
    return msgspec.structs.replace(base, **fields)


FORWARD = Forward(*[pack_i32([5, 6])] * 4, b"\x01\x02", pack_i64([9]), b"", b"", b"", [])

PAIRS = [
    (step(), step(processed_through=0), "processed_through", "1", "0"),
    (step(), step(ops=[Take([Part(0, pack_i32([1, 2, 4]))]), Flush(4)]), "ops[0].parts[0].ids[2]", "3", "4"),
    (step(), step(ops=step().ops[:1]), "ops[1]", "Flush(moves_max=4)", "absent"),
    (step(), step(ops=[Free([]), Flush(4)]), "ops[0]", "Take(parts=[Part(band=0, ids=[1, 2, 3])])", "Free(parts=[])"),
    (step(forward=FORWARD), step(), "forward", describe(FORWARD), "None"),
    (
        step(forward=FORWARD),
        step(forward=msgspec.structs.replace(FORWARD, flags=b"\x01\x03")),
        "forward.flags[1]",
        "2",
        "3",
    ),
    (step(), step(logical=b"\x01" + bytes(15)), "logical", "00" * 16, "01" + "00" * 15),
    (Decided(1, "ended", 3, "stop"), Decided(1, "ended", 3, "stop", {"x": 1}), "numbers", "{}", "{'x': 1}"),
]


@pytest.mark.parametrize(("left", "right", "path", "recorded", "replayed"), PAIRS, ids=[pair[2] for pair in PAIRS])
def test_first_difference(left: object, right: object, path: str, recorded: str, replayed: str) -> None:
    """The path leads to the first field that differs, and each side's value stands beside it."""
    found = first_difference(left, right)
    assert found is not None
    assert (found.path, found.recorded, found.replayed) == (path, recorded, replayed)


def test_equal_records_do_not_differ() -> None:
    """Equal structs have no difference; structs of two kinds differ as a whole."""
    assert first_difference(step(), step()) is None
    found = first_difference(step(), Ticked(1))
    assert found is not None
    assert found.path == "kind"


def test_op_is_told() -> None:
    """A difference within the ops names the op's index."""
    found = first_difference(step(), step(ops=[step().ops[0], Flush(5)]))
    assert found is not None
    assert found.op() == 1
    other = first_difference(step(), step(seq=9))
    assert other is not None
    assert other.op() is None


def test_long_columns_are_cut() -> None:
    """A line stays readable: a long column shows its beginning and its length; a broken one its bytes."""
    assert describe(Part(0, pack_i32(range(1000)))).endswith("15, ... 1000 in all])")
    assert describe(Part(0, b"\x01\x02\x03")) == "Part(band=0, ids=010203)"


def test_every_column_is_known() -> None:
    """The table of columns names fields that exist, and all byte fields of steps but digests and logprobs."""
    structs = {struct.__name__: struct for payload in PAYLOADS.values() for struct in structs_of(payload)}
    for name, field in COLUMNS:
        assert field in structs[name].__struct_fields__
    for struct in (Forward, Part, RowSampling, Generate):
        columns = {field.name for field in msgspec.structs.fields(struct) if field.type is bytes}
        assert columns == {field for name, field in COLUMNS if name == struct.__name__}
