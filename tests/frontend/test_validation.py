"""Every field of the table, with every kind of wrong value: a 400 that names it, and nothing reaches the daemon."""

from __future__ import annotations

import dataclasses
import json

import pytest

from daemon.frontend import fields as kinds
from daemon.frontend.fields import Use
from daemon.frontend.schemas import CHAT, COMPLETIONS, DETOKENIZE, ENDPOINTS, TABLES, TOKENIZE, Options
from tests.frontend.double import MAX_MODEL_LEN, MODEL, VOCAB, http_client, make_service, says

PATHS = {
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    TOKENIZE: "/tokenize",
    DETOKENIZE: "/detokenize",
}
HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": HELLO},
    TOKENIZE: {"prompt": "hello"},
    DETOKENIZE: {"tokens": [5]},
}
BAD_IDS = [1, "1", True, {}, [-1], [VOCAB], [2**31], [2**63], [10**20], ["1"], [1.0], [True], [None], [[1]]]
WRONG = {
    kinds.boolean: [0, 1, "true", [], {}],
    kinds.integer: [True, 1.5, 1.0, "1", [], {}, 10**20, -(10**20)],
    kinds.number: [True, "1", [], {}, 10**20, -(10**20)],
    kinds.text: [1, True, [], {}, "x" * 5000],
    kinds.salt: [1, 1.5, True, [], ["a"], {}, "", "x" * 201, "\u00e9" * 101],
    kinds.stop_strings: [1, True, {}, [1], [""], [None], [["a"]], "", ["a"] * 17, "x" * 1025],
    kinds.token_ids: [*BAD_IDS, [0] * 100_000],
    kinds.prompts: [
        1,
        True,
        {},
        [],
        "",
        [""],
        [[]],
        [1, "a"],
        ["a", 1],
        [[1], 2],
        [None],
        [{}],
        ["a"] * 129,
        *[bad for bad in BAD_IDS[4:] if bad not in ([[1]], ["1"])],
    ],
    kinds.messages: [
        *[1, True, {}, "hello", [], [1], [None], [{}], [[]]],
        *[[{"role": role, "content": "x"}] for role in (None, 1, "", "tool", "function", "User")],
        *[[{"role": "user", "content": content}] for content in (None, 1, {}, [1], [{}], [{"type": "text"}])],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "extra": 1}]}],
        [{"role": "user", "content": "a", "tool_calls": [{}]}],
        [{"role": "user", "content": "a", "name": 5}],
        [{"role": "user", "content": "a"}] * 4097,
    ],
    kinds.stream_options: [1, True, "x", [], {"include_usage": 1}, {"include_usage": "yes"}, {"unknown": True}],
    kinds.template_arguments: [1, True, "x", [], {"messages": []}, {"tools": []}],
}
ALWAYS_REFUSED = ["text", 12345, 0.125, [1], {"a": 1}, [{"type": "function"}]]


def outside(field):
    """Numbers just outside the field's range."""
    whole = field.kind is kinds.integer
    if field.kind in (kinds.integer, kinds.number):
        if field.low is not None:
            yield field.low if field.low_open else field.low - (1 if whole else 0.001)
        if field.high is not None:
            yield field.high + (1 if whole else 0.001)


def bad_values(field):
    """Values that the field must refuse."""
    if field.use is Use.REFUSED:
        return [value for value in ALWAYS_REFUSED if value not in field.neutral]
    values = [*WRONG[field.kind], *outside(field)]
    if field.high is None:  # no bound of its own: the body's size bounds it
        values = [value for value in values if value not in ([0] * 100_000, "x" * 5000)]
    return values


def cases():
    """(endpoint, field) for the whole table."""
    return [(endpoint, name) for endpoint in ENDPOINTS for name in TABLES[endpoint]]


@pytest.mark.parametrize(("endpoint", "name"), cases())
async def test_wrong_values_are_refused_by_name(endpoint, name):
    """Each wrong value of each field is a 400 whose param and message name the field."""
    service, daemon = make_service(says("x"))
    field = TABLES[endpoint][name]
    base = dict(BODIES[endpoint])
    if endpoint == TOKENIZE and name == "messages":
        base = {}
    if name == "stream_options":
        base["stream"] = True
    if name == "top_logprobs":
        base["logprobs"] = True
    async with http_client(service) as client:
        for value in bad_values(field):
            response = await client.post(PATHS[endpoint], json={**base, name: value})
            assert response.status_code == 400, (name, value, response.text)
            error = response.json()["error"]
            assert error["param"].split("[")[0].split(".")[0] == name, (value, error)
            assert error["message"].startswith(error["param"] + ": "), error
            assert (error["type"], type(error["code"])) == ("invalid_request_error", str)
    assert daemon.streams == []


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_null_means_the_default_and_missing_required_fields_are_named(endpoint):
    """null is accepted for every optional field, refused for a required one, and a missing one is named."""
    service, _ = make_service(says("x"))
    table = TABLES[endpoint]
    optional = {name: None for name, field in table.items() if not field.required and name not in BODIES[endpoint]}
    async with http_client(service) as client:
        response = await client.post(PATHS[endpoint], json={**optional, **BODIES[endpoint]})
        assert response.status_code == 200, response.text
        for name in (name for name, field in table.items() if field.required):
            for body in ({}, {name: None}):
                response = await client.post(PATHS[endpoint], json=body)
                assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_neutral_values_of_refused_fields_change_nothing(endpoint):
    """A client that sends the defaults of fields that are not built is served."""
    service, daemon = make_service(says("x"))
    async with http_client(service) as client:
        for name, field in TABLES[endpoint].items():
            for value in field.neutral:
                response = await client.post(PATHS[endpoint], json={**BODIES[endpoint], name: value})
                assert response.status_code == 200, (name, value, response.text)
    assert len({(stream.message.prompt, stream.message.sampling) for stream in daemon.streams}) == 1


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_unknown_fields_are_named(endpoint):
    """Nothing a client sends is silently dropped."""
    service, _ = make_service(says("x"))
    async with http_client(service) as client:
        response = await client.post(PATHS[endpoint], json={**BODIES[endpoint], "temprature": 0.1})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "temprature", "unknown_field")


TOGETHER = [
    (COMPLETIONS, {"n": 2, "best_of": 3}, "best_of"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"stop_token_ids": list(range(3, 131))}, "stop_token_ids"),
    (TOKENIZE, {"messages": HELLO}, "prompt"),
    (TOKENIZE, {"prompt": None}, "prompt"),
]


@pytest.mark.parametrize(("endpoint", "fields", "param"), TOGETHER)
async def test_fields_that_contradict_each_other(endpoint, fields, param):
    """Rules between fields name the field to change."""
    service, daemon = make_service(says("x"))
    async with http_client(service) as client:
        response = await client.post(PATHS[endpoint], json={**BODIES[endpoint], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert daemon.streams == []


@pytest.mark.parametrize(
    ("fields", "param", "numbers"),
    [
        ({"prompt": [7] * (MAX_MODEL_LEN + 1)}, "prompt", (MAX_MODEL_LEN, MAX_MODEL_LEN + 1)),
        ({"prompt": [7] * MAX_MODEL_LEN}, "prompt", (MAX_MODEL_LEN, MAX_MODEL_LEN)),
        ({"prompt": [[7], [7] * 300]}, "prompt[1]", (MAX_MODEL_LEN, 300)),
        ({"prompt": [7] * 150, "max_tokens": 51}, "max_tokens", (MAX_MODEL_LEN, 201, 150, 51)),
    ],
)
async def test_too_long_is_a_400_with_both_numbers(fields, param, numbers):
    """One token over the model's length, in the prompt or with the output, names the limit and what was asked (I5)."""
    service, daemon = make_service(says("x"))
    async with http_client(service) as client:
        response = await client.post("/v1/completions", json=fields)
        fits = await client.post("/v1/completions", json={"prompt": [7] * 150, "max_tokens": 50})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert all(str(number) in error["message"] for number in numbers)
    assert (fits.status_code, len(daemon.streams)) == (200, 1)


async def test_length_errors_use_the_clients_name_of_the_limit():
    """A chat client that sent max_completion_tokens reads max_completion_tokens."""
    service, _ = make_service(says("x"))
    async with http_client(service) as client:
        response = await client.post(PATHS[CHAT], json={"messages": HELLO, "max_completion_tokens": 5000})
    assert response.json()["error"]["param"] == "max_completion_tokens"


HOSTILE_BODIES = [
    b"",
    b"{",
    b"nope",
    b"[]",
    b"3",
    b"null",
    b'"text"',
    b'{"prompt": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"a":' * 100_000,
    b"[" * 100_000,
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "\ufeff{}".encode(),
]


@pytest.mark.parametrize("body", HOSTILE_BODIES)
async def test_bodies_that_are_not_json_objects(body):
    """Broken JSON, deep nesting and other documents are a 400, never a 500 (I9)."""
    service, daemon = make_service(says("x"))
    async with http_client(service) as client:
        for path in PATHS.values():
            response = await client.post(path, content=body)
            assert response.status_code == 400, (path, response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"
    assert daemon.streams == []


async def test_deep_nesting_inside_a_field_is_bounded():
    """A hostile value of a known field is refused without walking into it."""
    service, _ = make_service(says("x"))
    deep = b'{"messages": [{"role": "user", "content": "a"}], "response_format": ' + b"[" * 500 + b"]" * 500 + b"}"
    async with http_client(service) as client:
        response = await client.post(PATHS[CHAT], content=deep)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


async def test_unknown_models_are_404_and_text_parts_are_joined():
    """Another model's name is a 404; content in text parts is accepted."""
    service, daemon = make_service(says("x"), served_name="mine")
    async with http_client(service) as client:
        for path, endpoint in ((PATHS[e], e) for e in ENDPOINTS):
            response = await client.post(path, json={**BODIES[endpoint], "model": MODEL})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        for content in (parts, "a\nb"):
            body = {"model": "mine", "messages": [{"role": "user", "content": content}]}
            assert (await client.post(PATHS[CHAT], json=body)).status_code == 200
    assert daemon.streams[0].prompt == daemon.streams[1].prompt


def test_the_options_have_a_field_for_everything_that_is_built():
    """No built field is checked and then forgotten."""
    shown = {entry.name for entry in dataclasses.fields(Options)}
    elsewhere = {"stream_options", "max_completion_tokens", "top_logprobs", "best_of"}
    for endpoint in (COMPLETIONS, CHAT):
        built = {name for name, field in TABLES[endpoint].items() if field.use is Use.BUILT}
        assert built - shown <= elsewhere


def test_error_documents_are_the_apis():
    """The error object has exactly the four members."""
    from daemon.frontend.errors import bad_field

    assert json.loads(bad_field("n", "no").body()) == {
        "error": {"message": "n: no", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("literal", ["1e400", "-1e999"])
async def test_a_number_that_no_double_holds_is_refused_by_its_fields_name(endpoint: str, literal: str):
    """Every numeric field: the 400 names it, though the JSON decoder itself would only say where the digits stand."""
    service, daemon = make_service(says("x"))
    numeric = [name for name, field in TABLES[endpoint].items() if field.kind in (kinds.number, kinds.integer)]
    assert "temperature" in numeric
    async with http_client(service) as client:
        for name in numeric:
            body = json.dumps({**BODIES[endpoint], name: 0}).replace(f'"{name}": 0', f'"{name}": {literal}')
            response = await client.post(PATHS[endpoint], content=body, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert not daemon.streams


async def test_constants_that_are_not_json_stay_refused_beside_such_a_number():
    """NaN does not come in behind a number that the slow parser had to read."""
    service, daemon = make_service(says("x"))
    async with http_client(service) as client:
        for body in (b'{"prompt":"a","seed":1e400,"top_p":NaN}', b'{"prompt":"a","top_p":NaN}'):
            response = await client.post(PATHS[COMPLETIONS], content=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert not daemon.streams
