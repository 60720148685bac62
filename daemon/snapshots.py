"""Snapshots: the state of a core as canonical bytes, and a core out of them again.

Owns which classes such bytes may name. Must never call what they name: only the state of our own pure rooms is made
again. Invariant: a core that was restored decides what the one that was written down would have decided.
"""

from __future__ import annotations

import importlib
from typing import Any

from allocator import graph
from allocator.checks import Checks
from allocator.graph import GraphError
from daemon.core.limits import CoreConfig
from daemon.core.scheduler import SchedulerCore
from daemon.core.state import CoreState

EXTERNAL: dict[type, str] = {Checks: "checks"}  # the level of checks is the process's, not the state's
NAMED = ("allocator.", "daemon.core.")
NAMED_WHOLE = ("ipc.messages",)


def find(module: str, name: str) -> Any:
    """The class or function of our pure rooms that a name stands for; raises GraphError for any other."""
    if not (module.startswith(NAMED) or module in NAMED_WHOLE):
        raise GraphError(f"a state names {module}.{name}, which is not part of any state")
    found: Any = importlib.import_module(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise GraphError(f"a state names {module}.{name}, which this version does not have") from error
    if getattr(found, "__module__", None) != module:
        raise GraphError(f"a state names {module}.{name}, which {module} only imports")
    return found


def core_state(core: SchedulerCore) -> bytes:
    """The whole state of a core; equal states, equal bytes."""
    return graph.encode(core.state, EXTERNAL)


def restore_core(data: bytes, checks: Checks | None = None) -> SchedulerCore:
    """A core in the state that the bytes hold; raises GraphError."""
    checks = checks or Checks()
    state = graph.decode(data, find, {"checks": checks})
    if not isinstance(state, CoreState):
        raise GraphError(f"the state of a core is a CoreState, not a {type(state).__name__}")
    if strange := vars(state).keys() ^ vars(CoreState(CoreConfig())).keys():
        raise GraphError(f"the state of a core of another version: {', '.join(sorted(strange))}")
    return SchedulerCore(state.config, checks, state)
