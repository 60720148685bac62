"""Tokenizer: text to ids and back, and the special tokens that the chat template needs.

Owns loading of a model directory's tokenizer files. Must never import a tensor library. Invariant: encoding is done by
the model's own tokenizer.json, untruncated and unpadded; decoding by the piece table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from daemon.frontend.detokenizer import decode
from daemon.frontend.pieces import Pieces, UnsupportedTokenizer, build_pieces

BATCH_CHARACTERS = 4096  # from here on the library's batch call is used: it alone releases the interpreter's lock
# A normalizer may shorten a text by this factor at most; with one that is not here no bound is known.
SHRINKS = {"NFC": 4, "Prepend": 1, "Replace": 1}


class TooManyTokens(Exception):
    """A text has more tokens than the caller can use; they were counted and not listed."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens")
        self.count = count


class Tokenizer:
    """A model's tokenizer: `encode` of a long text releases the interpreter's lock and may run in a thread."""

    def __init__(self, definition: str, config: dict[str, Any] | None = None) -> None:
        """From the text of tokenizer.json and the object of tokenizer_config.json; raises UnsupportedTokenizer."""
        self.config = config or {}
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {index for index, token in added.items() if token.special}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        described = json.loads(definition)
        self.pieces: Pieces = build_pieces(described.get("decoder"), vocabulary, self.special_ids)
        self.token_bytes_max = _token_bytes_max(described, self.pieces)
        self.bos_token, self.eos_token = self._special("bos_token"), self._special("eos_token")
        self._bos_id = self._tokenizer.token_to_id(self.bos_token) if self.bos_token else None

    def _special(self, name: str) -> str:
        value = self.config.get(name)
        return value.get("content", "") if isinstance(value, dict) else value or ""

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids of `text`; strings of special tokens inside it become those tokens, as the model's users expect.

        Raises TooManyTokens beyond `most`, before any list is made.
        """
        if len(text) > BATCH_CHARACTERS:
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding))
        ids = encoding.ids
        if add_special_tokens and self._bos_id is not None and self.config.get("add_bos_token") is True:
            return ids if ids[:1] == [self._bos_id] else [self._bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` as a text of its own."""
        return decode(self.pieces, ids, skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of one token, replacement characters where it is not whole characters."""
        return self.pieces.bytes_of(token).decode("utf-8", "replace")

    def token_string(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(token) or ""


def _token_bytes_max(described: dict[str, Any], pieces: Pieces) -> int | None:
    """The most bytes of text that one token can stand for; None where the definition gives no bound."""
    shrink = _shrink(described.get("normalizer"))
    swallows = any(token["lstrip"] or token["rstrip"] for token in described.get("added_tokens") or ())
    model = described["model"]
    unbounded = model.get("unk_token") is not None and not model.get("byte_fallback")
    if shrink is None or swallows or unbounded:
        return None
    return shrink * max(map(len, pieces.plain), default=1)


def _shrink(normalizer: dict[str, Any] | None) -> int | None:
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Replace" and (normalizer["pattern"].get("String") != " " or not normalizer["content"]):
        return None
    if kind != "Sequence":
        return SHRINKS.get(kind)
    product = 1
    for step in normalizer["normalizers"]:
        factor = _shrink(step)
        if factor is None:
            return None
        product *= factor
    return product


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory; raises UnsupportedTokenizer naming the missing or unusable file."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedTokenizer(f"{path} is missing: this front end needs a fast tokenizer's definition")
    return Tokenizer(path.read_text(encoding="utf-8"), read_json(directory / "tokenizer_config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
