"""Validation: from the bytes of a body to checked options, or a 400 that names the field.

Owns decoding of JSON bodies and the rules between fields. Must never touch the tokenizer or the daemon. Invariant: work
is bounded by the body's size; nesting is bounded by the decoder.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec

from daemon.frontend.errors import ApiError, bad_field
from daemon.frontend.schemas import CHAT, COMPLETIONS, TABLES, Options
from daemon.frontend.sizes import check_structure

COMPLETION_MAX_TOKENS_DEFAULT = 16
BEYOND_DOUBLES_BYTES_MAX = 65536


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises ApiError 400 for anything else, deep nesting included."""
    check_structure(body)
    try:
        document = msgspec.json.decode(body)
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        check_surrogates(body)
        document = _beyond_doubles(body, error)
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be a JSON object", code="invalid_json")
    return document


def _beyond_doubles(body: bytes, error: Exception) -> Any:
    """The document of a body refused for a number that no double holds, like 1e400: infinite, so its field refuses it.

    Raises ApiError 400 for every other fault. The slow parser reads small bodies only: it runs on the loop.
    """
    try:
        if len(body) <= BEYOND_DOUBLES_BYTES_MAX and "out of range" in str(error):
            return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        pass  # the first parser's sentence below says what is wrong, with the place
    raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_ESCAPES = re.compile(rb"\\(?:u([0-9a-fA-F]{4})(?:(?<=[dD][89abAB]..)\\u([dD][c-fC-F][0-9a-fA-F]{2}))?|.)", re.DOTALL)
_KEYS = re.compile(rb'"((?:[^"\\]++|\\.)*+)"(\s*:)?|[\[{\]}]', re.DOTALL)


def check_surrogates(body: bytes) -> None:
    """Raises ApiError 400 naming the field whose text has half of a surrogate pair."""
    for escape in _ESCAPES.finditer(body):
        if 0xD800 <= int(escape[1] or b"0", 16) < 0xE000 and escape[2] is None:
            field, found = _field_at(body, escape.start()), escape[0].decode()
            text = f"{found} at byte {escape.start()} is half of a surrogate pair and no character"
            raise bad_field(field, text, "invalid_json") if field else ApiError(400, text, code="invalid_json")


def _field_at(body: bytes, position: int) -> str:
    """The top-level field around a byte position, empty when there is none."""
    depth, field = 0, b""
    for match in _KEYS.finditer(body):
        if match.end() > position:
            break
        if match[0] in (b"[", b"{"):
            depth += 1
        elif match[0] in (b"]", b"}"):
            depth -= 1
        elif depth == 1 and match[2]:
            field = match[1]
    return field[:100].decode("utf-8", "replace")


def check_fields(endpoint: str, document: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Every field of the endpoint's table, checked, by name; unknown fields and missing ones raise ApiError 400."""
    table = TABLES[endpoint]
    for name in document:
        if name not in table:
            raise bad_field(name[:100], "unknown field; this server does not have it", "unknown_field")
    values = {}
    for name, field in table.items():
        if name in document:
            values[name] = field.read(document[name], vocab_size)
        elif field.required:
            raise bad_field(name, "required and missing", "missing_field")
        else:
            values[name] = field.default
    return values


def read_options(endpoint: str, document: dict[str, Any], vocab_size: int) -> Options:
    """The options of a completion or chat request; raises ApiError 400 naming the field at fault."""
    values = check_fields(endpoint, document, vocab_size)
    field, max_tokens = _max_tokens(endpoint, values)
    _between_fields(endpoint, values, field, max_tokens)
    stream = values["stream_options"] or {}
    return Options(
        endpoint=endpoint,
        model=values["model"],
        prompt=values.get("prompt"),
        messages=values.get("messages"),
        max_tokens=max_tokens,
        min_tokens=values["min_tokens"],
        n=values["n"],
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=max(values["top_k"], 0),
        min_p=values["min_p"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        seed=values["seed"],
        stop=list(values["stop"]),
        stop_token_ids=list(values["stop_token_ids"]),
        ignore_eos=values["ignore_eos"],
        include_stop_str_in_output=values["include_stop_str_in_output"],
        skip_special_tokens=values["skip_special_tokens"],
        priority=values["priority"],
        deadline_ms=values["deadline_ms"],
        cache_store=values["cache_store"],
        cache_pin_ms=values["cache_pin_ms"],
        cache_salt=values["cache_salt"],
        stream=values["stream"],
        include_usage=stream.get("include_usage", False),
        continuous_usage=stream.get("continuous_usage_stats", False),
        echo=values.get("echo") or False,
        logprobs=_logprobs(endpoint, values),
        return_token_ids=values["return_token_ids"],
        truncate_prompt_tokens=values["truncate_prompt_tokens"],
        add_special_tokens=values["add_special_tokens"],
        add_generation_prompt=values.get("add_generation_prompt", True),
        continue_final_message=values.get("continue_final_message", False),
        chat_template_kwargs=values.get("chat_template_kwargs") or {},
        max_tokens_field=field,
    )


def _max_tokens(endpoint: str, values: dict[str, Any]) -> tuple[str, int | None]:
    """The output limit and the name under which the client gave it; None when it gave none."""
    old, new = values["max_tokens"], values.get("max_completion_tokens")
    if new is None:
        return "max_tokens", old
    if old is not None and old != new:
        raise bad_field("max_completion_tokens", f"is {new}, and max_tokens is {old}; send one of them")
    return "max_completion_tokens", new


def _logprobs(endpoint: str, values: dict[str, Any]) -> int:
    if endpoint == COMPLETIONS:
        return -1 if values["logprobs"] is None else values["logprobs"]
    return (values["top_logprobs"] or 0) if values["logprobs"] else -1


def _between_fields(endpoint: str, values: dict[str, Any], field: str, max_tokens: int | None) -> None:
    """The rules that concern two fields; raises ApiError 400 naming the one to change."""
    if values["stream_options"] is not None and not values["stream"]:
        raise bad_field("stream_options", "only allowed with stream true")
    if endpoint == COMPLETIONS:
        if values["best_of"] not in (None, values["n"]):
            raise bad_field("best_of", f"must be equal to n ({values['n']}), got {values['best_of']}")
        if max_tokens == 0 and not values["echo"]:
            raise bad_field(field, "must be at least 1 without echo, got 0", "out_of_range")
    if endpoint == CHAT:
        if values["top_logprobs"] is not None and not values["logprobs"]:
            raise bad_field("top_logprobs", "only allowed with logprobs true")
        if values["continue_final_message"] and values["add_generation_prompt"]:
            raise bad_field("continue_final_message", "only allowed with add_generation_prompt false")
    if values["cache_pin_ms"] and not values["cache_store"]:
        raise bad_field("cache_pin_ms", "only allowed with cache_store true")
    limit = max_tokens
    if limit is None and endpoint == COMPLETIONS:
        limit = COMPLETION_MAX_TOKENS_DEFAULT
    if limit is not None and values["min_tokens"] > limit:
        raise bad_field("min_tokens", f"must be at most {field} ({limit}), got {values['min_tokens']}", "out_of_range")
