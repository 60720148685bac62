"""Detokenizer: text from tokens as they come, without ever showing half a character.

Owns the decoding state of one choice. Must never look back: the cost of a token does not depend on how many came
before. Invariant: all returned texts joined, `flush` included, are the one-shot decode of the tokens pushed.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from daemon.frontend.pieces import Pieces

_Utf8 = codecs.getincrementaldecoder("utf-8")
PRIME_TOKENS = 4  # a character has at most four bytes, and a token at least one


class Detokenizer:
    """Feed tokens with `push`; text comes out when its characters are whole; `flush` ends it."""

    __slots__ = ("_decode", "_pieces", "_primed", "_strip", "_utf8")

    def __init__(self, pieces: Pieces, skip_special: bool = True, at_start: bool = False) -> None:
        self._pieces = pieces.visible if skip_special else pieces.plain
        self._utf8 = _Utf8("replace")
        self._decode = self._utf8.decode
        self._strip = pieces.strip if at_start else 0
        self._primed = False

    def prime(self, prompt: Sequence[int]) -> None:
        """Take over a character that the prompt's last tokens began; none of the prompt's text is returned."""
        for token in prompt[-PRIME_TOKENS:]:
            self.push(token)
        self._primed = bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        """The text that `token` completes, often empty; ids that the tokenizer does not have stand for nothing."""
        try:
            piece = self._pieces[token]
        except IndexError:
            return ""
        if self._primed and piece:
            self._primed = False
            if piece[0] & 0xC0 != 0x80:  # the output does not go on with the prompt's character
                self._utf8.reset()
        text = self._decode(piece)
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """What is left: a replacement character for a character that never became whole, or nothing."""
        if self._primed:
            self._utf8.reset()
        return self._decode(b"", True)

    def _stripped(self, text: str) -> str:
        kept = text.lstrip(" ")
        removed = min(len(text) - len(kept), self._strip)
        self._strip = 0 if kept else self._strip - removed
        return text[removed:]


def decode(pieces: Pieces, tokens: Sequence[int], skip_special: bool = True, at_start: bool = True) -> str:
    """The text of all `tokens` at once."""
    state = Detokenizer(pieces, skip_special, at_start)
    return "".join([state.push(token) for token in tokens]) + state.flush()
