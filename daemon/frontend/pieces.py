"""Pieces: the bytes that each token stands for, read once from the tokenizer's own decoder description.

Owns the table from token id to bytes. Must never depend on neighbouring tokens: a decoder whose tokens cannot be turned
into bytes one by one is refused by name at boot. Invariant: joining the pieces of any ids and decoding them as UTF-8
gives the text that the tokenizer's own decoder gives (it replaces a whole run of byte tokens when one of them is
invalid; here only the invalid bytes are replaced).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(Exception):
    """The tokenizer's files describe something this front end cannot decode incrementally."""


@dataclass(frozen=True)
class Pieces:
    """`plain[id]` and `visible[id]` are the token's bytes, the latter empty for special tokens.

    At the start of a text up to `strip` leading spaces are not part of it.
    """

    plain: list[bytes]
    visible: list[bytes]
    strip: int

    def __len__(self) -> int:
        return len(self.plain)

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes; empty for an id the tokenizer does not have (padded vocabularies)."""
        return self.plain[token] if 0 <= token < len(self.plain) else b""


def byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the rest is moved up from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    others = (value for value in range(256) if chr(value) not in table)
    return table | {chr(256 + index): value for index, value in enumerate(others)}


@dataclass
class _Rules:
    """What the decoder's steps do to one token."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: int = 0

    def piece(self, token: str, alphabet: dict[str, int]) -> bytes:
        if self.byte_level:
            values = [alphabet.get(character, -1) for character in token]
            return token.encode() if -1 in values else bytes(values)
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise UnsupportedTokenizer("the tokenizer describes no decoder; it cannot be decoded token by token")
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _rules(decoder: dict[str, Any] | None) -> _Rules:
    rules = _Rules()
    for step in _steps(decoder):
        kind = step["type"]
        if kind == "ByteLevel":
            rules.byte_level = True
        elif kind == "ByteFallback":
            rules.byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            rules.replacements += ((step["pattern"]["String"], step["content"]),)
        elif kind == "Metaspace":
            rules.replacements += ((step["replacement"], " "),)
            rules.strip = 0 if step.get("prepend_scheme") == "never" else 1
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            rules.strip = step["start"]
        elif kind != "Fuse":
            raise UnsupportedTokenizer(f"decoder step {kind!r} of the tokenizer is not supported: {step}")
    return rules


def build_pieces(decoder: dict[str, Any] | None, vocabulary: dict[str, int], special_ids: set[int]) -> Pieces:
    """The table for a `decoder` section of tokenizer.json and a vocabulary (added tokens included)."""
    rules, alphabet = _rules(decoder), byte_of_character()
    plain = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        plain[index] = rules.piece(token, alphabet)
    visible = [b"" if index in special_ids else piece for index, piece in enumerate(plain)]
    return Pieces(plain, visible, rules.strip)
