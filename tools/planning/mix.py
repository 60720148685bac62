"""Mixes: the file that describes a workload, one kind of request a line.

Owns its format and its errors. Must never guess a value: an unknown field, a number out of range or a line that is no
JSON object is refused with its line number.

    {"prompt_tokens": 1024, "output_tokens": 128, "weight": 3, "shared_prefix_tokens": 512}
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from tools.planning.errors import PlanError


class MixLine(NamedTuple):
    """One kind of request. `weight` is its share of the requests, relative to the other lines."""

    prompt_tokens: int
    output_tokens: int
    weight: Fraction
    shared_prefix_tokens: int


REQUIRED = ("prompt_tokens", "output_tokens")
WEIGHT_MAX = 10**12


def read_mix(path: Path, max_model_len: int) -> list[MixLine]:
    """The lines of a file; empty ones are skipped; raises PlanError."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise PlanError(f"--mix {path} cannot be read: {error}") from error
    lines = [
        _line(f"--mix {path}, line {number}", text, max_model_len)
        for number, text in enumerate(texts, 1)
        if text.strip()
    ]
    if not lines:
        raise PlanError(f"--mix {path} has no lines; give one JSON object a line with {', '.join(REQUIRED)}")
    return lines


def _line(where: str, text: str, max_model_len: int) -> MixLine:
    try:
        fields = json.loads(text, parse_float=Fraction)
    except ValueError as error:
        raise PlanError(f"{where} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise PlanError(f"{where} is no JSON object, but {text.strip()[:40]!r}")
    unknown = sorted(set(fields) - set(MixLine._fields))
    if unknown:
        raise PlanError(f"{where} has the unknown field {unknown[0]!r}; known: {', '.join(MixLine._fields)}")
    missing = [name for name in REQUIRED if name not in fields]
    if missing:
        raise PlanError(f"{where} lacks {missing[0]}")
    prompt = _tokens(where, fields, "prompt_tokens", 1, max_model_len - 1)
    output = _tokens(where, fields, "output_tokens", 1, max_model_len - prompt)
    weight = fields.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | Fraction) or not 0 < weight <= WEIGHT_MAX:
        raise PlanError(f"{where}: weight must be a number above 0 and at most {WEIGHT_MAX:g}, not {_shown(weight)}")
    shared = _tokens(where, fields, "shared_prefix_tokens", 0, prompt)
    return MixLine(prompt, output, Fraction(weight), shared)


def _tokens(where: str, fields: dict[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PlanError(f"{where}: {name} must be a whole number from {low} to {high}, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    if not isinstance(value, Fraction):
        return repr(value)
    return f"{float(value):g}" if value <= sys.float_info.max else f"a number beyond {sys.float_info.max:g}"
