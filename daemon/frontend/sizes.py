"""Sizes: what a large body may cost, refused before the cost arises.

Owns the limits on parsing and tokenizing, and the account of body bytes held in memory. Must never build anything of a
body's size. Invariants: no single call that holds the interpreter's lock works on more than these limits allow, so the
loop is never still for long; the bytes of all large bodies together stay within the budget.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from daemon.frontend.errors import DOWN, ApiError, bad_field, retry_headers

INLINE_BYTES = 16 * 1024  # a larger body is prepared in a thread: its tokenization would hold up other streams
HEAVY_BYTES = (
    256 * 1024
)  # a larger body waits for the one lane of its kind: its tokens take far more memory than its text
BODIES_BYTES = 64 << 20  # all bodies above INLINE_BYTES that are being read or prepared
STRUCTURE_MAX = 100_000  # lists, objects and keys of a body: making millions of them holds the lock
TEXT_BYTES_MIN = 2 << 20  # any model's text may have so many, a whole book
TEXT_BYTES_PER_TOKEN = 8
LISTED_TOKENS_MIN = 1 << 20  # of /tokenize and /detokenize, whatever the model's length
RETRY_AFTER_MS = 1000

_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{:]', re.DOTALL)


def check_structure(body: bytes) -> None:
    """Raises ApiError 400 for JSON with more lists, objects and keys than any request has; texts do not count."""
    if sum(map(body.count, (b"[", b"{", b":"))) <= STRUCTURE_MAX:
        return
    found = 0
    for match in _STRUCTURE.finditer(body):
        found += match.end() - match.start() == 1
        if found > STRUCTURE_MAX:
            text = f"The body has more than {STRUCTURE_MAX} lists, objects and keys; no request needs so many"
            raise ApiError(400, text, code="body_too_complex")


def text_bytes_max(max_model_len: int) -> int:
    """The longest text that is tokenized at all, for a model of that length."""
    return max(TEXT_BYTES_MIN, TEXT_BYTES_PER_TOKEN * max_model_len)


def listed_tokens_max(max_model_len: int) -> int:
    """The most ids that /tokenize answers and /detokenize takes."""
    return max(LISTED_TOKENS_MIN, max_model_len)


def check_text(param: str, text: str, most: int) -> None:
    """Raises ApiError 400 for a text that is longer than what is tokenized; a character is at least one byte."""
    if len(text) > most:
        raise bad_field(param, f"has {len(text)} characters; at most {most} bytes are tokenized", "out_of_range")


@dataclass
class Bodies:
    """The account of large bodies in memory; only one body alone, itself limited, may exceed `budget_bytes`."""

    budget_bytes: int = BODIES_BYTES
    held_bytes: int = 0


@dataclass
class Body:
    """One body as it comes; `release` gives its bytes back and may be called again."""

    bodies: Bodies
    size_bytes: int = 0  # kept so far
    _parts: list[bytes] = field(default_factory=list)
    _charged_bytes: int = 0
    full: bool = False  # the budget was exceeded: nothing is kept any more

    def add(self, part: bytes) -> None:
        """Keep `part` if the budget has room; a small body needs none, one alone may have all it is allowed."""
        size = self.size_bytes + len(part)
        charge = (size if size > INLINE_BYTES else 0) - self._charged_bytes
        alone = self.bodies.held_bytes == self._charged_bytes
        if self.full or (not alone and self.bodies.held_bytes + charge > self.bodies.budget_bytes):
            self.release()
            self.full = True
            return
        self.bodies.held_bytes += charge
        self._charged_bytes += charge
        self.size_bytes = size
        self._parts.append(part)

    def check(self) -> None:
        """Raises ApiError 503 when the bodies of all requests together were too large to take this one."""
        if self.full:
            text = f"The large requests at work have more than {self.bodies.budget_bytes} bytes together; try again"
            headers = retry_headers(503, RETRY_AFTER_MS) | {"Connection": "close"}
            raise ApiError(503, text, DOWN, None, "overloaded", headers)

    def take(self) -> bytes:
        """The whole body; it stays charged until `release`."""
        whole = b"".join(self._parts)
        self._parts = []
        return whole

    def release(self) -> None:
        """The bytes are not needed any more."""
        self.bodies.held_bytes -= self._charged_bytes
        self._charged_bytes = self.size_bytes = 0
        self._parts = []
