"""Shrinking: from a case that fails to a small one that fails by the same check.

Owns the candidates, the boldest first. Must never accept a case that fails otherwise: the fault that is shown at the
end is the one that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tools.worlds.cases import Ask, Case

TRIES = 3000
PLAIN_ASK: dict[str, Any] = {
    "parent": -1,
    "shared": 0,
    "n": 1,
    "priority": 0,
    "deadline_ms": 0,
    "clip": True,
    "namespace": "",
    "store": True,
    "pin_ms": 0,
    "min_tokens": 0,
    "stop_ids": [],
    "temperature": 0.0,
    "penalty": 0.0,
    "seed": 0,
    "logprobs": -1,
    "prompt_logprobs": -1,
    "frontend": "fe",
}
PLAIN_CONFIG: dict[str, Any] = {
    "overlap": False,
    "enable_prefix_caching": False,
    "schedule_policy": "fcfs",
    "eviction_policy": "lru",
    "checkpoint_policy": "grid",
    "cache_quota_ppm": 1_000_000,
    "cache_quotas": {},
    "pinned_max_ppm": 1_000_000,
    "priority_preemption": False,
    "overtaken_max": 4096,
    "fair_quantum_tokens": 4096,
    "deadline_check": False,
    "reserve": "full",
    "max_queued_requests": 200,
    "chunked_prefill_size": 64,
    "max_batched_tokens": 64,
}


def shrink(case: Case, check: str, fails: Callable[[Case], str | None], tries: int = TRIES) -> Case:
    """The smallest case found that still fails by `check`; `fails` says by which check a case does."""
    left = tries
    improved = True
    while improved and left > 0:
        improved = False
        for smaller in _smaller(case):
            left -= 1
            if fails(smaller) == check:
                case, improved = smaller, True
                break
            if left <= 0:
                break
    compact = _compact(case)
    return compact if fails(compact) == check else case


def _smaller(case: Case) -> Iterator[Case]:
    """Fewer actions, plainer requests, a plainer configuration."""
    replace, actions = msgspec.structs.replace, case.actions
    size = len(actions) // 2
    while size:
        for start in range(0, len(actions), size):
            yield replace(case, actions=actions[:start] + actions[start + size :])
        size //= 2
    sent = [number for name, number in actions if name == "submit"]
    for number in sent:
        for plainer in _plainer(case.asks[number]):
            yield replace(case, asks=[*case.asks[:number], plainer, *case.asks[number + 1 :]])
    for name, plain in PLAIN_CONFIG.items():
        if getattr(case.config, name) != plain:
            yield replace(case, config=replace(case.config, **{name: plain}))
    if case.poison >= 0:
        yield replace(case, poison=-1)
    if case.stages > 1:
        yield replace(case, stages=case.stages - 1)
    for at, (name, number) in enumerate(actions):
        if number and name != "submit":
            yield replace(case, actions=[*actions[:at], (name, 0), *actions[at + 1 :]])


def _plainer(ask: Ask) -> Iterator[Ask]:
    replace = msgspec.structs.replace
    for name, plain in PLAIN_ASK.items():
        if getattr(ask, name) != plain:
            yield replace(ask, **{name: plain})
    for name in ("shared", "own", "max_tokens", "deadline_ms", "pin_ms"):
        value, least = getattr(ask, name), 1 if name == "own" else 0
        for less in (None if value is None else max(least, value // 2), None if value is None else value - 1):
            if less is not None and least <= less < value:
                yield replace(ask, **{name: less})


def _compact(case: Case) -> Case:
    """The same without requests that are never sent."""
    sent = sorted({number for name, number in case.actions if name == "submit"})
    place = {number: at for at, number in enumerate(sent)}
    asks = [
        msgspec.structs.replace(case.asks[number], parent=place.get(case.asks[number].parent, -1)) for number in sent
    ]
    actions = [(name, place[number] if name == "submit" else number) for name, number in case.actions]
    return msgspec.structs.replace(case, asks=asks, actions=actions, poison=place.get(case.poison, -1))
