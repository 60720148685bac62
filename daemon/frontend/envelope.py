"""Envelope: what surrounds every HTTP request: its id, the key, the last resort for failures, metrics, the log line.

Owns the ASGI middleware. Must never read a body. Invariants: every answer carries `X-Request-Id`; a failure of ours
is an answer in the API's shape where one can still be sent, and an error line with the trace in any case.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from daemon.frontend.errors import FAILED, JSON_TYPE, ApiError
from daemon.frontend.service import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
OPEN_PATHS = ("/health", "/metrics", "/version")  # asked by monitors that hold no key
KNOWN_ROUTES = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/version",
    "/flush_cache",
)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    return next((value for key, value in scope["headers"] if key.lower() == name), None)


def request_id(scope: Scope) -> str:
    """The client's `X-Request-Id` if it is well formed, else a fresh one."""
    given = header(scope, b"x-request-id")
    if given is not None and REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return uuid.uuid4().hex


def check_key(scope: Scope, keys: tuple[str, ...]) -> None:
    """Raises ApiError 401 unless the request bears one of `keys`; no keys means an open server."""
    path = scope["path"]
    if not keys or any(path == open_path or path.startswith(open_path + "/") for open_path in OPEN_PATHS):
        return
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    good = [hmac.compare_digest(token.strip(), key.encode()) for key in keys]
    if scheme.lower() != b"bearer" or not any(good):
        text = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def send_error(send: Send, error: ApiError) -> None:
    """A whole answer in the API's error shape."""
    body = error.body()
    headers = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def route_label(scope: Scope) -> str:
    """The route for metrics, from a closed set, so that strange paths cannot grow it."""
    path = scope["path"].rstrip("/") or "/"
    return path if path in KNOWN_ROUTES else "/v1/models" if path.startswith("/v1/models/") else "other"


class Envelope:
    """Wraps the routes' application."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; lifespan events pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, metrics = self._service, self._service.metrics
        identity, arrived_s = request_id(scope), metrics.now_s()
        scope["request_id"], scope["arrived_s"] = identity, arrived_s
        status = 0

        async def tagged(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity.encode())]
            await send(message)

        monitor = scope["path"].startswith(OPEN_PATHS)
        service.note_open(1, monitor)
        try:
            check_key(scope, service.api_keys)
            await self._app(scope, receive, tagged)
        except ApiError as error:
            if not status:
                await send_error(tagged, error)
        except Exception:
            service.log.exception("HttpRequestFailed", request_id=identity, path=scope["path"], status=status)
            if not status:
                await send_error(tagged, ApiError(500, "The server failed; its log has the trace", FAILED, None, "bug"))
            else:
                raise  # the answer is cut off: the connection must not look whole
        finally:
            service.note_open(-1, monitor)
            metrics.responses.labels(route_label(scope), str(status or "none")).inc()
            self._line(scope, identity, status, metrics.now_s() - arrived_s)

    def _line(self, scope: Scope, identity: str, status: int, elapsed_s: float) -> None:
        quiet = scope["path"].startswith(OPEN_PATHS)
        write = self._service.log.debug if quiet else self._service.log.info
        facts = scope.get("facts", {})
        write(
            "HttpRequest",
            request_id=identity,
            method=scope["method"],
            path=scope["path"][:200],
            status=status,
            elapsed_ms=round(elapsed_s * 1000, 1),
            **facts,
        )
