"""Log probabilities: from the daemon's columns to the two shapes that the API has.

Owns both renderings. Must never recompute a value. Invariant: every number in an answer is finite JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allocator.columns import f32, i64
from daemon.frontend.tokenizer import Tokenizer
from ipc.messages import Logprobs

FLOOR = -9999.0  # minus infinity has no JSON; clients know this value from the API


@dataclass(slots=True)
class TokenLogprob:
    """A token, its log probability (None for a prompt's first token) and the best alternatives, best first."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


def finite(value: float) -> float:
    """The value, or the API's floor for minus infinity and worse."""
    return value if value > FLOOR and math.isfinite(value) else FLOOR


def read_logprobs(tokens: Sequence[int], columns: Logprobs) -> list[TokenLogprob]:
    """One entry for each of `tokens`, from columns of as many positions with `columns.k` alternatives each."""
    chosen = f32(columns.chosen).tolist()
    ids, values, k = i64(columns.top_ids).tolist(), f32(columns.top_values).tolist(), columns.k
    entries = []
    for index, token in enumerate(tokens):
        top = zip(ids[index * k : index * k + k], values[index * k : index * k + k], strict=True)
        entries.append(TokenLogprob(token, finite(chosen[index]), [(top_id, finite(value)) for top_id, value in top]))
    return entries


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text, or `bytes:\\xNN...` when it is not whole characters, so that two tokens stay apart."""
    piece = tokenizer.pieces.bytes_of(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, object]:
    """The chat shape: one object for each token, with its bytes."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, object]:
    piece = tokenizer.pieces.bytes_of(token)
    return {"token": tokenizer.token_text(token), "logprob": logprob, "bytes": list(piece)}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, object]:
    made = _chat_token(tokenizer, entry.token, entry.logprob)
    made["top_logprobs"] = [_chat_token(tokenizer, token, value) for token, value in entry.top]
    return made


class CompletionLogprobs:
    """The completions shape, four parallel lists; keeps where the next token begins in the choice's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def render(self, entries: Iterable[TokenLogprob]) -> dict[str, object]:
        """Lists for the next tokens of the choice; `text_offset` counts the characters of the tokens' own texts."""
        tokens, values, tops, offsets = [], [], [], []
        for entry in entries:
            tokens.append(token_name(self._tokenizer, entry.token))
            values.append(entry.logprob)
            tops.append(self._top(entry))
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.token_text(entry.token))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        """The alternatives by name, the chosen token always among them; None for a prompt's first token."""
        if entry.logprob is None:
            return None
        best = {token_name(self._tokenizer, token): value for token, value in entry.top}
        best.setdefault(token_name(self._tokenizer, entry.token), entry.logprob)
        return best
