"""`bandmaster plan` on published models: every figure equals the arithmetic that is written out beside the config."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import plan

FOLDER = Path(__file__).parent / "published"
NAMES = sorted(path.name.removesuffix(".hand.json") for path in FOLDER.glob("*.hand.json"))
KINDS = {"full", "window", "state"}

BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def work_out(text: str) -> int:
    """The value of arithmetic in whole numbers: + - * // and min."""
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        return BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    assert isinstance(node, ast.Call), ast.dump(node)
    assert ast.unparse(node.func) == "min"
    return min(_value(argument) for argument in node.args)


def holds(text: str) -> bool:
    """Whether an inequality `A <= B` or `A > B` holds."""
    sign = "<=" if "<=" in text else ">"
    left, _, right = text.partition(sign)
    return (work_out(left.strip()) <= work_out(right.strip())) == (sign == "<=")


def at(document: Any, path: str) -> Any:
    """What stands at a path; rows of a list are found by their band or tokens, stages by number."""
    for step in path.split("/"):
        if isinstance(document, list):
            found = [row for row in document if str(row.get("band", row.get("tokens", row.get("stage")))) == step]
            assert len(found) == 1, f"{step} in {path}"
            document = found[0]
        else:
            document = document[step]
    return document


def hand(name: str) -> dict[str, Any]:
    """The arithmetic of a model."""
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.hand.json").read_text())
    return read


def planned(name: str, case: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `plan --json` says of a case."""
    lengths = ",".join(case["requests_at_once"])
    parallel = ["--tp", str(case["tp"]), "--pp", str(case["pp"])]
    arena = ["--arena-bytes", str(hand(name)["arena_bytes"])]
    assert plan.main([str(FOLDER / f"{name}.config.json"), *arena, *parallel, "--lengths", lengths, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


CASES = [(name, index) for name in NAMES for index in range(len(hand(name)["cases"]))]


@pytest.mark.parametrize(("name", "index"), CASES, ids=[f"{name}-{index}" for name, index in CASES])
def test_a_plan_equals_the_arithmetic_beside_it(name: str, index: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Unit bytes, bytes a token and a slot, the chain's start, units and bytes of requests, bytes held and needed."""
    case = hand(name)["cases"][index]
    document = planned(name, case, capsys)
    for what, path, arithmetic, value in case["checks"]:
        assert work_out(arithmetic) == value, f"{what}: {arithmetic}"
        assert at(document, path) == value, f"{what}: {path}"
    for tokens, counted in case["requests_at_once"].items():
        assert all(holds(one) for one in counted["fits"]), tokens
        assert len(counted["fits"]) == case["pp"]
        assert holds(counted["one_more_does_not"]), tokens
        assert at(document, f"requests/{tokens}/at_once") == counted["at_once"], tokens


@pytest.mark.parametrize("name", NAMES)
def test_bytes_held_stay_near_bytes_needed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At most 1.05 of what is needed at 300, 1,300 and 5,000 tokens, pages of 16: full, windows, working state."""
    rows = planned(name, hand(name)["cases"][0], capsys)["held_over_needed"]
    assert [row["tokens"] for row in rows] == [300, 1300, 5000]
    for row in rows:
        assert 1 <= row["held_bytes"] / row["needed_bytes"] <= 1.05, row
        assert row["ratio"] == round(row["held_bytes"] / row["needed_bytes"], 4)


def test_the_published_models_cover_every_mixture() -> None:
    """At least eight hybrids, each with its source; all mixtures of kinds, tensor and pipeline ranks."""
    mixtures = set()
    for name in NAMES:
        config = json.loads((FOLDER / f"{name}.config.json").read_text())
        assert len(config["source"]) > 40
        cases = hand(name)["cases"]
        assert {(case["tp"] > 1, case["pp"]) for case in cases} == {(False, 1), (True, 1), (False, 2)}
        paths = {path for _, path, _, _ in cases[0]["checks"] if path.endswith("unit_bytes")}
        kinds = {path.split("/")[3].partition(":")[0] for path in paths}
        mixtures.add(frozenset(kinds))
    assert len(NAMES) >= 8
    assert mixtures == {frozenset({"full", "window"}), frozenset({"full", "state"}), frozenset(KINDS)}


def test_the_arithmetic_is_worked_out_as_written() -> None:
    """The evaluator knows the four operations, rounds as written and refuses anything else."""
    assert work_out("-(-300 // 16) * 16 + min(4, 3) - 2 * 5") == 304 + 3 - 10
    assert holds("2 * 3 <= 6")
    assert holds("7 > 6")
    assert not holds("7 <= 6")
    with pytest.raises((AssertionError, KeyError)):
        work_out("2 ** 3")
