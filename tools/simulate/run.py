"""Run: one trace through one core, and what came of it as plain numbers.

Owns the loop that lets requests arrive and the names of the figures. Must never know how they are shown. Invariant: a
run either accounts for every request (`Engine.check_rest`) or says in `error` what did not hold; it never raises for a
defect of the core, so that the other runs of a command are not lost.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from allocator.checks import Checks
from allocator.columns import Int64s, pack_i64
from allocator.geometry import Geometry
from daemon.core.limits import CoreConfig
from daemon.processes import COLLECT_THRESHOLDS
from ipc.messages import Generate, ModelFacts, Step
from tools.simulate.engine import GREEDY, NS_PER_S, Engine, Sent, Times
from tools.simulate.recording import Recording
from tools.simulate.timeline import Timeline
from tools.simulate.traffic import Line, Trace

PERCENTILES = (50, 90, 99, 100)
TELL_EACH_S = 0.1

Tell = Callable[[int], None]
"""Called with the number of requests that have their answer, now and then."""


class Job(NamedTuple):
    """One run: what distinguishes it from the others, and everything that decides it."""

    arena: str
    policy: str
    config: CoreConfig
    geometry: Geometry
    facts: ModelFacts
    times: Times
    speed: float = 1.0  # requests arrive so many times as fast as in the trace
    invariants: int = 1
    journal: str = ""  # a directory that gets the run as a journal


@dataclass(slots=True)
class Run:
    """What came of a job: figures by name, a row per request, memory over time, and the first thing that was wrong."""

    arena: str
    policy: str
    figures: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    live: Int64s = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    idle: Int64s = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    bucket_ns: int = 0
    error: str = ""


def simulate(trace: Trace, job: Job, tell: Tell) -> Run:
    """Serve the whole trace; see the module. Raises what opening `job.journal` raises."""
    with Recording(Path(job.journal), job.config, _told(job)) if job.journal else nullcontext() as recording:
        return _serve(trace, job, tell, recording)


def _told(job: Job) -> dict[str, str]:
    """What a journal says of the run beside its configuration: what the device took."""
    times = {f"simulate.{name}": str(value) for name, value in job.times._asdict().items()}
    return {**times, "simulate.speed": str(job.speed), "simulate.arena": job.arena}


def _serve(trace: Trace, job: Job, tell: Tell, recording: Recording | None) -> Run:
    began, last = time.perf_counter(), 0.0
    timeline = Timeline(len(job.geometry.stages[0].bands))
    engine = Engine(
        job.config,
        job.geometry,
        job.facts,
        job.times,
        checks=Checks(job.invariants),
        clock=time.thread_time_ns,
        recording=recording,
    )

    def on_step(step: Step) -> None:
        nonlocal last
        timeline.add(engine.now_ns, engine.live_units(), engine.idle_units())
        now = time.perf_counter()
        if now - last >= TELL_EACH_S:
            last = now
            tell(engine.answered)

    engine.on_step = on_step
    run = Run(job.arena, job.policy)
    thresholds = gc.get_threshold()
    gc.freeze()  # the trace and all else that is here is none of the core's garbage
    gc.set_threshold(*COLLECT_THRESHOLDS)  # as the daemon does
    try:
        for index, line in enumerate(trace.lines):
            engine.advance(max(engine.now_ns, int(line.at_ns / job.speed)))
            engine.submit(_generate(line, trace.prompt(index)), seed=trace.output_token(index))
        engine.run()
        engine.check_rest()
        if recording is not None:
            recording.close(engine.now_ns, "the trace is served", engine.core)
    except Exception as error:  # whatever the core raises is this run's result, and the others go on
        where = traceback.extract_tb(error.__traceback__)[-1]
        run.error = f"{type(error).__name__} at {where.name}: {error}"
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    tell(engine.answered)
    run.live, run.idle = timeline.filled()
    run.bucket_ns = timeline.width_ns
    run.requests = [_row(line, engine.sent[line.id]) for line in trace.lines if line.id in engine.sent]
    run.figures = _figures(trace, job, engine, timeline)
    run.figures["wall_s"] = round(time.perf_counter() - began, 3)
    return run


def _generate(line: Line, prompt: Int64s) -> Generate:
    return Generate(
        id=line.id,
        prompt=pack_i64(prompt),
        sampling=GREEDY,
        max_tokens=line.output_tokens,
        priority=line.priority,
        deadline_ms=line.deadline_ms,
        namespace=line.namespace,
        store=line.store,
        pin_ms=line.pin_ms,
    )


def _row(line: Line, sent: Sent) -> dict[str, Any]:
    """One request as the per-request file has it; times count from its arrival, null: it never came to that."""
    finished = sent.finished
    return {
        "line": line.number,
        "id": line.id,
        "outcome": sent.refused.code if sent.refused is not None else finished.reason if finished is not None else "",
        "prompt_tokens": line.prompt_tokens,
        "output_tokens": sent.tokens,
        "cached_tokens": max(sent.cached_tokens, 0),
        "matched_tokens": finished.matched_tokens if finished is not None else 0,
        "hit_cut": finished.hit_cut if finished is not None else "",
        "queued_ms": _ms(sent.admitted_ns, sent),
        "first_token_ms": _ms(sent.first_token_ns, sent),
        "ended_ms": _ms(sent.ended_ns, sent),
        "retractions": sent.retractions,
        "recomputed_tokens": sent.recomputed_tokens,
    }


def _ms(at_ns: int, sent: Sent) -> float | None:
    return round((at_ns - sent.arrived_ns) / 1e6, 3) if at_ns >= 0 else None


def _figures(trace: Trace, job: Job, engine: Engine, timeline: Timeline) -> dict[str, Any]:
    """The figures of a run; `core` are the core's own counters."""
    gauges = engine.core.gauges()
    sent = list(engine.sent.values())
    totals = {name.removesuffix("_total"): count for name, count in gauges.items() if name.endswith("_total")}
    bands = job.geometry.stages[0].bands
    cached = sum(max(one.cached_tokens, 0) for one in sent)
    admitted = sum(one.admitted_ns >= 0 for one in sent)
    input_tokens = trace.input_tokens
    slot_bytes = sum(band.unit_bytes for band in bands if band.kind == "state")
    checkpoints = totals["checkpoints_given"] * slot_bytes
    seconds = engine.now_ns / NS_PER_S
    return {
        "input_tokens": input_tokens,
        "cached_tokens": cached,
        "hit_rate": cached / input_tokens,
        "cached_tokens_per_request": cached / max(admitted, 1),
        "requests": len(trace.lines),
        "unanswered": len(trace.lines) - engine.answered,
        "refusals": _by_code(one.refused.code for one in sent if one.refused is not None),
        "first_refused": _first_refused(trace, engine),
        "ends": _by_code(reason for one in sent for reason in one.ends.values()),
        "retractions": totals["retractions"],
        "retractions_per_request_most": max((one.retractions for one in sent), default=0),
        "recomputed_tokens": sum(one.recomputed_tokens for one in sent),
        "computed_prompt_tokens": engine.prompt_tokens,
        "output_tokens": engine.output_tokens,
        "queued_ms": _spread([_ms(one.admitted_ns, one) for one in sent]),
        "first_token_ms": _spread([_ms(one.first_token_ns, one) for one in sent]),
        "ended_ms": _spread([_ms(one.ended_ns, one) for one in sent]),
        "simulated_s": seconds,
        "device_busy": engine.busy_ns / max(engine.now_ns, 1),
        "output_tokens_per_s": engine.output_tokens / seconds if seconds else 0.0,
        "steps": totals["steps"],
        "core_us_per_step": _spread([ns / 1000 for ns in engine.core_ns]),
        "peak_bytes": {band.name: int(units) * band.unit_bytes for band, units in _pairs(bands, timeline.peak)},
        "peak_busy_bytes": {
            band.name: int(units) * band.unit_bytes for band, units in _pairs(bands, timeline.peak_busy)
        },
        "evicted_bytes": {band.name: totals[f"evicted_units_{band.name}"] * band.unit_bytes for band in bands},
        "checkpoint_bytes": checkpoints,
        "checkpoint_bytes_per_hit_token": checkpoints / cached if cached else 0.0,
        "decided": {
            f"{verdict} {reason}".strip(): count for (verdict, reason), count in sorted(engine.decided.items())
        },
        "core": totals,
    }


def _pairs(bands: Any, units: Int64s) -> Any:
    return zip(bands, units.tolist(), strict=True)


def _by_code(codes: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for code in codes:
        found[str(code)] = found.get(str(code), 0) + 1
    return dict(sorted(found.items()))


def _first_refused(trace: Trace, engine: Engine) -> dict[str, dict[str, Any]]:
    """Of every code of refusal the first request: its line in the file, and what it was told."""
    found: dict[str, dict[str, Any]] = {}
    for line in trace.lines:
        sent = engine.sent.get(line.id)
        if sent is not None and sent.refused is not None:
            found.setdefault(str(sent.refused.code), {"line": line.number, "message": sent.refused.message})
    return dict(sorted(found.items()))


def _spread(values: list[float | None] | list[float]) -> dict[str, float | None]:
    """Mean and percentiles of what is there; None where nothing is."""
    some = np.array([value for value in values if value is not None], np.float64)
    if not len(some):
        return dict.fromkeys(("mean", *(f"p{at}" for at in PERCENTILES)))
    found = np.percentile(some, PERCENTILES)
    shown: dict[str, float | None] = {
        f"p{at}": round(float(value), 3) for at, value in zip(PERCENTILES, found, strict=True)
    }
    return {"mean": round(float(some.mean()), 3), **shown}


def with_policy(config: CoreConfig, eviction: str, checkpoints: str) -> CoreConfig:
    """The configuration of one policy of several that are compared."""
    return msgspec.structs.replace(config, eviction_policy=eviction, checkpoint_policy=checkpoints)
