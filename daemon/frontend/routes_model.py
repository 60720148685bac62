"""Routes about the model itself: what is served, tokenize, detokenize, version.

Owns these handlers. Must never reach the scheduler: none of them makes the daemon do work.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from daemon.frontend.answer import HungUp, read_body
from daemon.frontend.errors import JSON_TYPE
from daemon.frontend.prepare import Model, check_model, prepare_tokenize
from daemon.frontend.schemas import DETOKENIZE
from daemon.frontend.service import Service
from daemon.frontend.validation import check_fields, decode_object

OWNER = "bandmaster"


def version() -> str:
    """The installed distribution's version."""
    try:
        return importlib.metadata.version("bandmaster")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a tree that was not installed


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
        body, model = await self._body(request), self._service.model()
        ids, wants_strings = await self._service.prepare(prepare_tokenize, body, model, size_bytes=len(body))
        document: dict[str, object] = {"count": len(ids), "max_model_len": model.facts.max_model_len, "tokens": ids}
        if wants_strings:
            document["token_strs"] = [model.tokenizer.token_string(token) for token in ids]
        return json_response(document)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: special tokens are shown, so that tokenizing the text again gives the tokens back."""
        body, model = await self._body(request), self._service.model()
        text = await self._service.prepare(prepare_detokenize, body, model, size_bytes=len(body))
        return json_response({"prompt": text})

    async def _body(self, request: Request) -> bytes:
        service = self._service
        try:
            return await read_body(request.scope, request.receive, service.body_limit_bytes, service.body_timeout_s)
        except HungUp:
            return b""  # nobody reads the answer; it is refused as an empty body

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return json_response({"version": version()})


def prepare_detokenize(body: bytes, model: Model) -> str:
    """The text of a /detokenize request; raises ApiError naming the field."""
    values = check_fields(DETOKENIZE, decode_object(body), model.facts.vocab_size)
    check_model(values["model"], model.names)
    return model.tokenizer.decode(values["tokens"], skip_special_tokens=False)
