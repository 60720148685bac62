"""Hang-ups: whatever a request is doing when its client leaves, the daemon is told, once, and soon (C10)."""

from __future__ import annotations

import json
import threading

import pytest
import trio
import trio.testing

from daemon.frontend.app import build_app
from ipc.client_stream import Tokens
from tests.frontend.double import accepted, finished, make_service
from tests.frontend.tokenizers_made import byte_level

LARGE = "word " * 20_000


class Client:
    """An ASGI client that can leave at any moment and may refuse to read."""

    def __init__(self, body, reads=True):
        self.body = json.dumps(body).encode()
        self.sent = []
        self.reads = reads
        self.left = trio.Event()
        self.got = trio.Event()
        self._body_given = False

    async def receive(self):
        """The body, then nothing until the client leaves."""
        if not self._body_given:
            self._body_given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        """Take a message; a client that does not read holds the sender for ever, shielded as the server's socket is."""
        self.sent.append(message)
        self.got.set()
        if not self.reads and message["type"] == "http.response.body":
            with trio.CancelScope(shield=True):
                await self.never.wait()

    never = None

    async def call(self, app, path):
        """The whole request."""
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        scope |= {"raw_path": path.encode(), "root_path": "", "scheme": "http", "http_version": "1.1"}
        await app(scope, self.receive, self.send)


def stages():
    """Scripts that stop at each stage of a request's life, and set `reached` there."""

    async def queue(fake, reached):
        reached.set()
        await trio.sleep_forever()
        yield

    async def prefill(fake, reached):
        yield accepted(fake.message)
        reached.set()
        await trio.sleep_forever()

    async def decode(fake, reached):
        yield accepted(fake.message)
        for token in byte_level().encode("some text", False):
            yield Tokens(0, [token])
        reached.set()
        await trio.sleep_forever()

    async def behind_a_stop_string(fake, reached):
        yield accepted(fake.message)
        yield Tokens(0, byte_level().encode("one END two", False))
        reached.set()
        await trio.sleep_forever()

    async def one_choice_ended(fake, reached):
        yield accepted(fake.message)
        yield Tokens(0, byte_level().encode("one", False))
        yield finished(fake.message, "length", 1, 0)
        reached.set()
        await trio.sleep_forever()

    return [queue, prefill, decode, behind_a_stop_string, one_choice_ended]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", stages(), ids=lambda stage: stage.__name__)
async def test_leaving_at_any_stage_aborts_once(stage, stream):
    """Queue, prefill, decode, after a stop string, with one of two choices ended: one abort, and the task is gone."""
    reached = trio.Event()
    service, daemon = make_service(lambda fake: stage(fake, reached))
    client = Client({"prompt": "x", "stream": stream, "n": 2, "stop": "END", "max_tokens": 50})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call, build_app(service), "/v1/completions")
        await reached.wait()
        client.left.set()
    assert [(fake.aborts, fake.ended) for fake in daemon.streams] == [(1, False)]
    assert service.open_requests == 0


async def test_every_prompt_of_a_request_is_aborted():
    """A request of several prompts gives all of them back."""
    reached = trio.Event()

    async def script(fake):
        yield accepted(fake.message)
        if len(daemon.streams) == 3:
            reached.set()
        await trio.sleep_forever()

    service, daemon = make_service(script)
    client = Client({"prompt": ["a", "b", "c"]})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call, build_app(service), "/v1/completions")
        await reached.wait()
        client.left.set()
    assert [fake.aborts for fake in daemon.streams] == [1, 1, 1]


async def test_a_client_that_does_not_read_and_leaves_is_aborted_though_the_send_hangs():
    """The send is stuck in the socket; the abort does not wait for it."""

    async def script(fake):
        yield accepted(fake.message)
        yield Tokens(0, byte_level().encode("text", False))
        await trio.sleep_forever()

    service, daemon = make_service(script)
    client = Client({"prompt": "x", "stream": True}, reads=False)
    client.never = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call, build_app(service), "/v1/completions")
        await client.got.wait()
        await trio.testing.wait_all_tasks_blocked()
        client.left.set()
        await trio.testing.wait_all_tasks_blocked()
        assert daemon.streams[0].aborts == 1
        client.never.set()


async def test_leaving_while_a_large_prompt_is_tokenized_sends_nothing():
    """The thread's work is abandoned, and the daemon never hears of the request."""
    service, daemon = make_service(lambda fake: None)
    client = Client({"prompt": LARGE})
    started = trio.Event()
    prepare = service.prepare

    over = threading.Event()  # the thread is not done before the client has left, however fast it is

    async def watched(function, *arguments, **options):
        started.set()
        return await prepare(lambda: (over.wait(10), function(*arguments))[1], **options)

    service.prepare = watched
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call, build_app(service), "/v1/completions")
        await started.wait()
        client.left.set()
    over.set()
    assert (daemon.streams, client.sent) == ([], [])


async def test_leaving_inside_the_body_ends_quietly():
    """A client that goes before its body is complete leaves nothing behind."""

    class Half(Client):
        async def receive(self):
            message = await super().receive()
            return message | {"more_body": True} if message["type"] == "http.request" else message

    service, daemon = make_service(lambda fake: None)
    client = Half({"prompt": "x"})
    client.left.set()
    await client.call(build_app(service), "/v1/completions")
    assert (daemon.streams, client.sent, service.open_requests) == ([], [], 0)


async def test_a_finished_request_is_not_aborted():
    """The disconnect that follows a whole answer is no hang-up."""

    async def script(fake):
        yield accepted(fake.message)
        yield finished(fake.message, "length", 0)

    service, daemon = make_service(script)
    client = Client({"prompt": "x"})
    await client.call(build_app(service), "/v1/completions")
    assert [(fake.aborts, fake.ended) for fake in daemon.streams] == [(0, True)]
    assert client.sent[0]["status"] == 200
