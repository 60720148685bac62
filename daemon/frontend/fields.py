"""Fields: what a declared request field is, and how one value is checked against its declaration.

Owns `Field` and the closed set of kinds. Must never know which fields exist (that is `schemas`) or do I/O.
Invariant: a value that does not fit raises `ApiError` 400 whose `param` is the field, or the path inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from daemon.frontend.errors import ApiError, bad_field

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 1024
STOP_IDS_MAX = 128
SALT_BYTES_MAX = 200
PROMPTS_MAX = 128
MESSAGES_MAX = 4096

T = TypeVar("T")


class Use(StrEnum):
    """What the front end does with a field."""

    BUILT = "built"  # it has its effect
    IGNORED = "ignored"  # checked, and has no effect on the output by its nature
    REFUSED = "refused"  # not built: any value but a neutral one is a 400


@dataclass(frozen=True, slots=True)
class Field:
    """One request field: its kind, range (inclusive unless `low_open`), default and the endpoints that have it.

    `neutral` lists the values of a refused field that change nothing, null always being one of them.
    """

    name: str
    kind: Callable[[Field, Any, int], Any]
    endpoints: tuple[str, ...]
    default: Any = None
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    use: Use = Use.BUILT
    neutral: tuple[Any, ...] = ()
    required: bool = False
    note: str = ""

    def read(self, value: Any, vocab_size: int) -> Any:
        """The checked value; null means the default. Raises ApiError 400 naming the field."""
        if value is None:
            if self.required:
                raise bad_field(self.name, "required, got null", "missing_field")
            return self.default
        if self.use is Use.REFUSED:
            if not any(same(value, allowed) for allowed in self.neutral):
                raise bad_field(self.name, "not supported by this server; leave it out", "unsupported_field")
            return None
        return self.kind(self, value, vocab_size)

    def range_text(self) -> str:
        """The range as the documentation and the error messages show it."""
        low = "" if self.low is None else f"{'above' if self.low_open else 'at least'} {plain(self.low)}"
        high = "" if self.high is None else f"at most {plain(self.high)}"
        return ", ".join(part for part in (low, high) if part)


def plain(bound: float) -> str:
    """A bound without an exponent or a needless point."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def same(value: Any, allowed: Any) -> bool:
    """Equal in JSON's sense: true is not 1, and 0 is 0.0."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def json_type(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def expect(value: Any, kind: type[T], param: str, wanted: str) -> T:
    """`value` if it is exactly of the JSON type; booleans are not integers."""
    if type(value) is not kind:
        raise bad_field(param, f"must be {wanted}, got {json_type(value)}", "invalid_type")
    return value


def in_range(field: Field, value: float, param: str) -> None:
    """Raises the 400 for a number outside the field's range, with the range and the value."""
    low_bad = field.low is not None and (value < field.low or (field.low_open and value == field.low))
    if low_bad or (field.high is not None and value > field.high):
        raise bad_field(param, f"must be {field.range_text()}, got {value}", "out_of_range")


# --- kinds; the docstring is the type as the documentation shows it --------------------------------------------------


def boolean(field: Field, value: Any, vocab_size: int) -> bool:
    """boolean"""
    return expect(value, bool, field.name, "a boolean")


def integer(field: Field, value: Any, vocab_size: int) -> int:
    """integer"""
    in_range(field, expect(value, int, field.name, "an integer"), field.name)
    return int(value)


def number(field: Field, value: Any, vocab_size: int) -> float:
    """number"""
    if type(value) is not int:
        expect(value, float, field.name, "a number")
    in_range(field, value, field.name)
    if not math.isfinite(value):
        raise bad_field(field.name, "must be finite", "out_of_range")
    return float(value)


def text(field: Field, value: Any, vocab_size: int) -> str:
    """string"""
    string = expect(value, str, field.name, "a string")
    if field.high is not None and len(string) > field.high:
        raise bad_field(field.name, f"must have at most {field.high:g} characters, got {len(string)}", "out_of_range")
    return string


def salt(field: Field, value: Any, vocab_size: int) -> str:
    """string of 1 to 200 bytes"""
    string = expect(value, str, field.name, "a string")
    size = len(string.encode())
    if not 1 <= size <= SALT_BYTES_MAX:
        raise bad_field(field.name, f"must have 1 to {SALT_BYTES_MAX} bytes in UTF-8, got {size}", "out_of_range")
    return string


def stop_strings(field: Field, value: Any, vocab_size: int) -> list[str]:
    """string or list of strings"""
    items = [value] if isinstance(value, str) else expect(value, list, field.name, "a string or a list of strings")
    if len(items) > STOP_STRINGS_MAX:
        raise bad_field(field.name, f"at most {STOP_STRINGS_MAX} strings, got {len(items)}", "out_of_range")
    for index, item in enumerate(items):
        param = field.name if isinstance(value, str) else f"{field.name}[{index}]"
        expect(item, str, param, "a string")
        if not 1 <= len(item) <= STOP_STRING_CHARACTERS_MAX:
            raise bad_field(param, f"must have 1 to {STOP_STRING_CHARACTERS_MAX} characters, got {len(item)}")
    return list(dict.fromkeys(items))


def check_ids(param: str, ids: list[Any], vocab_size: int) -> list[int]:
    """The list of token ids if every one is an integer of the vocabulary; names the first that is not."""
    if all(type(item) is int for item in ids) and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):
        return ids
    for index, item in enumerate(ids):
        expect(item, int, f"{param}[{index}]", "a token id (an integer)")
        if not 0 <= item < vocab_size:
            raise bad_field(
                f"{param}[{index}]", f"token id must be 0 to {vocab_size - 1}, got {item}", "token_out_of_range"
            )
    raise AssertionError("a bad id was seen and then not found")


def token_ids(field: Field, value: Any, vocab_size: int) -> list[int]:
    """list of token ids"""
    ids: list[Any] = expect(value, list, field.name, "a list of token ids")
    if field.high is not None and len(ids) > field.high:
        raise bad_field(field.name, f"at most {field.high:g} token ids, got {len(ids)}", "out_of_range")
    return check_ids(field.name, ids, vocab_size)


def prompts(field: Field, value: Any, vocab_size: int) -> list[str | list[int]]:
    """string, list of strings, list of token ids, or list of lists of token ids"""
    if isinstance(value, str):
        return [value]
    items: list[Any] = expect(value, list, field.name, "a string, a list of strings or token ids, or a list of those")
    if not items:
        raise bad_field(field.name, "must not be empty", "empty_prompt")
    if isinstance(items[0], list):
        wanted: type = list
    elif isinstance(items[0], str):
        wanted = str
    else:
        return [check_ids(field.name, items, vocab_size)]
    if len(items) > PROMPTS_MAX:
        raise bad_field(field.name, f"at most {PROMPTS_MAX} prompts, got {len(items)}", "out_of_range")
    for index, item in enumerate(items):
        expect(item, wanted, f"{field.name}[{index}]", "of the same kind as the first prompt")
        if wanted is list:
            check_ids(f"{field.name}[{index}]", item, vocab_size)
    return items


def stream_options(field: Field, value: Any, vocab_size: int) -> dict[str, bool]:
    """object: include_usage, continuous_usage_stats (booleans)"""
    expect(value, dict, field.name, "an object")
    options = {"include_usage": False, "continuous_usage_stats": False}
    for key, item in value.items():
        param = f"{field.name}.{key}"
        if key == "include_obfuscation" and item in (None, False):
            continue
        if key not in options:
            raise bad_field(param, "not supported by this server; leave it out", "unsupported_field")
        options[key] = item is not None and expect(item, bool, param, "a boolean")
    return options


RESERVED_TEMPLATE_NAMES = ("messages", "add_generation_prompt", "tools", "documents", "chat_template")


def template_arguments(field: Field, value: Any, vocab_size: int) -> dict[str, Any]:
    """object: variables for the chat template"""
    arguments: dict[str, Any] = expect(value, dict, field.name, "an object")
    for key in arguments:
        if key in RESERVED_TEMPLATE_NAMES:
            raise bad_field(f"{field.name}.{key}", "is set by the server", "unsupported_field")
    return arguments


ROLES = ("system", "developer", "user", "assistant")


def messages(field: Field, value: Any, vocab_size: int) -> list[dict[str, str]]:
    """list of messages: role (system, developer, user, assistant), content (string or text parts), name"""
    items = expect(value, list, field.name, "a list of messages")
    if not 1 <= len(items) <= MESSAGES_MAX:
        raise bad_field(field.name, f"must have 1 to {MESSAGES_MAX} messages, got {len(items)}", "out_of_range")
    return [_message(f"{field.name}[{index}]", item) for index, item in enumerate(items)]


def _message(param: str, value: Any) -> dict[str, str]:
    expect(value, dict, param, "an object")
    role = expect(value.get("role"), str, f"{param}.role", "a string")
    if role not in ROLES:
        raise bad_field(f"{param}.role", f"must be one of {', '.join(ROLES)}, got {role[:40]!r}")
    message = {"role": role, "content": _content(f"{param}.content", value.get("content"))}
    for key, item in value.items():
        if key in message or item is None:
            continue
        if key != "name":
            raise bad_field(f"{param}.{key}", "not supported by this server; leave it out", "unsupported_field")
        message["name"] = expect(item, str, f"{param}.name", "a string")
    return message


def _content(param: str, value: Any) -> str:
    """A message's text: a string, or text parts joined by line ends."""
    if isinstance(value, str):
        return value
    parts = expect(value, list, param, "a string or a list of parts")
    texts = []
    for index, part in enumerate(parts):
        where = f"{param}[{index}]"
        expect(part, dict, where, "an object")
        kind = expect(part.get("type"), str, f"{where}.type", "a string")
        if kind != "text":
            raise bad_field(f"{where}.type", f"only text parts are supported, got {kind[:40]!r}", "unsupported_field")
        texts.append(expect(part.get("text"), str, f"{where}.text", "a string"))
        for key in part:
            if key not in ("type", "text"):
                raise bad_field(f"{where}.{key}", "not supported by this server; leave it out", "unsupported_field")
    return "\n".join(texts)


def anything(field: Field, value: Any, vocab_size: int) -> Any:
    """any"""
    raise ApiError(500, f"{field.name}: a field of this kind is only ever refused")
