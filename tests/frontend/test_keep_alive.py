"""Streams that are silent for long: comments keep proxies from closing them, and change nothing of what is said."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from daemon.frontend.app import build_app
from daemon.frontend.streaming import KEEP_ALIVE
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from tests.frontend.double import accepted, events_of, finished, make_service
from tests.frontend.test_hang_up import Client
from tests.frontend.tokenizers_made import byte_level

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True}


class Timed(Client):
    """Notes when each part of the body came; reading one takes `takes_s`."""

    def __init__(self, body, takes_s=0.0):
        super().__init__(body)
        self.takes_s = takes_s
        self.at = []
        self.inside = 0

    async def send(self, message):
        """One at a time, or the wire would be a mixture."""
        assert not self.inside
        self.inside += 1
        await trio.sleep(self.takes_s)
        self.inside -= 1
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.at.append((trio.current_time() - self.began_s, message["body"]))

    async def follow(self, service):
        """The whole request."""
        self.began_s = trio.current_time()
        await self.call(build_app(service), CHAT)

    @property
    def comments_at(self):
        """When a comment came."""
        return [at for at, body in self.at if body == KEEP_ALIVE]

    @property
    def text(self):
        """The answer's text."""
        events = events_of(b"".join(body for _, body in self.at).decode())
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


def silent(*pauses_s):
    """A script: accepted, and a token behind each pause."""
    ids = byte_level().encode("abcdefgh", False)

    async def script(fake):
        yield accepted(fake.message)
        for number, pause_s in enumerate(pauses_s):
            await trio.sleep(pause_s)
            yield Tokens(0, ids[number : number + 1])
        yield finished(fake.message, "length", len(pauses_s))

    return script


async def test_a_stream_that_is_silent_says_that_it_lives(autojump_clock: trio.testing.MockClock):
    """A comment after each 15 s without anything, none while there is something to be said; the text is the same."""
    service, _ = make_service(silent(50, 10, 14, 16))
    client = Timed(BODY)
    await client.follow(service)
    assert client.comments_at == pytest.approx([15, 30, 45, 89])
    assert client.text == "abcd"


async def test_comments_can_be_turned_off(autojump_clock: trio.testing.MockClock):
    """With 0 nothing is sent but the answer."""
    service, _ = make_service(silent(50, 10), sse_keepalive_s=0)
    client = Timed(BODY)
    await client.follow(service)
    assert client.comments_at == []
    assert client.text == "ab"


async def test_comments_and_chunks_do_not_mix(autojump_clock: trio.testing.MockClock):
    """A client that takes 3 s for everything, and comments each 2 s: one after the other, and all of the text."""
    service, _ = make_service(silent(1, 4, 7, 2, 1), sse_keepalive_s=2)
    client = Timed(BODY, takes_s=3)
    await client.follow(service)
    assert client.text == "abcde"
    assert client.comments_at


async def test_before_the_daemon_accepted_nothing_is_sent(autojump_clock: trio.testing.MockClock):
    """The status line waits for it, so that a refusal is a plain answer; and no comment comes behind the end."""

    async def script(fake):
        await trio.sleep(100)
        yield accepted(fake.message)
        await trio.sleep(20)
        raise DaemonLost("it is gone")

    service, _ = make_service(script)
    client = Timed(BODY)
    await client.follow(service)
    await trio.sleep(100)
    assert client.comments_at == pytest.approx([115])
    assert client.sent[0]["type"] == "http.response.start"
    assert b"daemon_lost" in client.at[-2][1]
    assert client.at[-1] == (pytest.approx(120), b"")


async def test_a_client_that_leaves_in_a_silence_ends_its_request(autojump_clock: trio.testing.MockClock):
    """Also while a comment is on its way."""
    service, daemon = make_service(silent(1000))
    client = Timed(BODY, takes_s=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.follow, service)
        while not client.inside or trio.current_time() - client.began_s < 10:
            await trio.sleep(0.1)
        client.left.set()
    assert daemon.streams[0].aborts == 1
    assert trio.current_time() - client.began_s < 60
