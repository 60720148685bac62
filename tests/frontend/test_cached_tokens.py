"""What a client learns of the prefix cache: cached tokens in the usage, what cut the hit, and salts that separate."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from daemon.frontend.fields import SALT_BYTES_MAX
from ipc.client_stream import Tokens
from ipc.handshake import Limits
from tests.frontend.double import Event, FakeStream, Script, accepted, events_of, finished, http_client, make_service
from tests.frontend.tokenizers_made import EOS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
Hit = tuple[int, int, str]


def hits(*per_choice: Hit) -> Script:
    """A script: one token a choice; choice k ends with the k-th hit, whatever the prompt."""

    async def script(stream: FakeStream) -> AsyncIterator[Event]:
        yield accepted(stream.message)
        for choice in range(stream.message.n):
            yield Tokens(choice, [EOS])
        for choice in range(stream.message.n):
            yield finished(stream.message, output=1, choice=choice, hit=per_choice[choice])

    return script


async def usages(script: Script, path: str, **body: object) -> list[dict[str, object] | None]:
    """The usage of the answer, or of every chunk of the stream."""
    service, _ = make_service(script)
    body |= {"messages": HELLO} if path == CHAT else {}
    async with http_client(service) as client:
        answer: httpx.Response = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [answer.json()["usage"]]
    return [json.loads(event).get("usage") for event in events_of(answer.text) if event != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_usage_says_what_was_cached_and_what_cut_the_hit(path: str, stream: bool) -> None:
    """In one piece and streamed, for both endpoints: the count where the API has it, the rest beside it."""
    fields: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    if path == TEXT:
        fields["prompt"] = [5] * 40
    *before, last = await usages(hits((16, 32, "state")), path, **fields)
    assert last is not None
    hit = {"cached_tokens": 16, "matched_tokens": 32, "hit_cut": "state"}
    assert last["prompt_tokens_details"] == {"cached_tokens": 16, "hits": [hit]}
    assert before == [None] * len(before), "only the last chunk has the usage"


async def test_a_hit_that_nothing_cut_has_no_kind() -> None:
    """The whole prompt but its last token was there: the kind is null."""
    (usage,) = await usages(hits((32, 32, "")), TEXT, prompt=[5] * 33)
    assert usage is not None
    assert usage["prompt_tokens_details"]["hits"][0]["hit_cut"] is None  # type: ignore[index]


async def test_of_several_choices_the_first_speaks_for_the_prompt() -> None:
    """The prompt is counted once, so what the later choices found of the first is no cached token."""
    (usage,) = await usages(hits((16, 16, "full"), (48, 48, ""), (48, 48, "")), TEXT, prompt=[5] * 49, n=3)
    assert usage is not None
    assert usage["prompt_tokens"] == 49
    hit = {"cached_tokens": 16, "matched_tokens": 16, "hit_cut": "full"}
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16, "hits": [hit]}


async def test_of_several_prompts_the_sum_is_told_and_each_hit() -> None:
    """Cached tokens never exceed the prompt tokens they are part of; hits stand in the order of the prompts."""

    async def script(stream: FakeStream) -> AsyncIterator[Event]:
        length = len(stream.prompt)
        yield accepted(stream.message)
        yield Tokens(0, [EOS])
        yield finished(stream.message, output=1, hit=(length - 1, length, "window:64"))

    (usage,) = await usages(script, TEXT, prompt=[[5] * 20, [6] * 30])
    assert usage is not None
    details = usage["prompt_tokens_details"]
    assert (usage["prompt_tokens"], details["cached_tokens"]) == (50, 48)  # type: ignore[index]
    assert [hit["cached_tokens"] for hit in details["hits"]] == [19, 29]  # type: ignore[index]


async def test_continuous_usage_does_not_guess() -> None:
    """Before the ends are known the details are null, not zero; the last usage has them."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await usages(hits((16, 16, "full")), CHAT, stream=True, stream_options=options)
    details = [usage["prompt_tokens_details"] for usage in found if usage is not None]
    assert details[0] is None
    assert details[-1] is not None
    assert details[-1]["cached_tokens"] == 16  # type: ignore[index]


@pytest.mark.parametrize(("path", "base"), [(TEXT, {"prompt": [5, 6]}), (CHAT, {"messages": HELLO})])
async def test_P6_a_salt_is_a_key_of_its_own_kind(path: str, base: dict[str, object]) -> None:
    """No salt shares with all; a salt goes to the daemon with its kind in front, even one that spells another kind."""
    service, daemon = make_service(hits((0, 0, "full")))
    async with http_client(service) as client:
        for salt in (None, "x", "lora:x", "\u00e9" * 100):
            answer = await client.post(path, json={**base, "cache_salt": salt})
            assert answer.status_code == 200, answer.text
    spaces = [stream.message.namespace for stream in daemon.streams]
    assert spaces == ["", "salt:x", "salt:lora:x", "salt:" + "\u00e9" * 100]


def test_every_salt_that_is_taken_fits_the_message() -> None:
    """The longest salt and its kind stay within what the daemon takes of a namespace."""
    assert len("salt:") + SALT_BYTES_MAX <= Limits().namespace_bytes_max
