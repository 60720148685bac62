"""Routes for operators: orders to the daemon that clients of the model do not need.

Owns these handlers. Must never say that an order was carried out on anything but the daemon's word.
"""

from __future__ import annotations

from typing import Any

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response

from daemon.frontend.routes_model import json_response
from daemon.frontend.service import Service, unavailable
from ipc.errors import DaemonLost

FLUSH_TIMEOUT_S = 10.0


class AdminRoutes:
    """Handlers over the shared service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def flush_cache(self, request: Request) -> Response:
        """POST /flush_cache: 200 when the prefix cache is empty now, 409 with what is still read; units per band."""
        daemon = self._service.daemon
        try:
            answer = await daemon.ask("flush_cache", {}, timeout_s=FLUSH_TIMEOUT_S)
        except DaemonLost as error:
            raise unavailable("daemon_lost", f"The daemon does not answer: {error.reason}") from error
        except trio.TooSlowError as error:
            text = f"The daemon did not say within {FLUSH_TIMEOUT_S:g} s whether the cache is empty"
            raise unavailable("daemon_slow", text) from error
        told = _document(answer.body)
        if not answer.ok and "kept" not in told:
            raise unavailable("not_flushed", f"The prefix cache was not emptied: {told.get('blocked_by', answer.body)}")
        return json_response(told, 200 if answer.ok else 409)


def _document(body: str) -> dict[str, Any]:
    """The JSON object in an answer; an answer of another form is no document."""
    try:
        told = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return told if isinstance(told, dict) else {}
