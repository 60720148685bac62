"""What clients are not told: paths and process ids of the server, and where its ranks keep their logs.

Owns what is left out of the daemon's words on their way out over HTTP. Must never touch what is logged or journaled:
there, and in `bandmaster why`, stands the whole. Invariant: a text without any of it stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

_RULES = (
    (re.compile(r"(?:; it named no error)?; its log is [^\n]*?\.log(?![\w.])"), ""),
    (re.compile(r" ?\(pids? \d+(?:, ?\d+)*\)"), ""),
    (re.compile(r"\bpids? \[?\d+(?:, ?\d+)*\]?"), "a process"),
    (re.compile(r"\bipc://[^\s'\":;,)]+"), "ipc://..."),
    (re.compile(r"(?<![\w.:/])(?:/[^\s'\"`,;:()\[\]/]+)+/([^\s'\"`,;:()\[\]/]+)"), r".../\1"),  # of a path, its name
)


def discreet(text: str) -> str:
    """The text without paths and process ids of the server."""
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


def discreet_document(value: Any) -> Any:
    """A JSON value with each text in it made discreet; keys stay."""
    if isinstance(value, str):
        return discreet(value)
    if isinstance(value, dict):
        return {name: discreet_document(part) for name, part in value.items()}
    return [discreet_document(part) for part in value] if isinstance(value, list) else value
