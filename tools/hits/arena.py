"""Arena of the hit benchmarks: a model of full attention, one sliding window and recurrent layers, and how much of it.

Owns the sizes of units and of the arena. Must never serve anything.
"""

from __future__ import annotations

from typing import NamedTuple

from allocator.geometry import BandGeometry, Geometry
from daemon.core.limits import CoreConfig
from tools.simulate.engine import arena_bytes_for, one_stage

FULL_BYTES_PER_TOKEN = 4096
WINDOW_BYTES_PER_TOKEN = 8192
WINDOW_TOKENS = 512
SLOT_BYTES = 147_456
ROOM_PPM = 1_000_000


class Served(NamedTuple):
    """How requests are served: tokens a page, most of a prompt in one step, the checkpoint grid, marks and policy."""

    page_size: int
    chunk_tokens: int
    interval: int
    mark_tokens: int
    policy: str = "likely"

    def config(self, running: int) -> CoreConfig:
        """The core's settings with `running` rows."""
        return CoreConfig(
            page_size=self.page_size,
            max_running_requests=running,
            max_queued_requests=4096,
            max_batched_tokens=self.chunk_tokens + running,
            chunked_prefill_size=self.chunk_tokens,
            checkpoint_interval=self.interval,
            checkpoint_mark_tokens=self.mark_tokens,
            checkpoint_policy=self.policy,
        )

    def bands(self) -> list[BandGeometry]:
        """State, window and full attention, in chain order."""
        return [
            BandGeometry("state", "state", SLOT_BYTES),
            BandGeometry(f"window:{WINDOW_TOKENS}", "window", WINDOW_BYTES_PER_TOKEN * self.page_size, WINDOW_TOKENS),
            BandGeometry("full", "full", FULL_BYTES_PER_TOKEN * self.page_size),
        ]

    def geometry(self, tokens: int, requests: int, running: int, room_ppm: int = ROOM_PPM) -> Geometry:
        """One stage with room for `tokens` cached tokens of `requests` requests, every grid point's state and all rows.

        `room_ppm` is how much of that there is, in parts per million.
        """
        pages = -(-tokens // self.page_size) + requests + running
        states = tokens // self.interval + 2 * requests + 3 * running
        everything = arena_bytes_for(self.bands(), (states, pages, pages))
        return one_stage(self.bands(), self.page_size, everything * room_ppm // ROOM_PPM)
