"""App: the HTTP application: which path is answered by what.

Owns the route table. Must never hold behaviour of a route. Invariant: every answer that is not a success has the API's
error shape, unknown paths and methods included.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daemon.frontend.answer import AnswerRoute
from daemon.frontend.envelope import Envelope
from daemon.frontend.errors import FAILED, JSON_TYPE, ApiError
from daemon.frontend.routes_admin import AdminRoutes
from daemon.frontend.routes_model import ModelRoutes
from daemon.frontend.routes_monitor import MonitorRoutes
from daemon.frontend.schemas import CHAT, COMPLETIONS
from daemon.frontend.service import Service


def error_response(error: ApiError) -> Response:
    """The error as a starlette response."""
    return Response(error.body(), error.status, headers=error.headers, media_type=JSON_TYPE)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown path, or a method the path does not have."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, text, code=code, headers=dict(error.headers or {})))


async def _bug(request: Request, error: Exception) -> Response:
    """Ours; the envelope logs it."""
    return error_response(ApiError(500, "The server failed; its log has the trace", FAILED, None, "bug"))


def build_app(service: Service) -> Envelope:
    """The whole application over one service."""
    model, monitor, admin = ModelRoutes(service), MonitorRoutes(service), AdminRoutes(service)
    routes = [
        Route("/v1/models", model.models),
        Route("/v1/models/{name:path}", model.one_model),
        Route("/v1/completions", AnswerRoute(service, COMPLETIONS), methods=["POST"]),
        Route("/v1/chat/completions", AnswerRoute(service, CHAT), methods=["POST"]),
        Route("/tokenize", model.tokenize, methods=["POST"]),
        Route("/detokenize", model.detokenize, methods=["POST"]),
        Route("/version", model.version),
        Route("/health", monitor.health),
        Route("/health/live", monitor.live),
        Route("/health/ready", monitor.ready),
        Route("/metrics", monitor.metrics),
        Route("/flush_cache", admin.flush_cache, methods=["POST"]),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Envelope(app, service)
