"""Errors: everything the ipc room raises on purpose.

IpcError
├── DecodeError          bytes that are not the message they should be
├── EndpointError        an address that cannot be used
│   ├── EndpointInUse    another live process listens there
│   └── InsecureEndpoint tcp without keys and without the explicit wish for it
├── KeyFileError         a CURVE key file that is missing, malformed or readable by others
├── PeerGone             the router knows no such peer any more
│   └── RankGone         ... and that peer was a rank
├── Dismissed            the daemon does not take this rank in: it ends
├── RankStalled          a rank does not read: its queue is at the high-water mark
├── StreamBroken         a rank's messages are out of order
├── VersionMismatch      the two ends speak different protocol versions
└── DaemonLost           a front end's daemon is dead, stopped or was replaced
"""

from __future__ import annotations

from ipc.rank_id import RankId, rank_name


class IpcError(Exception):
    """Base of all errors of this room."""


class DecodeError(IpcError):
    """A message was not taken. `code` is machine-readable; `field` and `id` are filled where they could be read."""

    def __init__(self, code: str, text: str, field: str = "", id: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.field = field
        self.id = id


class EndpointError(IpcError):
    """An endpoint that cannot be bound or connected to; the text says what to do."""


class EndpointInUse(EndpointError):
    """A live process already listens on this socket file."""


class InsecureEndpoint(EndpointError):
    """A tcp endpoint needs CURVE keys, or `insecure=True`."""


class KeyFileError(IpcError):
    """A key file is missing, malformed, or its secret can be read by other users."""


class PeerGone(IpcError):
    """The router has no connection to this peer (any more)."""


class RankGone(PeerGone):
    """A rank that should be there has left, or has not joined; `what` is the text without its name, if it is one."""

    def __init__(self, text: str, rank: RankId | None = None) -> None:
        super().__init__(text if rank is None else f"{rank_name(rank)} {text}")
        self.what, self.rank = text, rank


class RankStalled(IpcError):
    """A rank has not read so many messages that its queue is at the high-water mark; `what`: without its name."""

    def __init__(self, text: str, rank: RankId) -> None:
        super().__init__(f"{rank_name(rank)} {text}")
        self.what, self.rank = text, rank


class Dismissed(IpcError):
    """A rank that wanted to join was told to stop; `again`: another life of the daemon will want it."""

    def __init__(self, why: str, again: bool) -> None:
        super().__init__(f"not taken in: {why}")
        self.why, self.again = why, again


class StreamBroken(IpcError):
    """The order within one rank's stream does not hold; the text names rank, epoch and both sequence numbers."""


class VersionMismatch(IpcError):
    """The other end speaks another protocol version; the text names both."""


class DaemonLost(IpcError):
    """The daemon is gone, stopped or has forgotten this front end; `reason` says which, for logs and clients."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
