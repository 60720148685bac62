"""SchedulerCore: the pure scheduler. `feed` one input, get what the shell must do; control flow only.

Owns the dispatch of inputs and the decision when a step may be formed. Must never read a clock, a socket, randomness
or anything else that is not an input: the same inputs give the same outputs, byte for byte. Invariants: only `Ticked`
emits a step; at most two forwards are in flight with overlap, one without, or one per micro-batch where there are
several; nothing a front end sends raises.

    Arrived -> accept | refuse | answer again       Reported -> commit, end          Ticked -> deadlines, one step
    Aborted, FinishAsked, FrontEndLost -> end       Epoch... -> memory comes, goes   Controlled -> drain, stop
    Resumed -> tell what a client lacks             Recovered -> take over what an earlier life left
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from allocator.checks import Checks
from allocator.errors import InvariantBroken
from daemon.core import caching, deadlines, epochs, gauges, inputs, lives, microbatches, relief
from daemon.core.account import Account, account_of
from daemon.core.arrival import arrive
from daemon.core.batching import bare_step, form
from daemon.core.digest import state_digest
from daemon.core.endings import end, end_all, end_group, forget
from daemon.core.inputs import Input
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory, minus
from daemon.core.outputs import Decided, Outputs
from daemon.core.passes import PassedOver, passed_over
from daemon.core.processing import process
from daemon.core.reasons import EndReason, Verdict
from daemon.core.requests import State
from daemon.core.resuming import resumed
from daemon.core.state import CoreState
from ipc.messages import Step

BARE_STEPS_MAX = 4  # steps without a forward that may wait for their report
STALL_RETRY_NS = 1_000_000_000


class SchedulerCore:
    """The scheduler of one daemon life.

    `checks` is the level of invariant checks; no decision depends on it.
    Raises ValueError for a configuration that cannot work, and InvariantBroken out of `feed` for inputs that a correct
    shell and correct ranks cannot produce; the epoch is over then.
    """

    def __init__(self, config: CoreConfig, checks: Checks | None = None, state: CoreState | None = None) -> None:
        """A new core, or with `state` one that goes on from there; the state is this core's own from then on."""
        self._state = CoreState(config) if state is None else state
        assert self._state.config == config, "a state belongs to the configuration that it grew under"
        self._checks = checks or Checks()
        self._handlers: dict[type[Any], Callable[[Any, Outputs], None]] = {
            inputs.Arrived: lambda item, out: arrive(self._state, item, out),
            inputs.Aborted: self._aborted,
            inputs.FinishAsked: self._finish_asked,
            inputs.Acknowledged: self._acknowledged,
            inputs.FrontEndLost: self._frontend_lost,
            inputs.Resumed: lambda item, out: resumed(self._state, item, out),
            inputs.Reported: partial(process, self._state),
            inputs.TransferEnded: _impossible,
            inputs.ExtentsFixed: _impossible,
            inputs.FlushAsked: self._flush_asked,
            inputs.EpochBegan: lambda item, out: epochs.began(self._state, item, self._checks, out),
            inputs.EpochEnded: lambda item, out: epochs.ended(self._state, item, out),
            inputs.Controlled: self._controlled,
            inputs.JournalDegraded: self._journal_degraded,
            inputs.Recovered: lambda item, out: lives.recovered(self._state, item, out),
            inputs.Ticked: self._ticked,
        }

    @property
    def state(self) -> CoreState:
        """Everything that the core knows: to be written down, not to be changed."""
        return self._state

    @property
    def frontends(self) -> list[str]:
        """Names of front ends; outputs name them by index. Empty where one was lost and its name given up since."""
        return self._state.frontends

    def feed(self, item: Input) -> Outputs:
        """Apply one input; the outputs are the caller's and are never touched again."""
        out, memory = Outputs(), self._state.memory
        before = memory.evictions if memory is not None else 0
        self._handlers[type(item)](item, out)
        if self._state.memory is not None:
            self._state.memory.settle()
            if self._state.memory.evictions != before:
                self._tell_evicted(self._state.memory, item.now_ns, out)
        out.wants_tick = self._wants_tick()
        out.due_ns = self._due_ns()
        return out

    def gauges(self) -> dict[str, int]:
        """Counters and gauges by name."""
        return gauges.gauges(self._state)

    def account(self) -> Account:
        """What became of all choices of this life, behind what was fed."""
        return account_of(self._state)

    def view(self, now_ns: int | None = None) -> dict[str, Any]:
        """The whole state as plain values, for people; with a time the ages of requests too."""
        return gauges.view(self._state, now_ns)

    def request_view(self, request: int, now_ns: int | None = None) -> dict[str, Any] | None:
        """One live request as plain values, or None."""
        return gauges.request_view(self._state, request, now_ns)

    @property
    def passes(self) -> int:
        """Scheduling passes so far, whether they formed a step or not."""
        return self._state.totals.passes

    def passed_over(self, request: int) -> PassedOver | None:
        """Why the newest pass gave this live request no tokens; None when it did, or the request is not live."""
        return passed_over(self._state, request)

    def recoverable(self) -> list[inputs.RecoveredGroup]:
        """What the next life of the daemon takes over from this one, for its `Recovered`."""
        return lives.recoverable(self._state)

    @property
    def next_request(self) -> int:
        """The next free number of a request."""
        return self._state.next_request

    def state_digest(self) -> bytes:
        """16 bytes over everything that can influence a later decision."""
        return state_digest(self._state)

    def _tell_evicted(self, memory: Memory, now_ns: int, out: Outputs) -> None:
        """All that this input took from the prefix cache: one decision for who needed it, one for quotas."""
        core, evicted, beyond = self._state, tuple(memory.evicted.values()), tuple(memory.quota_evicted.values())
        for_quota = minus(beyond, core.told_evicted[1])
        reclaimed = minus(minus(evicted, core.told_evicted[0]), for_quota)
        core.told_evicted = (evicted, beyond)
        for reason, gone in (("reclaim", reclaimed), ("quota", for_quota)):
            numbers = {f"units_{band}": units for band, units in zip(memory.evicted, gone, strict=True) if units}
            if numbers:
                out.decisions.append(Decided(now_ns, Verdict.EVICTED, 0, reason, numbers))

    # --- ends from outside ---------------------------------------------------------------------------------------

    def _aborted(self, item: inputs.Aborted, out: Outputs) -> None:
        group = self._state.group_of(item.frontend, item.id)
        if group is not None:
            end_group(self._state, group, EndReason.ABORT, f"by {item.by}", item.now_ns, out)

    def _finish_asked(self, item: inputs.FinishAsked, out: Outputs) -> None:
        group = self._state.group_of(item.frontend, item.id)
        if group is None or not 0 <= item.choice < group.accepted.n:
            return
        request = self._state.requests.get(group.accepted.first_request + item.choice)
        if request is not None:
            detail = "stop string found by the front end"
            end(self._state, request, EndReason.STOP, detail, item.now_ns, out, item.output_tokens)

    def _acknowledged(self, item: inputs.Acknowledged, out: Outputs) -> None:
        for id in item.ids:
            group = self._state.group_of(item.frontend, id)
            if group is not None and group.live == 0:
                forget(self._state, group)

    def _frontend_lost(self, item: inputs.FrontEndLost, out: Outputs) -> None:
        index = self._state.frontend_index.get(item.frontend)
        if index is None:
            return
        for key in [key for key in self._state.groups if key[0] == index]:
            group = self._state.groups.get(key)  # the bound on ended ones may have taken it meanwhile
            if group is not None:
                end_group(self._state, group, EndReason.ABORT, "by frontend: it was lost", item.now_ns, out)
            if key in self._state.groups:
                forget(self._state, self._state.groups[key])
        self._state.lose_frontend(index)

    # --- the daemon's own orders ----------------------------------------------------------------------------------

    def _controlled(self, item: inputs.Controlled, out: Outputs) -> None:
        if item.order == "flush_cache":
            self._flush_cache(item.now_ns, out)
            return
        if item.order == "snapshot":
            self._state.snapshot_wanted = True
            return
        if item.order not in ("drain", "stop", "drain_expired"):
            raise InvariantBroken(
                "core.order", f"{item.order!r} is none of drain, stop, drain_expired, flush_cache, snapshot"
            )
        self._state.draining = True
        out.decisions.append(Decided(item.now_ns, Verdict.DRAINING, 0, item.order, {"live": self._state.live}))
        if item.order != "drain":
            detail = "the drain timeout passed" if item.order == "drain_expired" else "the daemon was told to stop"
            end_all(self._state, EndReason.DRAINED, detail, item.now_ns, out)

    def _flush_cache(self, now_ns: int, out: Outputs) -> None:
        """Everything in the prefix cache that no request reads goes back to the arena."""
        core, numbers = self._state, dict[str, int]()
        core.totals.cache_flushes += 1
        if core.memory is not None:
            freed, kept = caching.flush(core)
            for band, gone, left in zip(core.memory.chain.bands, freed, kept, strict=True):
                numbers |= {f"freed_units_{band.name}": gone, f"kept_units_{band.name}": left}
        out.decisions.append(Decided(now_ns, Verdict.FLUSHED, 0, "cache", numbers))

    def _journal_degraded(self, item: inputs.JournalDegraded, out: Outputs) -> None:
        self._state.degraded = "" if item.durable else (item.what or "unknown cause")

    def _flush_asked(self, item: inputs.FlushAsked, out: Outputs) -> None:
        if self._state.memory is not None and item.moves_max > 0:
            self._state.flush_moves = min(item.moves_max, self._state.config.flush_moves_max)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _ticked(self, item: inputs.Ticked, out: Outputs) -> None:
        core, now_ns = self._state, item.now_ns
        if core.deadlines:
            deadlines.expire(core, now_ns, out)
        if core.memory is None:
            return
        core.memory.at(now_ns)
        flushed = core.flush_moves > 0 and self._bare_allowed()
        if flushed:
            core.memory.flush(core.flush_moves)
            core.flush_moves = 0
        if core.in_flight < core.in_flight_max:
            out.step = form(core, now_ns, out) if core.microbatches == 1 else self._form(now_ns, out)
            core.blocked = out.step is None
            self._count_stall(out.step, now_ns, out)
        if out.step is None and (flushed or self._owes_step()):
            out.step = bare_step(core)
        if core.snapshot_wanted:
            out.step = self._with_snapshot(out.step)
        if core.busy and not core.live and not core.in_flight:
            self._become_idle(now_ns, out)

    def _form(self, now_ns: int, out: Outputs) -> Step | None:
        """A step with a forward, of the first micro-batch that can have one now."""
        core = self._state
        for one in microbatches.ready(core):
            core.forming = one
            step = form(core, now_ns, out)
            if step is not None:
                return step
        return None

    def _with_snapshot(self, step: Step | None) -> Step | None:
        """The step, a bare one if need be, that asks the ranks for their part of a snapshot."""
        if step is None and self._bare_allowed():
            step = bare_step(self._state)
        if step is None:
            return None
        self._state.snapshot_wanted = False
        return msgspec.structs.replace(step, snapshot=True)

    def _become_idle(self, now_ns: int, out: Outputs) -> None:
        core = self._state
        core.check_empty()
        core.busy = False
        numbers = {"live_units": 0, "cached_units": 0, "rows": core.rows.used_count}
        if core.memory is not None:
            numbers |= {"live_units": sum(core.memory.live_units()), "cached_units": core.memory.cached_units()}
        out.decisions.append(Decided(now_ns, Verdict.IDLE, 0, "", numbers))

    def _count_stall(self, step: Step | None, now_ns: int, out: Outputs) -> None:
        """Progress is scheduled tokens: work waits, nothing is in flight and no token was scheduled."""
        core = self._state
        if step is not None or not core.live or core.in_flight:
            core.stalled_ticks = 0
            return
        core.stalled_ticks += 1
        core.stall_retry_ns = now_ns + STALL_RETRY_NS
        if core.stalled_ticks == core.config.stall_steps:
            core.totals.stalls += 1
            assert core.memory is not None, "only an epoch stalls"
            numbers = {
                "live": core.live,
                "waiting": len(core.queue),
                "parked": core.counts[State.PARKED_CHUNK] + core.counts[State.PARKED_ROW],
                "live_units": sum(core.memory.live_units()),
                "capacity_pages": core.memory.capacity_pages,
                "ticks": core.stalled_ticks,
            }
            words, last = relief.last_verdicts(core)
            out.decisions.append(Decided(now_ns, Verdict.STALLED, 0, f"livelock: {words}", numbers | last))

    def _bare_allowed(self) -> bool:
        core = self._state
        return len(core.flights) - core.in_flight < BARE_STEPS_MAX

    def _owes_step(self) -> bool:
        """With nothing in flight the ranks must still hear of frees and of the newest result."""
        core = self._state
        assert core.memory is not None, "only an epoch has steps"
        return not core.in_flight and (core.memory.has_ops or core.told_through != core.processed_through)

    def _wants_tick(self) -> bool:
        core = self._state
        if core.memory is None:
            return False
        if (core.flush_moves or core.snapshot_wanted) and self._bare_allowed():
            return True
        if core.in_flight >= core.in_flight_max:
            return False
        if not core.live:
            return not core.in_flight and (core.busy or self._owes_step())
        if core.blocked:
            return not core.in_flight and (self._owes_step() or core.stalled_ticks < core.config.stall_steps)
        if core.microbatches > 1:
            return any(True for _ in microbatches.ready(core))
        return bool(len(core.queue) or core.resident is not None or len(core.rows.decode_batch(0)))

    def _due_ns(self) -> int | None:
        core = self._state
        due = core.due_ns() if core.deadlines else None
        if core.stalled_ticks >= core.config.stall_steps:
            return core.stall_retry_ns if due is None else min(due, core.stall_retry_ns)
        return due


def _impossible(item: Any, out: Outputs) -> None:
    """No transfer and no fixed extent exists yet, so no report about one can be true."""
    raise InvariantBroken("core.impossible_input", f"{type(item).__name__}: no transfer was ever submitted")
