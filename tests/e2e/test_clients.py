"""Clients as they come: the `openai` package, httpx, many at once; and requests that are wrong in one field."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
import trio

from tests.e2e.harness import client, collect, completion, eventually, gauge, idle
from tools.own_server import OwnServer

STREAMS = 64


@pytest.fixture
def api(shared: OwnServer) -> openai.OpenAI:
    """The client that our users have."""
    return openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_chat_through_the_openai_client(shared: OwnServer, api: openai.OpenAI) -> None:
    """A streamed chat gives, joined, the text of the same chat unstreamed, with a finish reason and usage."""
    model = api.models.list().data[0].id
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 12}
    whole = api.chat.completions.create(**asked, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    parts, last, counts = [], None, None
    for chunk in api.chat.completions.create(
        **asked, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.choices:
            parts.append(chunk.choices[0].delta.content or "")
            last = chunk.choices[0].finish_reason or last
        counts = chunk.usage or counts
    assert "".join(parts) == whole.choices[0].message.content
    assert last == "length"
    assert counts is not None
    assert (counts.prompt_tokens, counts.completion_tokens) == (whole.usage.prompt_tokens, 12)


def test_completions_through_the_openai_client(shared: OwnServer, api: openai.OpenAI) -> None:
    """Several choices, log probabilities and echo come back in the API's shape."""
    made = api.completions.create(model=api.models.list().data[0].id, prompt="One two", max_tokens=4, n=3, logprobs=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    for choice in made.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == 4
    echoed = api.completions.create(model=api.models.list().data[0].id, prompt="One two", max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith("One two")


async def test_many_streams_at_once(shared: OwnServer) -> None:
    """64 concurrent streams all finish, each with its own tokens, equal to what it gives alone."""
    outputs: dict[int, dict[str, Any]] = {}
    async with client(shared) as http:
        http_many = httpx.AsyncClient(
            base_url=shared.url, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=STREAMS)
        )
        async with http_many, trio.open_nursery() as nursery:

            async def one(index: int) -> None:
                outputs[index] = await collect(http_many, completion(24, prompt=5 + index, seed=index))

            for index in range(STREAMS):
                nursery.start_soon(one, index)
        assert len(outputs) == STREAMS
        assert {output["finish"] for output in outputs.values()} == {"length"}, outputs
        assert {len(output["tokens"]) for output in outputs.values()} == {24}
        for index in (0, 17, 63):
            alone = await collect(http, completion(24, prompt=5 + index, seed=index))
            assert alone["tokens"] == outputs[index]["tokens"]
    eventually(lambda: idle(shared), "everything is given back")


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [10**9]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": "8"}),
    ("max_tokens", {"max_tokens": 10**9}),
    ("min_tokens", {"min_tokens": 9}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 1e9}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.5}),
    ("min_p", {"min_p": 2}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("n", {"n": 0}),
    ("n", {"n": 10**6}),
    ("best_of", {"best_of": 2}),
    ("logprobs", {"logprobs": 999}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": [1]}),
    ("stop_token_ids", {"stop_token_ids": [10**9]}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("echo", {"echo": 1}),
    ("ignore_eos", {"ignore_eos": "no"}),
    ("priority", {"priority": 0.5}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("suffix", {"suffix": "end"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("guided_json", {"guided_json": {}}),
    ("no_such_field", {"no_such_field": 1}),
]


@pytest.mark.parametrize(("field", "wrong"), WRONG, ids=[f"{field}={body[field]!r}"[:40] for field, body in WRONG])
def test_a_wrong_field_is_named(shared: OwnServer, field: str, wrong: dict[str, Any]) -> None:
    """A malformed, out-of-range or unsupported field is a 400 whose error names it; nothing reaches the core."""
    before = gauge(shared, "requests_accepted_total")
    body = {"prompt": "Hello", "max_tokens": 8} | wrong
    answer = httpx.post(f"{shared.url}/v1/completions", json=body, timeout=30, trust_env=False)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert str(error["param"]).startswith(field), error
    assert field in error["message"]
    assert gauge(shared, "requests_accepted_total") == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": ' + b"[" * 5000, b'"text"', b"\0" * 64])
def test_a_broken_body_is_refused(shared: OwnServer, body: bytes) -> None:
    """What is not a JSON object is a 400 in the API's error shape."""
    answer = httpx.post(f"{shared.url}/v1/completions", content=body, timeout=30, trust_env=False)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_other_paths_answer_in_the_api_shape(shared: OwnServer) -> None:
    """Unknown paths, models and methods are told apart, and an oversized body is refused by its size."""
    http = httpx.Client(base_url=shared.url, timeout=30, trust_env=False)
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    unknown = http.post("/v1/completions", json={"model": "no-such-model", "prompt": "a"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "model"
    large = http.post("/v1/completions", content=b'{"prompt": "' + b"a" * (9 << 20) + b'"}')
    assert large.status_code == 413
    assert http.get("/health").json()["ready"] is True
