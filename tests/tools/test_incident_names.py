"""What stands for names, stop ids and log fields in an archive: nothing that a client wrote, nothing unlisted."""

from __future__ import annotations

import ast
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allocator.columns import i64, pack_i64
from tools.incident import fields
from tools.incident.logs import Cleaner
from tools.incident.pseudonyms import KEY_BYTES, Names, Tokens, without_places
from tools.incident.values import LEFT_OUT

ROOT = Path(__file__).parents[2]
NAMES = Names(bytes(KEY_BYTES))
VOCABULARY = 50_000
LEVELS = {"debug", "info", "warning", "error", "exception"}
LEFT = {"peer", "text", "endpoint", "url", "run_dir", "path", "spec", "exc_info", "method", "request_id"}
"""Fields of log lines that are left out of a daemon's, as they may name places or repeat what somebody sent."""


def cleaned(**event: Any) -> dict[str, Any]:
    line = Cleaner(NAMES).line(json.dumps(event))
    assert line is not None
    result: dict[str, Any] = json.loads(line)
    return result


def test_a_stop_id_of_one_request_is_another_id() -> None:
    """Whether one id or many end requests: every one has an image that is its own, none itself; end-of-text stays."""
    for stops in ([777], list(range(100, 140)), [0, VOCABULARY - 1]):
        for key in range(5):
            tokens = Tokens(Names(bytes([key] * KEY_BYTES)), [VOCABULARY], [2], [*stops, 2])
            images = [tokens.stop_id(id) for id in stops]
            assert len(set(images)) == len(stops)
            assert not [id for id, image in zip(stops, images, strict=True) if id == image]
            assert set(images) != set(stops)
            assert tokens.stop_id(2) == 2
            assert i64(tokens.stop_ids(pack_i64([2, *stops]))).tolist() == [2, *images]
            assert tokens.detail(f"stop token {stops[0]}") == f"stop token {images[0]}"
            assert tokens.unmoved == 0


def test_images_of_stop_ids_are_drawn_anew_for_every_archive() -> None:
    """So one archive says nothing of another."""
    drawn = {Tokens(Names(bytes([key] * KEY_BYTES)), [VOCABULARY], [2], [777]).stop_id(777) for key in range(20)}
    assert len(drawn) > 15


@pytest.mark.parametrize("vocabularies", [[60], [40, 60]])
@pytest.mark.parametrize("stops", [[7], [3, 7, 39, 45, 59], list(range(3, 60)), list(range(60))])
def test_at_every_place_the_vocabulary_is_permuted(vocabularies: list[int], stops: list[int]) -> None:
    """No two tokens become one, stop ids become stop ids, others others: all that the core asks of tokens stays."""
    tokens = Tokens(NAMES, vocabularies, [2], stops)
    special = {id: tokens.stop_id(id) for id in [*stops, 2]}
    tip = tokens.root("")
    for _ in range(5):
        mapped = [tokens.one(tip, id)[0] for id in range(60)]
        assert sorted(mapped) == list(range(60))
        assert all(mapped[id] == image for id, image in special.items())
        assert all(max(mapped[:size]) < size for size in vocabularies)
        tip = tokens.one(tip, 5)[1]


def test_where_nothing_else_can_be_drawn_it_is_counted() -> None:
    """All but one id end the model's text: the last one stays, and the archive says so."""
    assert Tokens(NAMES, [3], [0, 1], [2]).unmoved == 1
    assert Tokens(NAMES, [3], [0], [2]).unmoved == 0


def test_nothing_of_a_namespace_or_an_id_is_left() -> None:
    """Not the kind in front of a colon, not the digits behind a dash; ids of one call begin with its pseudonym."""
    assert NAMES.namespace("acme:prod").startswith("ns-")
    assert NAMES.namespace("salt:acme").startswith("salt:ns-")
    assert NAMES.namespace("") == ""
    assert "48213" not in NAMES.id("customer-48213")
    call = NAMES.call("customer-48213")
    ids = [NAMES.id(f"customer-48213-{at}") for at in range(4)]
    assert all(id.startswith(f"{call}-") for id in ids)
    assert len(set(ids)) == 4
    assert len(NAMES.id("x" * 300 + "-1")) == 302, "the core refuses it for its length, and says that"


@pytest.mark.parametrize(
    "text",
    [
        "cannot bind tcp://10.0.0.5:8000: in use",
        "10.0.0.5:8000 refused",
        "10.0.0.5 refused",
        "node17.acme.example:29500 refused",
        "node17:29500 refused",
        "[fd00::5]:80 refused",
        "fe80::1:2:3 refused",
        f"the host {platform.node()} refused",
        "cannot read /srv/acme/10.0.0.5/x",
    ],
)
def test_places_go_out_of_sentences(text: str) -> None:
    """Addresses, this host and folders; what a sentence says stays."""
    said = without_places(text)
    for word in ("10.0.0.5", "acme", "node17", "fd00", "fe80", "8000", "29500", f" {platform.node()} "):
        assert word not in said
    assert said.split()[-1] in ("refused", "use", ".../x")


def test_sentences_without_places_stay() -> None:
    """Numbers of ranks and steps, times and versions are no addresses."""
    for text in (
        "rank 0.0 (pid 9198) was killed by SIGKILL",
        "step 5: 12 bytes",
        "2026-11-30 10:44:28",
        "torch 2.13.0+cpu",
    ):
        assert without_places(text) == text


def test_of_a_front_end_only_what_is_listed_goes_through() -> None:
    """Methods and routes from closed sets; nothing else that a client can write, whatever the field is called."""
    secret = "ACME-SECRET"
    line = cleaned(
        process="frontend", event="HttpRequest", level="info", method="GET", path="/v1/completions", status=200,
        request_id="customer-48213", finish_reasons=["stop"], end="stop",
    )  # fmt: skip
    assert (line["method"], line["path"], line["status"], line["end"]) == ("GET", "/v1/completions", 200, "stop")
    assert line["request_id"] == NAMES.call("customer-48213")
    line = cleaned(
        process="frontend", event=secret, method=secret, path=f"/v1/models/{secret}", code=secret, end=secret,
        user_agent=secret, host=secret, port=8177, reason=secret, error=secret, kind=secret, finish_reasons=[secret],
        request_id=secret, text=secret, signal={secret: 1}, streams=[{secret: secret, "reason": secret}],
        **{secret: 1},
    )  # fmt: skip
    assert "ACME" not in json.dumps(line)
    assert "8177" not in json.dumps(line)
    assert {line[key] for key in ("event", "method", "path", "code", "end")} == {LEFT_OUT}
    assert line["fields_left_out"] == 8


def test_of_a_daemon_unlisted_fields_are_left_out() -> None:
    """Keys of dictionaries too; numbers per band, and sentences without places stay."""
    line = cleaned(event="Finished", port=8177, host="acme", request=4, id="acme-1", why="no answer of 10.0.0.5:80")
    said = {"event": "Finished", "request": 4, "id": NAMES.id("acme-1"), "why": "no answer of (address)"}
    assert line == said | {"fields_left_out": 2}
    status: dict[str, Any] = {
        "bands": {"full": [1, 2], "acme": [3]},
        "frontends": [{"name": "acme"}],
        "freed_units_full": 7,
    }
    line = cleaned(**status)
    assert line["bands"] == {"full": [1, 2], "fields_left_out": 1}
    assert line["frontends"] == [{"name": NAMES.frontend("acme")}]
    assert line["freed_units_full"] == 7
    assert cleaned(event="acme")["event"] == LEFT_OUT


def logged() -> tuple[set[str], set[str]]:
    """Names of events and fields of every line that the code logs with names that it spells out."""
    events, keys = set(), set()
    for path in (*(ROOT / "daemon").rglob("*.py"), *(ROOT / "ipc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            first = node.args[0]
            if node.func.attr in LEVELS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                events.add(first.value)
                keys |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return events, keys


def test_every_line_that_is_logged_was_decided_about() -> None:
    """An event or a field that the lists do not know would be lost without a word."""
    events, keys = logged()
    assert len(events) > 50
    assert events - fields.EVENTS == set()
    assert keys - fields.FIELDS - fields.OF_FRONT_ENDS - LEFT == set()
    assert fields.FIELDS.isdisjoint(LEFT)
    assert fields.WORDS | fields.SENTENCES <= fields.FIELDS | fields.OF_FRONT_ENDS


def test_prompts_keep_their_length_with_drawn_stop_ids() -> None:
    """A column of tokens among which a stop id stands: the image stands there, and nowhere else."""
    rng = np.random.default_rng(1)
    column = rng.integers(0, 200, 4096)
    tokens = Tokens(NAMES, [200], [2], [7])
    mapped = i64(tokens.column(tokens.root("a"), pack_i64(column.tolist()))[0])
    assert ((mapped == tokens.stop_id(7)) == (column == 7)).all()
    assert ((mapped == 2) == (column == 2)).all()


@pytest.mark.parametrize(
    ("page_size", "begins"), [(16, [496, 1008]), (64, [448, 960]), (256, [448, 960]), (48, [480, 1008])]
)
def test_the_second_scheme_keeps_only_what_evicted_paths_are_known_by(page_size: int, begins: list[int]) -> None:
    """Behind another first token everything is another, but for the tokens right before each mark."""
    tokens = Tokens(NAMES, [VOCABULARY], [2], [], [page_size])
    rest = np.random.default_rng(2).integers(3, VOCABULARY, 1300).tolist()

    def mapped(first: int, behind: list[int], root: str = "a", at: int = 0) -> Any:
        parts = [first, *behind[:at]], [first, *behind][at + 1 :]
        one, tip = tokens.column(tokens.root(root), pack_i64(parts[0]))
        return i64(one + tokens.column(tip, pack_i64(parts[1]))[0])

    same = mapped(5, rest) == mapped(6, rest)
    begin, second = begins
    window = np.array([begin <= at < 512 or second <= at < 1024 for at in range(1301)])
    assert same[window].all()
    assert same[~window].sum() <= 2, "by chance"
    other = list(rest)
    other[begin + 2] += 1
    same = mapped(5, rest) == mapped(5, other)
    assert same[: begin + 3].all()
    assert not same[begin + 3]
    assert same[begin + 3 : 512].sum() <= 1
    assert same[512:second].sum() <= 1, "behind the mark the whole prompt counts again"
    assert same[second:1024].all()
    assert (mapped(5, rest) == mapped(5, rest, "b")).sum() <= 2
    for at in (1, 100, begin + 3, 511, 512, 700):
        assert (mapped(5, rest, at=at) == mapped(5, rest)).all()
