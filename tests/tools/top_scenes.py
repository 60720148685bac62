"""Answers of a daemon as the view gets them, made to order."""

from __future__ import annotations

from typing import Any

import msgspec

from daemon.core.outputs import Decided
from daemon.core.overview import LiveRow
from daemon.recent import Sums, Told
from daemon.watch import Watched, WatchedBand, WatchedStage
from ipc.messages import ModelFacts

S = 1_000_000_000
MIB = 1 << 20
FACTS = ModelFacts("toy", "modeled", 1000, 4096, "uint64", [2])


def row(request: int, **more: Any) -> LiveRow:
    """A running request; anything else by name."""
    values: dict[str, Any] = {
        "request": request,
        "id": f"cmpl-{request:04d}",
        "frontend": "fe",
        "choice": 0,
        "stage": "running",
        "age_ms": 1000 + request,
        "priority": 0,
        "row": request,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "max_output": 50,
        "scheduled_tokens": 100,
        "target_tokens": 100,
        "pages": 7,
        "shared_pages": 2,
        "cached_tokens": 32,
        "retractions": 0,
        "losses": 0,
        "ahead": -1,
        "waits_for": "",
        "waits_numbers": {},
    }
    return LiveRow(**(values | more))


def waiting(request: int, place: int, reason: str = "rows", **numbers: int) -> LiveRow:
    """A request in the queue."""
    stands = {"stage": "waiting", "row": -1, "ahead": place, "output_tokens": 0, "pages": 0}
    return row(request, **stands, waits_for=reason, waits_numbers=numbers or {"limit": 4})


def stage(arena_bytes: int = 8 * MIB, **units: tuple[int, int, int, int, int]) -> WatchedStage:
    """A stage with the bands state and full; units are live, hole, pending, beyond and reclaimable ones."""
    given = {"state": (10, 0, 0, 90, 4), "full": (1000, 8, 16, 900, 600)} | units
    size = {"state": 16384, "full": 4096}
    bands = [
        WatchedBand(name, size[name], live, hole, pending, beyond, reclaimable, reclaimable)
        for name, (live, hole, pending, beyond, reclaimable) in given.items()
    ]
    return WatchedStage(arena_bytes, 4096, bands)


def watched(now_s: float = 10.0, **more: Any) -> Watched:
    """An answer; anything but its time by name. `gauges`, `sums` and `epoch` are put over what is there."""
    requests = more.pop("requests", [row(1), row(2)])
    gauges = {"live": len(requests), "running": 2, "waiting": 0, "accepted_total": 100, "output_tokens_total": 1000}
    epoch = {"number": 1, "running": True, "restarts": 0, "last_loss": ""} | more.pop("epoch", {})
    health = {"ready": True, "progress": True, "reasons": []} | more.pop("health", {})
    sums = dict.fromkeys(Sums.__slots__, 0) | more.pop("sums", {})
    policies = {"max_running_requests": 4, "page_size": 16}
    values: dict[str, Any] = {
        "now_ns": int(now_s * S),
        "life": "a" * 32,
        "began_ns": 0,
        "facts": FACTS,
        "policies": policies,
        "epoch": epoch,
        "health": health,
        "gauges": gauges | more.pop("gauges", {}),
        "sums": sums,
        "stages": [stage()],
        "requests": requests,
        "serial": 0,
        "decisions": [],
        "frontends": [],
        "journal": {},
        "answer_us": 250,
    }
    return Watched(**(values | more))


def told(serial: int, verdict: str, request: int = 0, reason: str = "", at_s: float = 9.0, **numbers: int) -> Told:
    """A decision."""
    return Told(serial, Decided(int(at_s * S), verdict, request, reason, numbers))


def over_the_wire(answer: Watched) -> Watched:
    """As the view gets it."""
    return msgspec.json.decode(msgspec.json.encode(answer), type=Watched)
