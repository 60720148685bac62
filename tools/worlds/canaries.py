"""Canaries: deliberate faults of the core, each of which the checks must find: what shows that a check can fail.

Owns the table `CANARIES`: what each breaks and the check that must see it. Must never leave a patch behind: `applied`
undoes all of them. Every check of `CHECKS`, and the doubles' own, has at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from daemon.core import (
    admission,
    arrival,
    caching,
    deadlines,
    endings,
    epochs,
    lives,
    microbatches,
    preempt,
    pressure,
    processing,
    resuming,
    scheduler,
    suspects,
)
from daemon.core.memory import Memory
from daemon.core.order import WaitingQueue
from daemon.core.outputs import TokenColumns
from daemon.core.reasons import EndReason
from daemon.core.requests import END_EVENT, Event, Group
from daemon.core.rows import RowTable
from daemon.core.scheduler import SchedulerCore
from daemon.core.state import CoreState
from daemon.core.tree import PrefixTree
from tools.pagesafety.mutants_uses import Patch
from tools.worlds.cases import Case


def hang_ups_count_as_finished(patch: Patch) -> None:
    """A request that its client left is counted among the finished ones."""
    patch.set(endings, "END_EVENT", END_EVENT | {EndReason.ABORT: Event.FINISH})


def choices_are_not_counted(patch: Patch) -> None:
    """A request of several choices counts as one fewer among the accepted."""
    accept = patch.set(arrival, "_accept", None)

    def uncounted(core: CoreState, frontend: int, item: Any, *rest: Any) -> None:
        accept(core, frontend, item, *rest)
        core.totals.accepted -= item.generate.n > 1

    patch.set(arrival, "_accept", uncounted)


def stops_end_as_length(patch: Patch) -> None:
    """A stop string that the front end found ends the request for its length."""
    end = patch.set(scheduler, "end", None)

    def other(core: CoreState, request: Any, reason: EndReason, *rest: Any) -> None:
        end(core, request, EndReason.LENGTH if reason is EndReason.STOP else reason, *rest)

    patch.set(scheduler, "end", other)


def a_resident_chunk_wants_no_tick(patch: Patch) -> None:
    """While a prompt is partly prefilled nobody asks for the next step."""
    wants = patch.set(SchedulerCore, "_wants_tick", None)
    patch.set(SchedulerCore, "_wants_tick", lambda self: wants(self) and self._state.resident is None)


def drains_take_new_requests(patch: Patch) -> None:
    """A draining daemon, or one without a journal, accepts as if nothing had happened."""
    closed = patch.set(arrival, "_closed", None)
    patch.set(arrival, "_closed", lambda core: closed(core) if core.memory is None else None)


def deadlines_pass_unseen(patch: Patch) -> None:
    """Nobody looks at the time."""
    patch.set(deadlines, "expire", lambda core, now_ns, out: None)


class OneNamespace(Group):
    """A group whose namespace is lost on the way."""

    __slots__ = ()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.namespace = ""


def namespaces_share_everything(patch: Patch) -> None:
    """One tenant finds what another stored."""
    patch.set(arrival, "Group", OneNamespace)


class StoresAll(Group):
    """A group that forgot that it must not be stored."""

    __slots__ = ()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.store = True


def secrets_are_stored(patch: Patch) -> None:
    """What must not be stored is."""
    patch.set(arrival, "Group", StoresAll)


def victims_are_taken_unasked(patch: Patch) -> None:
    """Preemption takes whoever is lower, without asking admission whether that helps."""
    honest = patch.set(preempt, "starts", None)
    patch.set(preempt, "starts", lambda core, request, victims: bool(victims) or honest(core, request, victims))


def nobody_counts_who_overtakes(patch: Patch) -> None:
    """The queue goes by its policy for ever."""
    patch.set(WaitingQueue, "overtaken", property(lambda self: 0))
    began = patch.set(WaitingQueue, "began", None)

    def uncounted(self: WaitingQueue, request: Any, tokens: int, overtakes: bool = True) -> None:
        began(self, request, tokens, overtakes)
        self._passed.clear()

    patch.set(WaitingQueue, "began", uncounted)


def quotas_are_not_kept(patch: Patch) -> None:
    """A namespace fills the cache."""
    patch.set(Memory, "keep_quota", lambda self, namespace: None)


def pins_hold_nothing(patch: Patch) -> None:
    """A prefix is said to be pinned, and goes like any other."""
    patch.set(PrefixTree, "pin", lambda self, match, until_ns: True)


def recomputed_tokens_are_new(patch: Patch) -> None:
    """Work that is done again after a retraction is counted as if it were done for the first time."""
    retract = patch.set(pressure, "retract", None)

    def forgetful(core: CoreState, request: Any, *rest: Any, **named: Any) -> None:
        retract(core, request, *rest, **named)
        request.reached_tokens = 0

    patch.set(pressure, "retract", forgetful)


def retractions_are_forgotten(patch: Patch) -> None:
    """A request that was retracted may be chosen again and again."""
    retract = patch.set(pressure, "retract", None)

    def forgetful(core: CoreState, request: Any, *rest: Any, **named: Any) -> None:
        retract(core, request, *rest, **named)
        request.retractions -= 1

    patch.set(pressure, "retract", forgetful)


def hits_are_not_counted(patch: Patch) -> None:
    """Hits work, and the counter of cached tokens stays where it was."""
    begin = patch.set(caching, "begin", None)

    def uncounted(core: CoreState, *rest: Any) -> None:
        before = core.totals.cached_tokens
        begin(core, *rest)
        core.totals.cached_tokens = before

    patch.set(caching, "begin", uncounted)


def reclaimable_counts_what_is_read(patch: Patch) -> None:
    """What the cache could give back includes what requests read."""
    patch.set(PrefixTree, "reclaimable", PrefixTree.held)


def one_page_too_many_is_promised(patch: Patch) -> None:
    """Memory says that one page more fits than there is."""
    room = patch.set(Memory, "room_pages", None)
    patch.set(Memory, "room_pages", lambda self, planned: room(self, planned) + 1)


def a_page_is_lost_on_its_way_back(patch: Patch) -> None:
    """Of the pages that an owner gives back, the last one never arrives."""
    give_back = patch.set(Memory, "give_back", None)

    def careless(self: Memory, parts: Any) -> None:
        pages = parts[self.owner]
        give_back(self, [*parts[: self.owner], pages[:-1] if pages is not None else None])

    patch.set(Memory, "give_back", careless)


def tokens_change_places(patch: Patch) -> None:
    """Two requests that gain a token in one step are told each other's."""

    def swapped(step: int, frontends: Any, requests: Any, tokens: Any, logprobs: Any) -> TokenColumns:
        return TokenColumns(step, frontends, requests, np.ascontiguousarray(tokens[::-1]), logprobs)

    patch.set(processing, "TokenColumns", swapped)


def who_must_wait_is_ended(patch: Patch) -> None:
    """A request that does not fit now is ended as one that never fits."""
    patch.set(admission, "_alone", lambda core, plan: True)


def lives_differ(patch: Patch) -> None:
    """Every second core of a process has a row fewer: something outside the inputs decides."""
    init = patch.set(CoreState, "__init__", None)
    made = [0]

    def other(self: CoreState, config: Any) -> None:
        made[0] += 1
        init(self, config)
        if made[0] % 2:
            self.running_max = max(1, self.running_max - 1)

    patch.set(CoreState, "__init__", other)


def windows_are_a_token_short(patch: Patch) -> None:
    """Window units go back while the next token still reads them."""
    init = patch.set(Memory, "__init__", None)

    def other(self: Memory, *arguments: Any) -> None:
        init(self, *arguments)
        self.windows = tuple((band, max(1, tokens - 1)) for band, tokens in self.windows)

    patch.set(Memory, "__init__", other)


def promises_are_kept_for_the_dead(patch: Patch) -> None:
    """What was promised to a request stays promised when it is gone."""
    release = patch.set(CoreState, "release_row", None)

    def forgetful(self: CoreState, request: Any) -> Any:
        promised = self.steady
        freed = release(self, request)
        self.steady = promised
        return freed

    patch.set(CoreState, "release_row", forgetful)


def ends_of_epochs_lose_output(patch: Patch) -> None:
    """A request whose rank died begins again, and its client is told the same tokens a second time."""
    requeue = patch.set(suspects, "requeue", None)

    def forgetful(core: CoreState, request: Any, now_ns: int) -> Any:
        done = requeue(core, request, now_ns)
        request.kept, request.output_tokens, request.output_logprobs = [], 0, []
        return done

    patch.set(suspects, "requeue", forgetful)


def whoever_runs_is_to_blame(patch: Patch) -> None:
    """Nobody is tried alone, and all that ran when epoch after epoch died end for it."""
    honest = patch.set(suspects, "lost", None)
    patch.set(suspects, "lost", lambda core, request, tried, item, out: honest(core, request, True, item, out))
    patch.set(suspects, "line_up", lambda core: None)


def a_dead_rank_ends_requests(patch: Patch) -> None:
    """The end of an epoch ends what lives, though another epoch follows."""
    ended = patch.set(epochs, "ended", None)
    patch.set(epochs, "ended", lambda core, item, out: ended(core, msgspec.structs.replace(item, recovers=False), out))


def restarts_forget_who_waits(patch: Patch) -> None:
    """The next life takes over only what had been told something."""
    whole = patch.set(lives, "recoverable", None)
    patch.set(lives, "recoverable", lambda core: [one for one in whole(core) if any(x.tokens for x in one.choices)])


def clients_hear_it_all_again(patch: Patch) -> None:
    """Whoever comes back is told the whole output, whatever it holds."""
    tell = patch.set(resuming, "_tell", None)
    patch.set(resuming, "_tell", lambda core, group, choice, position, out: tell(core, group, choice, 0, out))


def micro_batches_overlap(patch: Patch) -> None:
    """A micro-batch is formed again while its forward is in flight."""
    launched = patch.set(microbatches, "launched", None)

    def forgetful(core: CoreState, flight: Any) -> None:
        launched(core, flight)
        core.flying[core.forming] = False

    patch.set(microbatches, "launched", forgetful)
    patch.set(microbatches, "reported", lambda core, flight: None)


def decode_tokens_are_one_behind(patch: Patch) -> None:
    """A decode row brings the token before its newest one."""
    patch.set(RowTable, "newest_tokens", lambda self, rows: self.tail[rows, (self.output[rows] - 2) & 127].tobytes())


def the_loop_raises(patch: Patch) -> None:
    """An input that is legal meets an error that nobody foresaw."""

    def broken(self: SchedulerCore, item: Any, out: Any) -> None:
        raise KeyError(item.frontend)

    patch.set(SchedulerCore, "_frontend_lost", broken)


class Canary(NamedTuple):
    """A deliberate fault: how it is applied, the check that must see it, and in which cases it can show."""

    apply: Callable[[Patch], None]
    check: str
    shows: Callable[[Case], bool] = lambda case: True

    @property
    def breaks(self) -> str:
        """What it breaks, in a sentence."""
        return (self.apply.__doc__ or "").strip()


def _caching(case: Case) -> bool:
    return case.config.enable_prefix_caching


def _happens(case: Case, action: str) -> bool:
    return any(name == action for name, _ in case.actions)


def _windowed(case: Case) -> bool:
    return bool(case.shape.windows)


_ALL = (
    Canary(hang_ups_count_as_finished, "requests"),
    Canary(choices_are_not_counted, "world"),
    Canary(stops_end_as_length, "endings"),
    Canary(a_resident_chunk_wants_no_tick, "liveness"),
    Canary(drains_take_new_requests, "closed"),
    Canary(deadlines_pass_unseen, "deadlines"),
    Canary(namespaces_share_everything, "hits", _caching),
    Canary(secrets_are_stored, "hits", _caching),
    Canary(retractions_are_forgotten, "retractions"),
    Canary(victims_are_taken_unasked, "preemptions", lambda case: case.config.priority_preemption),
    Canary(nobody_counts_who_overtakes, "overtaking", lambda case: case.config.overtaken_max < len(case.asks)),
    Canary(quotas_are_not_kept, "quotas", _caching),
    Canary(pins_hold_nothing, "pins", _caching),
    Canary(recomputed_tokens_are_new, "counters"),
    Canary(hits_are_not_counted, "counters", _caching),
    Canary(reclaimable_counts_what_is_read, "reclaimable", _caching),
    Canary(one_page_too_many_is_promised, "promises"),
    Canary(a_page_is_lost_on_its_way_back, "owners"),
    Canary(tokens_change_places, "tokens"),
    Canary(who_must_wait_is_ended, "memory_ends"),
    Canary(lives_differ, "replay"),
    Canary(windows_are_a_token_short, "rank", _windowed),
    Canary(promises_are_kept_for_the_dead, "core"),
    Canary(ends_of_epochs_lose_output, "tokens", lambda case: _happens(case, "recover")),
    Canary(whoever_runs_is_to_blame, "endings", lambda case: case.poison >= 0),
    Canary(a_dead_rank_ends_requests, "endings", lambda case: _happens(case, "recover")),
    Canary(restarts_forget_who_waits, "world", lambda case: _happens(case, "restart")),
    Canary(clients_hear_it_all_again, "world", lambda case: _happens(case, "resume")),
    Canary(micro_batches_overlap, "rank", lambda case: case.stages > 1 and case.config.overlap),
    Canary(decode_tokens_are_one_behind, "rank", lambda case: case.stages > 1),
    Canary(the_loop_raises, "exception"),
)
CANARIES: dict[str, Canary] = {canary.apply.__name__: canary for canary in _ALL}
"""Every deliberate fault by name."""


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The core with this fault (None: as it is)."""
    patch = Patch()
    try:
        if name is not None:
            CANARIES[name].apply(patch)
        yield
    finally:
        patch.undo()
