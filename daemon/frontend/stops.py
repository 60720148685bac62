"""Stop strings: found wherever token borders fall, with no text shown that might still become one.

Owns the matching state of one choice. Must never depend on how the text was cut into pieces: the match that ends
first wins, and of those the longest. Invariant: text returned so far never contains a stop string nor ends in text that
a later piece could complete to one; the cost of a character is constant.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string with its failure table (Knuth, Morris, Pratt): `matched` characters are matched at the end."""

    __slots__ = ("failure", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self.failure = [0] * len(string)
        length = 0
        for index in range(1, len(string)):
            while length and string[index] != string[length]:
                length = self.failure[length - 1]
            length += string[index] == string[length]
            self.failure[index] = length

    def scan(self, text: str, limit: int) -> int:
        """Characters of `text` up to and with the first match's end, or 0; looks at no more than `limit`."""
        string, failure, matched = self.string, self.failure, self.matched
        start = 0 if matched else text.find(string[0])
        for index in range(start if start >= 0 else limit, limit):
            character = text[index]
            while matched and string[matched] != character:
                matched = failure[matched - 1]
            matched += string[matched] == character
            if matched == len(string):
                return index + 1
        self.matched = matched
        return 0


class StopMatcher:
    """Feed text with `push`; it comes back as soon as it cannot be part of a stop string; `found` names the match."""

    __slots__ = ("_held", "_include", "_patterns", "found")

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._patterns = [_Pattern(string) for string in strings]
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; after a match, what precedes it (or includes it), and nothing more ever."""
        if self.found is not None:
            return ""
        limit, best = len(text), None
        for pattern in self._patterns:
            end = pattern.scan(text, limit)
            if end and (best is None or end < limit or len(pattern.string) > len(best.string)):
                limit, best = end, pattern
        whole = self._held + text
        if best is not None:
            self.found, self._held = best.string, ""
            end = len(whole) - len(text) + limit
            return whole[: end if self._include else end - len(best.string)]
        keep = max((pattern.matched for pattern in self._patterns), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """The text held back, once nothing more can come."""
        held, self._held = self._held, ""
        return held
