"""Codec: messages to bytes and back. Whatever comes in is either a valid message of its direction or a `DecodeError`.

Owns the one encoder and one decoder per direction. Must never let another exception out of a decoder, whatever the
bytes. `encode(step)` is also the journal's payload of a step: a step is encoded once.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from ipc.checks import CHECKS
from ipc.errors import DecodeError
from ipc.handshake import Limits
from ipc.messages import FromFrontEnd, FromRank, ToFrontEnd, ToRank

_encoder = msgspec.msgpack.Encoder()
_from_frontend: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromFrontEnd)
_to_frontend: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFrontEnd)
_to_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRank)

DEFAULT_LIMITS = Limits()
TRUSTED_LIMITS = Limits(message_bytes_max=256 << 20)  # what the daemon, or a rank it started, sends


def encode(message: FromFrontEnd | ToFrontEnd | ToRank | FromRank) -> bytes:
    """The msgpack bytes of any message."""
    return _encoder.encode(message)


def from_frontend(data: bytes, limits: Limits = DEFAULT_LIMITS) -> FromFrontEnd:
    """A front end's message to the daemon; raises DecodeError only."""
    return cast(FromFrontEnd, _decode(_from_frontend, data, limits))


def to_frontend(data: bytes, limits: Limits = TRUSTED_LIMITS) -> ToFrontEnd:
    """The daemon's message to a front end; raises DecodeError only."""
    return cast(ToFrontEnd, _decode(_to_frontend, data, limits))


def to_rank(data: bytes, limits: Limits = TRUSTED_LIMITS) -> ToRank:
    """The daemon's message to a rank; raises DecodeError only."""
    return cast(ToRank, _decode(_to_rank, data, limits))


def from_rank(data: bytes, limits: Limits = TRUSTED_LIMITS) -> FromRank:
    """A rank's message to the daemon; raises DecodeError only."""
    return cast(FromRank, _decode(_from_rank, data, limits))


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes, limits: Limits) -> Any:
    if len(data) > limits.message_bytes_max:
        raise DecodeError("oversized", f"{len(data)} bytes, the limit is {limits.message_bytes_max}")
    try:
        message = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise DecodeError("invalid", f"not a message of this direction: {error}") from None
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        # Beside msgspec's own: nested far too deep, or an array said to have 2**32 entries.
        raise DecodeError("malformed", f"not a msgpack message: {error or type(error).__name__}") from None
    check = CHECKS.get(type(message))
    if check is not None:
        check(message, limits)
    return message
