"""Handshake: which versions understand each other, and the limits both ends keep.

Owns the limits table. Must never hold a limit that a decision of the core depends on (`daemon.core.limits`): these
protect the process, not the policy. The daemon's values travel in `Welcome`; a front end checks against them before
it sends, because a message over the size limit costs its sender the connection.
"""

from __future__ import annotations

import msgspec

from ipc.messages import PROTOCOL_VERSION

VERSIONS_UNDERSTOOD = frozenset({PROTOCOL_VERSION})


class Limits(msgspec.Struct, frozen=True):
    """What one front-end socket takes; every field is a count, or bytes where it says so."""

    message_bytes_max: int = 16 << 20  # one message; over it ZeroMQ itself drops the connection
    prompt_tokens_max: int = 1 << 20
    stop_ids_max: int = 1024
    choices_max: int = 1024  # n of one Generate
    id_bytes_max: int = 256
    namespace_bytes_max: int = 256
    frontend_name_bytes_max: int = 128
    ids_per_acknowledge_max: int = 4096
    ask_options_max: int = 32
    asks_running_max: int = 16  # questions being answered at once, all front ends together; as many of watchers
    frontends_max: int = 64  # names connected, or silent but not yet given up
    requests_per_frontend_max: int = 4096  # sent and not ended
    outbox_messages_max: int = 4096  # queued for one front end beyond ZeroMQ's own queue
    outbox_bytes_max: int = 64 << 20
    watchers_max: int = 32  # names of `Connect.watches`, connected or silent but not yet given up

    def as_dict(self) -> dict[str, int]:
        """The limits by name, as `Welcome` carries them."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Limits:
        """Limits as the other end stated them; names unknown here are ignored, missing ones keep their default."""
        known = {name: values[name] for name in cls.__struct_fields__ if name in values}
        return cls(**known)


def version_problem(version: int, whose: str) -> str:
    """The sentence to refuse a peer of another protocol version with; empty when it is understood."""
    if version in VERSIONS_UNDERSTOOD:
        return ""
    known = ", ".join(str(v) for v in sorted(VERSIONS_UNDERSTOOD))
    return f"{whose} speaks protocol version {version}, this process understands {known}: run both from one release"
