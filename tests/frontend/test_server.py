"""The real HTTP server on a loopback port: the openai client, hang-ups on sockets, hostile bytes, the stop sequence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import openai
import pytest
import trio
import trio.testing
from hypercorn.protocol.h11 import H11Protocol

from daemon.frontend.app import build_app
from daemon.frontend.server import serve_http
from daemon.listening import listen, url_of
from ipc.client_stream import Tokens
from tests.frontend.double import MODEL, accepted, events_of, finished, make_service, refused, says
from tests.frontend.tokenizers_made import byte_level

HELLO = [{"role": "user", "content": "hello"}]
TEXT = "naïve 👩‍👩‍👧‍👦 answer, in several words"


@asynccontextmanager
async def serving(service, grace_s=1.0) -> AsyncIterator[str]:
    """The URL of a running server; it is stopped as SIGTERM stops it."""
    bound = listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, build_app(service), service, bound, grace_s)
        yield url_of(bound)
        service.drain()


async def in_thread(function, *arguments, **options):
    """A blocking client's call."""
    return await trio.to_thread.run_sync(partial(function, *arguments, **options))


def openai_client(url, key="key"):
    """The client our users have."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)


async def test_the_openai_client_chats_and_completes():
    """Models, chat and completions, streamed and not, with usage, logprobs fields and our extension fields."""
    service, daemon = make_service(says(TEXT), api_keys=("key",))
    async with serving(service) as url:
        client = openai_client(url)
        models = await in_thread(lambda: [model.id for model in client.models.list()])
        assert models == [MODEL]
        whole = await in_thread(client.chat.completions.create, model=MODEL, messages=HELLO)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (TEXT, "stop")

        def streamed():
            options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"top_k": 3}}
            return list(client.chat.completions.create(model=MODEL, messages=HELLO, **options))

        *parts, last = await in_thread(streamed)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == TEXT
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        assert daemon.streams[-1].message.sampling.top_k == 3
        text = await in_thread(client.completions.create, model=MODEL, prompt="x", max_tokens=60, n=2)
        assert [choice.text for choice in text.choices] == [TEXT, TEXT]


async def test_the_openai_client_sees_errors_as_its_own():
    """Wrong key, wrong field, unknown model, full queue and an end in mid-stream arrive as the client's exceptions."""

    async def script(fake):
        if fake.message.n == 2:
            yield refused(fake.message, "queue_full", "full", retry_after_ms=100)
            return
        yield accepted(fake.message)
        yield Tokens(0, byte_level().encode("some", False))
        yield finished(fake.message, "memory", 1, detail="nothing left")

    service, _ = make_service(script, api_keys=("key",))
    async with serving(service) as url:
        create = openai_client(url).chat.completions.create
        with pytest.raises(openai.AuthenticationError):
            await in_thread(openai_client(url, "other").chat.completions.create, model=MODEL, messages=HELLO)
        with pytest.raises(openai.BadRequestError) as bad:
            await in_thread(create, model=MODEL, messages=HELLO, temperature=3)
        assert (bad.value.param, bad.value.code) == ("temperature", "out_of_range")
        with pytest.raises(openai.NotFoundError):
            await in_thread(create, model="other", messages=HELLO)
        with pytest.raises(openai.RateLimitError) as full:
            await in_thread(create, model=MODEL, messages=HELLO, n=2)
        assert full.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError, match="nothing left") as ended:
            await in_thread(lambda: list(create(model=MODEL, messages=HELLO, stream=True)))
        assert ended.value.code == "out_of_memory"


async def test_sixty_four_streams_at_once_finish_whole():
    """Concurrent streams each get their own text and the end mark."""
    service, _ = make_service(says(TEXT, per_event=2))
    texts = []

    async def one(client):
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 90, "stream": True})
        texts.append(events_of(response.text))

    async with (
        serving(service) as url,
        httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=64)) as client,
        trio.open_nursery() as nursery,
    ):
        for _ in range(64):
            nursery.start_soon(one, client)
    assert len(texts) == 64
    assert all(events[-1] == "[DONE]" for events in texts)


def request_bytes(body=b'{"prompt": "x", "stream": true}', path=b"/v1/completions"):
    """One HTTP request as bytes."""
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, len(body))
    return head + body


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_closing_the_socket_aborts(stream):
    """A client that closes its connection while its request runs: the daemon is told."""
    started, aborted = trio.Event(), trio.Event()

    async def script(fake):
        yield accepted(fake.message)
        yield Tokens(0, byte_level().encode("text", False))
        started.set()
        await fake.told.wait()
        aborted.set()
        await trio.sleep_forever()

    service, daemon = make_service(script)
    async with serving(service) as url:
        port = int(url.rsplit(":", 1)[1])
        connection = await trio.open_tcp_stream("127.0.0.1", port)
        await connection.send_all(request_bytes(b'{"prompt": "x", "stream": %b}' % stream))
        await started.wait()
        await connection.aclose()
        with trio.fail_after(10):
            while service.open_requests:
                await trio.testing.wait_all_tasks_blocked(0.01)
    assert daemon.streams[0].aborts == 1


HOSTILE = [
    b"\x00\xff" * 500,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /%ff%fe%00 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/models/%2e%2e%2f%0d%0a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\nshort",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\nabc",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 400,
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: !!\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    request_bytes() * 20,
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_bytes_do_not_end_the_server(data):
    """Whatever a connection sends, the next one is served."""
    service, _ = make_service(says("x"))
    async with serving(service, 0.2) as url:
        connection = await trio.open_tcp_stream("127.0.0.1", int(url.rsplit(":", 1)[1]))
        async with connection:
            try:
                await connection.send_all(data)
                with trio.move_on_after(0.2):
                    while await connection.receive_some():
                        pass
            except trio.BrokenResourceError:
                pass
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/version")).status_code == 200


async def test_an_upgrade_to_http2_is_ignored():
    """An h2c offer is answered in HTTP/1.1; the hook that does it is still hypercorn's."""
    assert callable(H11Protocol._check_protocol)
    service, _ = make_service(says("x"))
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    async with serving(service) as url:
        connection = await trio.open_tcp_stream("127.0.0.1", int(url.rsplit(":", 1)[1]))
        await connection.send_all(b"GET /version HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n")
        answer = await connection.receive_some()
        await connection.aclose()
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_an_oversized_body_is_answered_before_it_is_sent_whole():
    """A body of many times the limit gets its 413, and the server goes on."""
    service, _ = make_service(says("x"), body_limit_bytes=10_000)
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as client:
        small = await client.post("/v1/completions", content=b" " * 20_000)
        assert small.status_code == 413
        try:
            large = await client.post("/v1/completions", content=b" " * 20_000_000)
            assert large.status_code == 413
        except (httpx.WriteError, httpx.ReadError):
            pass  # the connection was closed while it still sent: allowed, the answer is lost with it
        assert (await client.get("/version")).status_code == 200


async def test_draining_finishes_open_streams_and_refuses_new_requests():
    """As at SIGTERM: the open stream gets its end mark, a new request a 503, and the server returns."""
    go_on = trio.Event()

    async def script(fake):
        yield accepted(fake.message)
        yield Tokens(0, byte_level().encode("one", False))
        await go_on.wait()
        yield Tokens(0, byte_level().encode(" two", False))
        yield finished(fake.message, "length", 2)

    service, daemon = make_service(script)
    answers = []
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as client:

        async def open_one():
            answers.append(await client.post("/v1/completions", json={"prompt": "x", "stream": True}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_one)
            while not daemon.streams:
                await trio.testing.wait_all_tasks_blocked(0.01)
            service.drain()
            refused_one = await client.post("/v1/completions", json={"prompt": "x"})
            go_on.set()
    assert (refused_one.status_code, refused_one.json()["error"]["code"]) == (503, "draining")
    assert events_of(answers[0].text)[-1] == "[DONE]"
    assert service.idle.is_set()
