"""Log probabilities in both shapes of the API, of output and of echoed prompts."""

from __future__ import annotations

import json

import pytest

from ipc.client_stream import Tokens
from tests.frontend.double import accepted, columns, events_of, finished, http_client, make_service
from tests.frontend.tokenizers_made import byte_level

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ID = {piece: index for index, piece in enumerate(byte_level().pieces.visible) if piece}
A, B, LEAD = ID[b"a"], ID[b"b"], ID["é".encode()[:1]]


def script(fake):
    """Two output tokens with two alternatives each, one of them minus infinity; prompt positions if asked."""

    async def events():
        yield accepted(fake.message)
        sampling = fake.message.sampling
        if sampling.prompt_logprobs >= 0:
            for position in range(1, len(fake.prompt)):
                yield Tokens(0, prompt_logprobs=[(position, columns(1, (-0.25, [(B, -0.125)])))])
        if fake.message.max_tokens != 0:
            first, second = [(A, -0.5), (LEAD, -2.0)], [(LEAD, -0.25), (A, float("-inf"))]
            yield Tokens(0, [A], [columns(2, (-0.5, first))])
            yield Tokens(0, [B], [columns(2, (-3.0, second))])
        yield finished(fake.message, "length", 2 if fake.message.max_tokens != 0 else 0)

    return events()


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_shape(stream):
    """One object for each token with its bytes; minus infinity is the API's floor."""
    service, daemon = make_service(script)
    fields = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "stream": stream}
    async with http_client(service) as client:
        response = await client.post(CHAT, json=fields)
    if stream:
        parts = [json.loads(event) for event in events_of(response.text)[:-1]]
        found = [part["choices"][0]["logprobs"] for part in parts]
        content = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert daemon.streams[0].message.sampling.logprobs == 2
    assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in content] == [
        ("a", -0.5, [97]),
        ("b", -3.0, [98]),
    ]
    assert [(top["token"], top["logprob"], top["bytes"]) for top in content[1]["top_logprobs"]] == [
        ("\ufffd", -0.25, [0xC3]),
        ("a", -9999.0, [97]),
    ]


async def test_completion_shape_with_echo():
    """Four lists over prompt and output; the first token has null; the chosen token is always among the best."""
    service, daemon = make_service(script)
    fields = {"prompt": [B, A, LEAD], "logprobs": 2, "echo": True, "max_tokens": 2}
    async with http_client(service) as client:
        choice = (await client.post(TEXT, json=fields)).json()["choices"][0]
    assert daemon.streams[0].message.sampling.prompt_logprobs == 2
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["b", "a", "bytes:\\xc3", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5, -3.0]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"b": -0.125, "a": -0.25}
    assert logprobs["top_logprobs"][4] == {"bytes:\\xc3": -0.25, "a": -9999.0, "b": -3.0}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_echo_without_output_scores_the_prompt(logprobs):
    """max_tokens 0 with echo: the prompt, its scores if asked for, and no output."""
    service, _ = make_service(script)
    fields = {"prompt": [B, A], "logprobs": logprobs, "echo": True, "max_tokens": 0}
    async with http_client(service) as client:
        body = (await client.post(TEXT, json=fields)).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("ba", 0)
    found = body["choices"][0]["logprobs"]
    assert found is None if logprobs is None else found["token_logprobs"] == [None, -0.25]


async def test_streamed_completion_logprobs_join_to_the_whole():
    """Lists of all chunks joined are the lists of the whole answer, offsets included."""
    service, _ = make_service(script)
    fields = {"prompt": [B, A], "logprobs": 1, "echo": True, "max_tokens": 2}
    async with http_client(service) as client:
        whole = (await client.post(TEXT, json=fields)).json()["choices"][0]["logprobs"]
        streamed = await client.post(TEXT, json={**fields, "stream": True})
    joined = {name: [] for name in whole}
    for event in events_of(streamed.text)[:-1]:
        for name, values in json.loads(event)["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == whole
