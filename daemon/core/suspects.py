"""Suspects: requests that had a row in epoch after epoch that died, and got hardly further in any; each is tried alone.

Owns the count of such epochs, the trial, and the end of a request under which they go on dying. Must never end anybody
that ran beside others when the epoch died: that says nothing about it. Invariants: while an epoch has suspects nobody
else starts, and at most one request has a row; who gets `ENOUGH_TOKENS` further in one epoch is no suspect any more.

    epoch lost   a row, and got enough further -> 0 losses            (tokens committed, or prompt positions reported
                 a row, and did not            -> one more             that none of its forwards had reached before)
                 no row                        -> as before
    epoch begins so many losses               -> suspect: most losses first, then as they came
    trial        it gets enough further       -> acquitted: waits again behind the others, runs on if it was the last
                 it ends                      -> as it may end at any time
                 the epoch is lost            -> one more; `epoch_losses_max` of them: ends with reason fault

Losses grow only where an epoch ends, so the suspects of an epoch are known when it begins and everything is free. A
trial is as long as its prefill and eight tokens more, or only up to one more chunk, so all of them are over soon.

Enough is more than one token: what dies of decoding gets one from every prefill, and would go on for ever. It is
little, since all that ran beside it are tried too, and because epochs in which nobody gets even that far use up the
restarts of the daemon within seconds: deaths now and then, of whatever, leave every request more than that in between.
"""

from __future__ import annotations

from daemon.core import caching
from daemon.core.endings import end
from daemon.core.inputs import EpochEnded
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import EndReason, Verdict
from daemon.core.requests import ENOUGH_TOKENS, Request
from daemon.core.requeue import requeue
from daemon.core.state import CoreState

LOSSES_SUSPECTED = 2  # one loss happens to whoever runs when a rank dies of something else


def suspected(config: CoreConfig, losses: int) -> bool:
    """Whether a request with so many losses is tried before anybody else starts."""
    most = config.epoch_losses_max
    return most > 0 and losses >= max(1, min(LOSSES_SUSPECTED, most - 1))


def line_up(core: CoreState) -> None:
    """An epoch begins: who is to be tried, in which order."""
    assert core.trial is None, "nobody has a row yet"
    found = [one for one in core.requests.values() if suspected(core.config, one.losses)]
    core.suspects = {one.number: None for one in sorted(found, key=lambda one: (-one.losses, one.number))}


def standing(core: CoreState, request: Request) -> tuple[int, int]:
    """Losses of a live request, and how far it ever got, in tokens, as if its row were taken now."""
    furthest = request.furthest_tokens
    if request.row >= 0:
        output = int(core.rows.output[request.row])
        if output > request.began_output:
            furthest = max(furthest, request.prompt_tokens + output)
    enough = furthest - request.reached_before(core.epoch) >= ENOUGH_TOKENS
    return 0 if enough else request.losses, furthest


def reported(core: CoreState, now_ns: int, out: Outputs) -> None:
    """A forward came back: who is on trial and got enough further is no suspect any more, and makes place."""
    request = core.trial
    assert request is not None, "asked while somebody is tried"
    assert request.row >= 0, "who is tried has a row"
    _, furthest = standing(core, request)
    if furthest - request.reached_before(core.epoch) < ENOUGH_TOKENS:
        return
    core.trial, request.losses = None, 0
    del core.suspects[request.number]
    if core.suspects:
        caching.retracted(core, request)
        wait_again(core, request, "trial", now_ns, out)


def wait_again(core: CoreState, request: Request, reason: str, now_ns: int, out: Outputs) -> None:
    """A request loses its row for no fault of memory, which is told and does not count as a retraction."""
    had, _ = requeue(core, request, now_ns)
    core.totals.requeued += 1
    numbers = {"epoch": core.epoch, "tokens": had, "output_tokens": request.output_tokens}
    out.decisions.append(Decided(now_ns, Verdict.REQUEUED, request.number, reason, numbers))


def lost(core: CoreState, request: Request, tried: bool, item: EpochEnded, out: Outputs) -> None:
    """The epoch died while the request had a row; `tried`: it ran alone."""
    assert request.row < 0, "what it had is given back"
    if request.furthest_tokens - request.reached_before(core.epoch) >= ENOUGH_TOKENS:
        return
    request.losses += 1
    most = core.config.epoch_losses_max
    if not tried or not most or request.losses < most:
        return
    detail = (
        f"{request.losses} epochs in a row were lost while it ran, before it got {ENOUGH_TOKENS} tokens further, and in"
        f" the last one nobody else ran (--epoch-losses-max {most}): {item.why}"
    )
    # What dies of a prompt dies of it in every choice that is no further.
    together = [request]
    if not request.output_tokens:
        furthest = request.furthest_tokens
        choices = core.choices_of(request.group)
        together = [one for one in choices if not one.output_tokens and one.furthest_tokens <= furthest]
    for one in together:
        end(core, one, EndReason.FAULT, detail, item.now_ns, out)
