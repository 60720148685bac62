"""Completions and chat over HTTP, in one process, against a scripted daemon."""

from __future__ import annotations

import json

import pytest

from tests.frontend.double import MODEL, events_of, http_client, make_service, says
from tests.frontend.tokenizers_made import EOS, byte_level

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def post(service, path, **body):
    """The answer to one request."""
    async with http_client(service) as client:
        return await client.post(path, json=body)


def chunks(response):
    """The parsed chunks of a successful stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def test_chat_answers_in_one_piece():
    """A chat request is rendered by the template, sent with the model's end ids, and answered with usage."""
    service, daemon = make_service(says("Hello wörld 👍🏽"))
    response = await post(service, CHAT, model=MODEL, messages=HELLO)
    assert response.status_code == 200
    body = response.json()
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello wörld 👍🏽", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    stream = daemon.streams[0]
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert stream.prompt == byte_level().encode(rendered, False)
    assert stream.message.stop_ids == EOS.to_bytes(8, "little")
    assert (stream.message.max_tokens, stream.message.clip) == (None, True)
    tokens = len(byte_level().encode("Hello wörld 👍🏽", False)) + 1
    assert body["usage"]["prompt_tokens"] == len(stream.prompt)
    assert body["usage"]["completion_tokens"] == tokens
    assert body["usage"]["total_tokens"] == len(stream.prompt) + tokens
    assert (stream.ended, stream.aborts) == (True, 0)


@pytest.mark.parametrize("per_event", [1, 3, 100])
async def test_chat_streams_deltas_that_join_to_the_answer(per_event):
    """Role first, then text, then the reason; usage when asked for, then the end mark."""
    service, _ = make_service(says("naïve 👩‍👩‍👧 text", per_event=per_event))
    options = {"include_usage": True}
    response = await post(service, CHAT, messages=HELLO, stream=True, stream_options=options)
    *parts, last = chunks(response)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "naïve 👩‍👩‍👧 text"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert all(part["object"] == "chat.completion.chunk" and part["usage"] is None for part in parts)
    assert (last["choices"], last["usage"]["completion_tokens"]) == (
        [],
        len(byte_level().encode("naïve 👩‍👩‍👧 text", False)) + 1,
    )
    assert len({part["id"] for part in parts}) == 1


async def test_completion_defaults_are_the_apis():
    """Sixteen tokens when no limit is given, clipped to the model's length; the prompt is not shown."""
    service, daemon = make_service(says("a b c d e f g h i j k l m n o p q r s", "length"))
    body = (await post(service, TEXT, model=MODEL, prompt="one two")).json()
    assert (daemon.streams[0].message.max_tokens, daemon.streams[0].message.clip) == (16, True)
    assert body["usage"]["completion_tokens"] == 16
    assert (body["object"], body["choices"][0]["finish_reason"]) == ("text_completion", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_choices_are_numbered_prompt_first(stream):
    """Two prompts with n=2 give indexes 0..3; each prompt is one message to the daemon with n choices."""
    service, daemon = make_service(says("ok"))
    fields = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 9, "stream": stream}
    response = await post(service, TEXT, **fields)
    if stream:
        texts = {}
        for part in chunks(response):
            for choice in part["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    else:
        texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
        assert response.json()["usage"]["prompt_tokens"] == 3
    assert texts == dict.fromkeys(range(4), "ok")
    assert sorted((s.prompt, s.message.n) for s in daemon.streams) == [([5, 6], 2), ([7], 2)]
    assert len({s.message.id for s in daemon.streams}) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_over_token_borders_ends_and_counts_up_to_the_match(stream, include):
    """The text is cut at the match, the daemon is told the token count, usage counts up to the match."""
    text = "hello, you stop sign here"
    service, daemon = make_service(says(text))
    fields = {"prompt": "x", "stop": ["zzz", "op si"], "max_tokens": 90, "include_stop_str_in_output": include}
    response = await post(
        service, TEXT, stream=stream, stream_options={"include_usage": True} if stream else None, **fields
    )
    ids = byte_level().encode(text, False)
    count = next(k for k in range(len(ids)) if "op si" in byte_level().decode(ids[:k]))
    if stream:
        *parts, last = chunks(response)
        shown = "".join(part["choices"][0]["text"] for part in parts)
        choice, usage = parts[-1]["choices"][0], last["usage"]
    else:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        shown = choice["text"]
    assert shown == "hello, you st" + ("op si" if include else "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "op si")
    assert usage["completion_tokens"] == count
    assert daemon.streams[0].finish_asked == [(0, count)]


async def test_min_tokens_lets_an_early_stop_string_pass():
    """A stop string that ends before min_tokens is text like any other."""
    service, daemon = make_service(says("stop and stop"))
    first = len(byte_level().encode("stop and", False))
    body = (await post(service, TEXT, prompt="x", stop="stop", min_tokens=first, max_tokens=50)).json()
    assert body["choices"][0]["text"] == "stop and "
    assert daemon.streams[0].message.min_tokens == first


async def test_stop_token_ids_end_without_being_shown():
    """A client's stop id is sent with the model's own, its text is not shown, and it is named as the reason."""
    tokenizer = byte_level()
    ids = tokenizer.encode("well then", False)
    service, daemon = make_service(says("well then"))
    fields = {"prompt": "x", "max_tokens": len(ids), "stop_token_ids": [ids[-1]]}
    choice = (await post(service, TEXT, **fields)).json()["choices"][0]
    assert choice["text"] == tokenizer.decode(ids[:-1])
    assert choice["stop_reason"] == ids[-1]
    fields |= {"include_stop_str_in_output": True, "ignore_eos": True}
    choice = (await post(service, TEXT, **fields)).json()["choices"][0]
    assert choice["text"] == "well then"
    assert daemon.streams[1].message.stop_ids == ids[-1].to_bytes(8, "little")


async def test_token_ids_are_returned_when_asked_for():
    """`return_token_ids` gives output and prompt ids; a stream's ids joined are the whole answer's."""
    service, daemon = make_service(says("hello world"))
    expected = [*byte_level().encode("hello world", False), EOS]
    whole = (await post(service, TEXT, prompt=[9, 8], return_token_ids=True)).json()["choices"][0]
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (expected, [9, 8])
    for path, fields in ((TEXT, {"prompt": [9, 8]}), (CHAT, {"messages": HELLO})):
        parts = chunks(await post(service, path, return_token_ids=True, stream=True, **fields))
        assert [token for part in parts for token in part["choices"][0]["token_ids"]] == expected
        prompt_ids = [part["choices"][0].get("prompt_token_ids") for part in parts]
        assert prompt_ids[0] == daemon.streams[-1].prompt
        assert prompt_ids[1:] == [None] * (len(parts) - 1)


async def test_every_sampling_field_reaches_the_daemon():
    """What the client sends is what the daemon gets."""
    service, daemon = make_service(says("x"))
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": -5,
    }
    response = await post(service, CHAT, messages=HELLO, priority=-3, max_completion_tokens=11, min_tokens=4, **fields)
    assert response.status_code == 200
    message = daemon.streams[0].message
    assert {name: getattr(message.sampling, name) for name in fields} == fields
    assert (message.priority, message.max_tokens, message.min_tokens, message.clip) == (-3, 11, 4, False)
    assert message.namespace == "", "without a salt prefixes are shared"
    assert (message.deadline_ms, message.store, message.pin_ms) == (0, True, 0)
    await post(service, CHAT, messages=HELLO, top_k=-1)
    assert daemon.streams[1].message.sampling.top_k == 0


async def test_deadline_and_cache_fields_reach_the_daemon():
    """As given, for both endpoints; a pin without anything to pin is refused by its name."""
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hello"})):
        service, daemon = make_service(says("hi"))
        answer = await post(service, path, deadline_ms=1500, cache_pin_ms=60_000, **body)
        assert answer.status_code == 200, answer.text
        await post(service, path, cache_store=False, **body)
        first, second = (stream.message for stream in daemon.streams)
        assert (first.deadline_ms, first.store, first.pin_ms) == (1500, True, 60_000)
        assert (second.deadline_ms, second.store, second.pin_ms) == (0, False, 0)
        refused = await post(service, path, cache_store=False, cache_pin_ms=1, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_pin_ms")


async def test_echo_shows_the_prompt_first():
    """The prompt's text precedes the output; with max_tokens 0 it is all there is."""
    service, daemon = make_service(says(" two"))
    body = (await post(service, TEXT, prompt="one é", echo=True, max_tokens=9)).json()
    assert body["choices"][0]["text"] == "one é two"
    service, daemon = make_service(says("", "length"))
    body = (await post(service, TEXT, prompt="one é", echo=True, max_tokens=0)).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("one é", 0)
    assert (daemon.streams[0].message.max_tokens, daemon.streams[0].message.sampling.prompt_logprobs) == (0, 0)
