"""Routes for monitors: health and metrics.

Owns these handlers. Must never hang: every question to the daemon has a deadline, and no answer is an answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from daemon.frontend.discreet import discreet, discreet_document
from daemon.frontend.routes_model import json_response
from daemon.frontend.service import Service
from ipc.errors import DaemonLost
from ipc.messages import Answer

ASK_TIMEOUT_S = 2.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MonitorRoutes:
    """Handlers over the shared service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def _ask(self, what: str) -> Answer | None:
        """The daemon's answer, or None when it gives none in time."""
        if not self._service.daemon.connected:
            return None
        try:
            return await self._service.daemon.ask(what, {}, timeout_s=ASK_TIMEOUT_S)
        except (DaemonLost, trio.TooSlowError):
            return None

    async def _state(self) -> dict[str, Any]:
        """What is known: `live` (process and daemon answer), `ready` (a request sent now is served), `progress`."""
        service, answer = self._service, await self._ask("health")
        told: Any = {}
        if answer is not None:
            try:
                told = msgspec.json.decode(answer.body)
            except msgspec.DecodeError:
                told = {"text": answer.body}
        told = told if isinstance(told, dict) else {"text": told}
        live = answer is not None and told.get("live", True) is True
        ready = live and answer is not None and answer.ok and told.get("ready", True) is True
        state = {
            "status": "draining" if service.draining else "ready" if ready else "not_ready" if live else "down",
            "live": live,
            "ready": ready and not service.draining,
            "progress": live and told.get("progress", True) is True,
            "open_requests": service.open_requests,
            "daemon": discreet_document(told),
        }
        if answer is None:
            state["why"] = discreet(service.daemon.lost_reason) or "the daemon gave no answer in time"
        return state

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when ready, else 503; the same document either way."""
        state = await self._state()
        return json_response(state, 200 if state["ready"] else 503)

    async def live(self, request: Request) -> Response:
        """GET /health/live: 503 when the daemon does not answer or says that it is beyond repair."""
        state = await self._state()
        return json_response(state, 200 if state["live"] else 503)

    async def ready(self, request: Request) -> Response:
        """GET /health/ready"""
        return await self.health(request)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the front end's own, then the daemon's, in the Prometheus text format."""
        answer = await self._ask("metrics")
        self._service.metrics.daemon_up.set(1 if answer is not None and answer.ok else 0)
        self._service.metrics.set_client(self._service.daemon.stats)
        text = self._service.metrics.text()
        if answer is not None and answer.ok:
            text += answer.body if answer.body.endswith("\n") or not answer.body else answer.body + "\n"
        return PlainTextResponse(text, headers={"content-type": METRICS_TYPE})
