"""Transfers: what a device asks of the engine that moves units between ranks.

Owns the interface. Must never be given a virtual id as an address: a device resolves units before it calls. This
version ships no engine: a rank has none, and an op that needs one is refused by name.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from allocator.columns import Int32s
from daemon.rank.errors import StepRefused


class TransferEngine(Protocol):
    """Moves whole units of this rank's arena; unit `u` of a band is bytes [u * unit_bytes, (u + 1) * unit_bytes)."""

    def submit(self, use: int, band: int, units: Int32s) -> None:
        """Start pushing these units to the peer of `use`; called once for each band of the use."""

    def publish(self, use: int, band: int, virtual: Int32s, units: Int32s) -> None:
        """Tell the peer of `use` where these units lie (`virtual`: what both call them); it may touch them from now."""

    def wait(self, use: int) -> None:
        """Return when no byte of the use's units is touched any more; raises RankError past the engine's deadline."""

    def end(self, use: int) -> None:
        """The use is over on every rank; forget it."""


def no_engine(use: int) -> NoReturn:
    """Refuse transfer `use`: raises StepRefused."""
    raise StepRefused(
        f"transfer {use} needs a transfer engine, and this rank has none: this version ships no engine; "
        "the daemon must not order sends or publications"
    )
