"""Answer: one completion or chat request from its body to its last byte, and what happens when the client leaves.

Owns the request's nursery: one task works, one listens for the hang-up. Must never hold a request open for a client
that is gone: the daemon is told at once, whatever the working task waits for.
"""

from __future__ import annotations

import uuid
from typing import Any

import trio

from daemon.frontend.envelope import Receive, Scope, Send
from daemon.frontend.errors import JSON_TYPE, ApiError
from daemon.frontend.generation import Generation
from daemon.frontend.prepare import Prepared, prepare_generation
from daemon.frontend.render import Renderer
from daemon.frontend.schemas import CHAT
from daemon.frontend.service import Service
from daemon.frontend.sizes import Body
from daemon.frontend.streaming import StreamSink, WholeSink

DISCARD_FACTOR = 4  # how far beyond the limit an oversized body is read, so that its client sees the answer

LEAVE_ROUNDS = 5  # turns of the loop in which cancelled tasks leave their streams by themselves


async def read_body(receive: Receive, body: Body, limit_bytes: int, timeout_s: float) -> None:
    """Read the whole of `body`; raises ApiError 413, 408, or 503 when there is no room, and HungUp."""
    size = 0
    with trio.move_on_after(timeout_s) as patience:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise HungUp
            part = message.get("body", b"")
            size += len(part)
            if size <= limit_bytes:
                body.add(part)
            else:
                body.release()
            if not message.get("more_body", False) or size > limit_bytes * DISCARD_FACTOR:
                break
    if patience.cancelled_caught:
        raise ApiError(408, f"The body did not arrive within {timeout_s:g} s", code="body_timeout")
    if size > limit_bytes:
        text = f"The body has {size} bytes or more; at most {limit_bytes} are taken"
        raise ApiError(413, text, code="body_too_large", headers={"Connection": "close"})
    body.check()


class HungUp(Exception):
    """The client left; nobody is there to answer."""


class Answer:
    """Serves one completion or chat request; an ASGI application of its own."""

    def __init__(self, service: Service, endpoint: str) -> None:
        self._service = service
        self._endpoint = endpoint
        self._generation: Generation | None = None
        self._facts: dict[str, Any] = {}
        self._end = "hang_up"  # until it is known better

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, check, generate, send; returns when the answer is out or the client is gone."""
        scope["facts"] = self._facts
        try:
            await self._serve(scope, receive, send)
        except HungUp:
            pass
        except ApiError as error:
            self._end = error.code or str(error.status)
            raise
        finally:
            self._facts["end"] = self._end
            self._service.metrics.ends.labels(self._endpoint, self._end).inc()
            if self._generation is not None:
                self._note(self._generation)

    def _note(self, generation: Generation) -> None:
        first_s, hits = generation.first_token_s, generation.hits
        self._facts |= {
            "choices": len(generation.choices),
            "prompt_tokens": generation.prompt_tokens,
            "output_tokens": generation.output_tokens,
            "cached_tokens": None if hits is None else sum(hit.cached_tokens for hit in hits),
            "finish_reasons": sorted({choice.finish_reason or "none" for choice in generation.choices}),
            "first_token_ms": None if first_s is None else round(first_s * 1000, 1),
        }

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        service.check_open()
        body = Body(service.bodies)
        try:
            await read_body(receive, body, service.body_limit_bytes, service.body_timeout_s)
            await self._attend(scope, receive, send, body)
        finally:
            body.release()

    async def _attend(self, scope: Scope, receive: Receive, send: Send, body: Body) -> None:
        """Work for as long as the client is there."""
        error: ApiError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, receive, nursery.cancel_scope)
            try:
                await self._work(scope, body, send)
            except ApiError as caught:
                error = caught
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error

    async def _listen(self, receive: Receive, scope: trio.CancelScope) -> None:
        """Ends the work when the client hangs up. A task that cannot be cancelled now (it may be inside a send to a
        client that does not read) must not keep the daemon at work."""
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
        with trio.CancelScope(shield=True):
            for _ in range(LEAVE_ROUNDS):
                await trio.lowlevel.checkpoint()
        if self._generation is not None:
            self._generation.abort()

    async def _work(self, scope: Scope, body: Body, send: Send) -> None:
        service = self._service
        model, size_bytes = service.model(), body.size_bytes
        prepared: Prepared = await service.prepare(
            prepare_generation, self._endpoint, body.take(), model, size_bytes=size_bytes
        )
        body.release()
        options = prepared.options
        prefix = "chatcmpl" if self._endpoint == CHAT else "cmpl"
        identity = f"{prefix}-{uuid.uuid4().hex}"
        self._facts |= {"id": identity, "stream": options.stream}
        generation = self._generation = Generation(service, prepared, identity, scope["arrived_s"])
        name = options.model or model.names[0]
        renderer = Renderer(options, service.tokenizer, identity, name, service.now_unix_s())
        if options.stream:
            await self._stream(StreamSink(send, renderer, options, generation), generation)
        else:
            await self._whole(send, renderer, generation)

    async def _stream(self, sink: StreamSink, generation: Generation) -> None:
        error: ApiError | None = None
        async with trio.open_nursery() as nursery:
            if self._service.sse_keepalive_s:
                nursery.start_soon(sink.keep_alive, self._service.sse_keepalive_s)
            try:
                await generation.run(sink)
            except ApiError as caught:
                error = caught
            nursery.cancel_scope.cancel()
        if error is None:
            self._end = "ok"
            await sink.done()
        elif sink.open:
            self._end = error.code or "error"
            await sink.fail(error)
        else:
            raise error

    async def _whole(self, send: Send, renderer: Renderer, generation: Generation) -> None:
        sink = WholeSink(len(generation.choices))
        await generation.run(sink)
        self._end = "ok"
        await send_json(send, renderer.whole(generation, sink.texts()))


async def send_json(send: Send, body: bytes, status: int = 200) -> None:
    """A whole JSON answer."""
    headers = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class AnswerRoute:
    """The ASGI endpoint of one generating route: a fresh `Answer` for each request."""

    def __init__(self, service: Service, endpoint: str) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await Answer(self._service, self._endpoint)(scope, receive, send)
