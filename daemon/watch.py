"""Watch: what the daemon tells a live view, as plain values.

Owns the answers' shape, for both of their ends, and their bounds. Must never change anything, nor take a time that
grows with the queue, with what is held or with how long the daemon lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from daemon.core.overview import LiveRow, live_row, live_rows
from daemon.core.reasons import Verdict
from daemon.core.requests import State
from daemon.recent import Recent, Told
from ipc.messages import ModelFacts

if TYPE_CHECKING:
    from daemon.app import Daemon

ROWS_MAX = 512  # live requests in one answer
DECISIONS_MAX = 256  # decisions in one answer
REQUEUED = "requeued"  # a stage beside those of the core: see `_named`


class WatchedBand(msgspec.Struct, frozen=True):
    """One band of one stage in units, as its ranks reported it last; `unit_bytes` 0: the stage stores nothing of it.

    `cached` units are in the prefix cache, `reclaimable` ones of them without a reader, both by the daemon's own books.
    """

    name: str
    unit_bytes: int
    live: int = 0
    hole: int = 0
    pending: int = 0
    beyond: int = 0
    cached: int = 0
    reclaimable: int = 0


class WatchedStage(msgspec.Struct, frozen=True):
    """One pipeline stage's arena: its bytes, those of them that no band uses, and the bands in chain order."""

    arena_bytes: int
    fixed_bytes: int
    bands: list[WatchedBand]


class Watched(msgspec.Struct, frozen=True):
    """The daemon at one moment. `gauges` are the core's numbers by name, `sums` those of `daemon.recent.Sums`.

    `decisions` are those behind the serial that the asker named. `requests` are at most as many as were asked for, of
    `gauges["live"]`. `answer_us` is what the answer before this one took of the daemon's loop.
    """

    now_ns: int
    life: str
    began_ns: int
    facts: ModelFacts | None
    policies: dict[str, Any]
    epoch: dict[str, Any]
    health: dict[str, Any]
    gauges: dict[str, int]
    sums: dict[str, int]
    stages: list[WatchedStage]
    requests: list[LiveRow]
    serial: int
    decisions: list[Told]
    frontends: list[dict[str, Any]]
    journal: dict[str, Any]
    answer_us: int


class WatchedLife(msgspec.Struct, frozen=True):
    """What is known of one request: as it stands (None: it ended), and its decisions, `left_out` missing at `gap`."""

    request: int
    id: str
    frontend: str
    prompt_tokens: int
    now_ns: int
    live: LiveRow | None
    events: list[Told]
    gap: int
    left_out: int


SHOWN_POLICIES = (
    *("schedule_policy", "eviction_policy", "checkpoint_policy", "reserve", "page_size", "max_running_requests"),
    *("max_batched_tokens", "chunked_prefill_size", "enable_prefix_caching"),
)


def watched(daemon: Daemon, options: dict[str, int], began_ns: int, answer_ns: int) -> Watched:
    """The answer to `watch`. Options: `since` (serial), `rows` and `decisions` (at most so many)."""
    now_ns, recent = daemon.clock.now_ns(), daemon.observer.recent
    epoch = daemon.epochs.epoch
    gauges = daemon.core.gauges()
    rows = max(0, min(ROWS_MAX, options.get("rows", ROWS_MAX)))
    decisions = max(0, min(DECISIONS_MAX, options.get("decisions", DECISIONS_MAX)))
    return Watched(
        now_ns=now_ns,
        life=daemon.life,
        began_ns=began_ns,
        facts=epoch.facts if epoch else None,
        policies={name: getattr(daemon.core_config, name) for name in SHOWN_POLICIES},
        epoch=daemon.epochs.status(),
        health=daemon.health.report(),
        gauges=gauges,
        sums=recent.sums(),
        stages=_stages(daemon, gauges),
        requests=[_named(row, recent) for row in live_rows(daemon.core.state, now_ns, rows)],
        serial=recent.serial,
        decisions=recent.decisions(options.get("since", 0), decisions),
        frontends=daemon.gateway.frontends(),
        journal=daemon.journal_state(),
        answer_us=answer_ns // 1000,
    )


def _named(row: LiveRow, recent: Recent) -> LiveRow:
    """The row; its stage says `requeued` where it was no retraction that took its place from it.

    The core has one state for both, as either way it waits with its output kept and nothing else.
    """
    if row.stage != State.RETRACTED:
        return row
    life = recent.life(row.request)
    back = life.back if life is not None else ""
    retracted = back == Verdict.RETRACTED if back else row.retractions > 0
    return row if retracted else msgspec.structs.replace(row, stage=REQUEUED)


def _stages(daemon: Daemon, gauges: dict[str, int]) -> list[WatchedStage]:
    epoch, counted = daemon.epochs.epoch, daemon.observer.bands
    stages = []
    for place, stage in enumerate(epoch.geometry.stages if epoch else ()):
        rows = counted[place] if place < len(counted) else []
        bands = []
        for index, band in enumerate(stage.bands):
            cached = gauges.get(f"cached_units_{band.name}", 0)
            reclaimable = gauges.get(f"reclaimable_units_{band.name}", 0)
            units = rows[index] if index < len(rows) else (0, 0, 0, 0)
            bands.append(WatchedBand(band.name, band.unit_bytes, *units, cached, reclaimable))
        stages.append(WatchedStage(stage.arena_bytes, stage.chain_start_bytes, bands))
    return stages


def life_of(daemon: Daemon, request: int) -> WatchedLife | None:
    """The answer to `life`; None when nothing is known of the request."""
    now_ns, life = daemon.clock.now_ns(), daemon.observer.recent.life(request)
    live = live_row(daemon.core.state, request, now_ns)
    if live is not None:
        live = _named(live, daemon.observer.recent)
    if life is None and live is None:
        return None
    if life is None:
        assert live is not None, "one of both is there"
        return WatchedLife(request, live.id, live.frontend, live.prompt_tokens, now_ns, live, [], 0, 0)
    return WatchedLife(
        request=request,
        id=life.id or (live.id if live is not None else ""),
        frontend=life.frontend or (live.frontend if live is not None else ""),
        prompt_tokens=life.prompt_tokens or (live.prompt_tokens if live is not None else 0),
        now_ns=now_ns,
        live=live,
        events=[*life.first, *life.last],
        gap=len(life.first),
        left_out=life.left_out,
    )
