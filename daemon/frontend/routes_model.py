"""Routes about the model itself: what is served, tokenize, detokenize, version.

Owns these handlers. Must never reach the scheduler: none of them makes the daemon do work.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from daemon.frontend.answer import HungUp, read_body
from daemon.frontend.errors import JSON_TYPE
from daemon.frontend.prepare import Model, check_model, prepare_detokenize, prepare_tokenize
from daemon.frontend.service import Service
from daemon.frontend.sizes import Body

OWNER = "bandmaster"


PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """The installed distribution's version; of a tree that was not installed, its project file's."""
    try:
        return importlib.metadata.version("bandmaster")
    except importlib.metadata.PackageNotFoundError:
        return str(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"])


def json_response(document: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(document), status, media_type=JSON_TYPE)


class ModelRoutes:
    """Handlers over the shared service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = service.now_unix_s()

    def _card(self, name: str, model: Model) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "max_model_len": model.facts.max_model_len,
            "root": model.facts.name,
        }

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        model = self._service.model()
        return json_response({"object": "list", "data": [self._card(name, model) for name in model.names]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME; a name may contain slashes."""
        model, name = self._service.model(), request.path_params["name"]
        check_model(name, model.names)
        return json_response(self._card(name, model))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        return await self._prepared(request, prepare_tokenize)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: special tokens are shown, so that tokenizing the text again gives the tokens back."""
        return await self._prepared(request, prepare_detokenize)

    async def _prepared(self, request: Request, prepare: Callable[[bytes, Model], bytes]) -> Response:
        """The answer that `prepare` makes of the body."""
        service, body = self._service, Body(self._service.bodies)
        try:
            try:
                await read_body(request.receive, body, service.body_limit_bytes, service.body_timeout_s)
            except HungUp:
                body.release()  # nobody reads the answer; it is refused as an empty body
            model, size_bytes = service.model(), body.size_bytes
            answer = await service.prepare(prepare, body.take(), model, size_bytes=size_bytes)
        finally:
            body.release()
        return Response(answer, media_type=JSON_TYPE)

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return json_response({"version": version()})
