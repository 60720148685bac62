"""One process of a test's group: joins as its arguments say, does a piece of work by name, tells what came out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from daemon.rank.errors import GroupBroken
from daemon.rank.layout import Layout
from daemon.rank.process_group import ProcessGroup
from tools.rank_driver import settings


def collectives(group: ProcessGroup) -> Any:
    """Sums, gathers and a broadcast of every dtype in use."""
    number = group.layout.number
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        own = torch.full((2, 3), number + 1, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        out[name] = [
            group.all_reduce(own.clone()).tolist(),
            group.all_gather(own, 1).tolist(),
            group.broadcast(own.clone()).tolist(),
        ]
    return out


def pipeline(group: ProcessGroup) -> Any:
    """Ten tensors through all stages, each of which adds its number; receives are posted two ahead."""
    layout, results = group.layout, []
    for step in range(2):
        if not layout.first:
            group.expect_previous((1 + step, 4), torch.float32)
    for step in range(10):
        if layout.first:
            hidden = torch.full((1 + step, 4), float(step))
        else:
            if step + 2 < 10:
                group.expect_previous((3 + step, 4), torch.float32)
            hidden = group.receive_previous((1 + step, 4), torch.float32)
        hidden = hidden + layout.number
        if layout.last:
            results.append(hidden[0, 0].item())
        else:
            group.send_next(hidden)
            hidden.zero_()  # it may be used again at once
    return results


def dies(group: ProcessGroup) -> Any:
    """The last rank ends without a word; the others find out in a collective or a receive."""
    group.meet("every rank has its groups")
    if group.layout.number == group.layout.total - 1:
        os._exit(9)
    if group.layout.stages == 1:
        group.all_reduce(torch.ones(4))
    else:
        for _ in range(20):
            group.send_next(torch.ones(1 << 20))
    return "nobody missed it"


def hangs(group: ProcessGroup) -> Any:
    """The first rank never takes part; the others' timeout ends their wait."""
    if group.layout.number == 0:
        return "waited"
    if group.layout.stages == 1:
        return group.all_reduce(torch.ones(4)).tolist()
    return group.receive_previous((4,), torch.float32).tolist()


WORK: dict[str, Callable[[ProcessGroup], Any]] = {
    "collectives": collectives,
    "pipeline": pipeline,
    "dies": dies,
    "hangs": hangs,
}


def child(
    pipe: Connection, work: str, rendezvous: str, layout: Layout, timeout_ms: int, environ: dict[str, str]
) -> None:
    """One rank: what its work gave, or the GroupBroken that ended it, goes into `pipe`."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    config = settings(rendezvous=rendezvous, collective_timeout_ms=timeout_ms)
    try:
        group = ProcessGroup(config, layout, 1, torch.device("cpu"))
        pipe.send(WORK[work](group))
    except GroupBroken as error:
        pipe.send(f"GroupBroken: {error}")
    if work != "dies":  # the rank that keeps the store stays until all have said what they have to say
        with contextlib.suppress(GroupBroken):
            group.meet("the end")
    os._exit(0)
