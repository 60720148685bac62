"""Prompts by name: endless streams of tokens, of which prompts and shared beginnings are cut.

Owns the streams. Must never depend on anything but a stream's number and a position, so that prompts can be written
down as lengths: two prompts that begin with as many tokens of one stream have these in common.
"""

from __future__ import annotations

MASK = 2**64 - 1


def stream_tokens(stream: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens of a stream."""
    return [_token(stream, position, vocab_size) for position in range(count)]


def _token(stream: int, position: int, vocab_size: int) -> int:
    mixed = (stream * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & MASK
    mixed = ((mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9) & MASK
    return (mixed ^ mixed >> 29) % vocab_size
