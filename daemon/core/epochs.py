"""Epochs: what the core does when device memory comes and goes.

Owns the two inputs about it. Must never keep anything of a device that is gone: rows, the tree and the chain are
forgotten, and only requests outlive them. Invariants: a request that waits in an epoch fits the epoch's empty arena and
its model, priced by that; at an epoch's end everything that was held is given back and counted first. Who may have been
the cause of a loss, and ends for it, `suspects` decides.
"""

from __future__ import annotations

from allocator.checks import Checks
from allocator.columns import i64
from allocator.demand import stored_tokens
from allocator.errors import InvariantBroken
from daemon.core import suspects
from daemon.core.arrival import longest_tokens
from daemon.core.endings import end_all, end_group
from daemon.core.inputs import EpochBegan, EpochEnded
from daemon.core.outputs import Outputs
from daemon.core.reasons import EndReason
from daemon.core.requests import Group
from daemon.core.state import CoreState
from ipc.messages import ModelFacts


def began(core: CoreState, item: EpochBegan, checks: Checks, out: Outputs) -> None:
    """All ranks hold an empty arena: who waits is priced anew, and ends if it can never be served any more."""
    if core.memory is not None or item.geometry.page_size != core.config.page_size:
        raise InvariantBroken(
            "core.epoch_began",
            f"epoch {item.epoch} began while epoch {core.epoch} lives, or its page size {item.geometry.page_size}"
            f" is not the configured {core.config.page_size}",
        )
    waiting = [group for group in core.groups.values() if group.live]
    for group in waiting:
        problem = _other_model(core, group, item.facts)
        if problem:
            end_group(core, group, EndReason.FAULT, problem, item.now_ns, out)
    core.begin_epoch(item.epoch, item.geometry, item.facts, checks)
    for group in waiting:
        if group.live:
            _price(core, group, item.now_ns, out)
    suspects.line_up(core)
    core.blocked = False


def ended(core: CoreState, item: EpochEnded, out: Outputs) -> None:
    """Device memory is gone. What had a row waits again if another epoch follows; else everything ends."""
    if core.memory is not None and item.epoch != core.epoch:
        return
    if not item.recovers:
        core.measure = None
        end_all(core, EndReason.FAULT, f"epoch {item.epoch} ended: {item.why}", item.now_ns, out)
    if core.memory is None:
        return
    tried = core.trial
    running = [core.requests[number] for number in sorted(core.requests) if core.requests[number].row >= 0]
    assert tried is None or running == [tried], "who is tried runs alone"
    for request in running:
        suspects.wait_again(core, request, "epoch", item.now_ns, out)
        suspects.lost(core, request, request is tried, item, out)
    core.check_empty()
    core.memory.cache = None
    core.reset_epoch()
    if len(core.queue):
        core.queue_moved_ns = item.now_ns
        core.queue.forget_found()
    for request in core.requests.values():
        request.match = None


def _price(core: CoreState, group: Group, now_ns: int, out: Outputs) -> None:
    """What the choices of a group can hold at most in this epoch; they end where that is more than there is."""
    memory = core.memory
    assert memory is not None, "an epoch has begun"
    stored = stored_tokens(len(group.prompt), group.accepted.max_tokens)
    ceiling = memory.ceiling(stored)
    refused = memory.never_fits(ceiling)
    if refused is not None:
        detail = f"the empty memory of epoch {core.epoch} cannot hold it any more: {refused.text()}"
        end_group(core, group, EndReason.UNSCHEDULABLE, detail, now_ns, out)
        return
    steady = memory.steady(stored)
    for request in core.choices_of(group):
        request.ceiling, request.steady = ceiling, steady


def _other_model(core: CoreState, group: Group, facts: ModelFacts) -> str:
    """Why the model of a new epoch cannot go on with a group that another one began, or nothing."""
    longest, tokens = longest_tokens(core.config, facts), len(group.prompt) + group.accepted.max_tokens
    if tokens > longest:
        return f"it may get {tokens} tokens, and the length of the model that was loaded is {longest}"
    columns = [group.prompt, group.stop_ids, *(i64(core.output_of(one)) for one in core.choices_of(group))]
    highest = max((int(column.max()) for column in columns if len(column)), default=0)
    if highest >= facts.vocab_size:
        return f"it has token {highest}, and token ids of the model that was loaded go to {facts.vocab_size - 1}"
    return ""
