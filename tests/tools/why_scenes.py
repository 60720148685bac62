"""Scenes for `why`: worlds of the real core whose every input and output is kept as a journal has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from ipc.messages import Sampling
from journal.opening import open_journal
from journal.reader import Record
from journal.records import DECISION_VERSION, KIND_OF, SCHEMA_VERSION, Closed, Opened, encode
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.core.scenes import drive, stage
from tests.core.world import NEUTRAL, World
from tests.journal.helpers import ID
from tools.worlds.rank_double import FULL_ONLY, Shape
from tools.worlds.scenario import parse
from tools.worlds.stage import Stage

CONFIG = CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=32, chunked_prefill_size=32)


class Journaled:
    """A world's life as an engine writes it: what it was fed so far, and all from now on, over its restarts.

    `records` is the journal in memory. `seen`: of every pass, what each request waited for, by its number.
    """

    def __init__(self, world: World, version: int = DECISION_VERSION) -> None:
        self.world = world
        self.records: list[Record] = []
        self.seen: list[dict[int, Any]] = []
        self._version, self._lives, self._passes = version, 0, 0
        assert len(world.inputs) <= 1, "a journal begins with its world"
        self._open()
        for item in world.inputs:
            self._add(item)
        world.watchers.append(self._append)

    def write(self, directory: Path) -> Path:
        """The journal on disk, one life after the other in one segment each."""
        storage = DiskStorage(directory / "journal")
        writer = None
        for record in self.records:
            payload = record.decode()
            if isinstance(payload, Opened):
                if writer is not None:
                    writer.flush()
                    writer.close()
                writer, _ = open_journal(storage, JournalSettings(), ID)
            assert writer is not None
            writer.append(payload)
        assert writer is not None
        writer.flush()
        writer.close()
        return directory

    def close(self, why: str) -> None:
        """The life ends in order."""
        self._add(Closed(self.world.now_ns, why, {}, b""))

    def _open(self) -> None:
        self._lives += 1
        life, config = f"life {self._lives}", self.world.config
        self._add(Opened(self.world.now_ns, life, SCHEMA_VERSION, self._version, config, {}, {}))

    def _append(self, world: World, item: inputs.Input, out: Outputs) -> None:
        if isinstance(item, inputs.Recovered):
            self._open()
            self._passes = 0
        self._add(item)
        for decided in out.decisions:
            self._add(decided)
        if out.step is not None:
            self._add(out.step)
        if world.core.passes > self._passes:
            self._passes = world.core.passes
            over = {number: world.core.passed_over(number) for number in sorted(world.core._state.requests)}
            self.seen.append({number: (one.number, one.reason) for number, one in over.items() if one is not None})

    def _add(self, payload: msgspec.Struct) -> None:
        record = Record(len(self.records) + 1, KIND_OF[type(payload)], encode(payload), "memory", 0)
        self.records.append(record)


def journaled(
    config: CoreConfig = CONFIG, pages: int = 64, shape: Shape = FULL_ONLY, **fields: Any
) -> tuple[World, Journaled]:
    """A world and its journal; `fields` are those of the configuration and of the world."""
    of_world = {name: fields.pop(name) for name in ("caching", "stages", "model", "begin") if name in fields}
    world = World(msgspec.structs.replace(config, **fields), pages, shape=shape, **of_world)
    return world, Journaled(world)


def run(world: World) -> World:
    """To the end, all accounts settled."""
    world.run()
    world.check_rest(refused=True)
    return world


def crowd(pages: int = 88, chunk: int = 2, prompt: int = 30) -> tuple[World, Journaled]:
    """Eight requests grow by a page per step beside one long prompt: the memory does not hold them to the end."""
    fields: dict[str, Any] = {"page_size": 1, "max_running_requests": 9, "max_batched_tokens": 64}
    world, journal = journaled(pages=pages, caching=False, chunked_prefill_size=chunk, overlap=False, **fields)
    for k in range(8):
        world.send(f"s{k}", 1, 13)
    world.send("long", prompt, 1)
    run(world)
    return world, journal


def few_rows() -> tuple[World, Journaled]:
    """Three requests on two places and few pages: they wait, one is retracted, all end; a fourth is refused."""
    fields: dict[str, Any] = {"page_size": 1, "max_running_requests": 2, "max_batched_tokens": 64}
    world, journal = journaled(pages=20, caching=False, chunked_prefill_size=64, **fields)
    for k in range(3):
        world.send(f"r{k}", 6 + k, 8)
    world.send("never", 60, 8)
    return run(world), journal


def cached_crowd(shape: Shape = Shape(windows=(9,), state=True), pages: int = 40) -> tuple[World, Journaled]:
    """Turns of conversations in a cache that does not hold them all: hits are cut, others' pages are evicted."""
    world, journal = journaled(pages=pages, shape=shape, checkpoint_interval=8)
    for turn in range(3):
        for talk in range(4):
            prompt = [talk, *range(1, 20 + 12 * turn)]
            world.send(f"t{talk}.{turn}", prompt, 8)
        world.run()
    return run(world), journal


def preempted() -> tuple[World, Journaled]:
    """Both places are taken by low priorities when a high one comes."""
    world, journal = journaled(max_running_requests=2, priority_preemption=True)
    world.send("old", 12, 30, priority=-1)
    world.send("young", 5, 30, priority=-1)
    drive(world, lambda: stage(world, "young") == "running")
    world.send("high", 6, 5, priority=3)
    return run(world), journal


def lost_ranks() -> tuple[World, Journaled]:
    """Ranks die under two requests, and are replaced."""
    world, journal = journaled()
    world.send("a", 9, 20)
    world.send("b", 9, 20)
    drive(world, lambda: stage(world, "b") == "running")
    world.wait(40)
    world.end_epoch()
    world.send("c", 5, 3)
    world.wait(700)
    world.begin()
    return run(world), journal


def lost_daemon(lost_inputs: int = 0, why: str = "") -> tuple[World, Journaled]:
    """The daemon dies, or ends in order, under two requests; the next process takes them over."""
    world, journal = journaled()
    world.send("a", 9, 20)
    world.send("b", 9, 20)
    drive(world, lambda: stage(world, "b") == "running" and len(world.output("a")) > 3)
    if why:
        journal.close(why)
    world.wait(1500)
    world.restart(lost_inputs)
    world.settle()
    return run(world), journal


def aborted(by: str = "client") -> tuple[World, Journaled]:
    """One request is ended from outside while it runs."""
    world, journal = journaled()
    world.send("a", 9, 20)
    drive(world, lambda: stage(world, "a") == "running")
    world.abort("a", by=by)
    return run(world), journal


def siblings(count: int = 3, sampling: Sampling = NEUTRAL) -> tuple[World, Journaled]:
    """Several choices of one prompt."""
    world, journal = journaled(chunked_prefill_size=16, max_batched_tokens=16)
    world.send("many", 40, 4, n=count, sampling=sampling)
    return run(world), journal


def pressed() -> tuple[World, Journaled]:
    """Short answers teach the core to expect little; long ones follow, run out of memory, evict each other's pages."""
    fields: dict[str, Any] = {"page_size": 8, "max_running_requests": 24, "max_batched_tokens": 128}
    shape = Shape(windows=(40,), state=True)
    world, journal = journaled(pages=150, shape=shape, checkpoint_interval=16, chunked_prefill_size=64, **fields)
    for k in range(30):
        world.send(f"short{k}", [k, *range(20)], 200)
        drive(world, lambda k=k: len(world.output(f"short{k}")) >= 2)  # type: ignore[misc]
        world.feed(inputs.FinishAsked(world.now_ns, "fe", f"short{k}", 0, 2))
    for k in range(24):
        world.send(f"long{k}", [k % 7, *range(10 + k)], 60 + 37 * k % 90)
        for _ in range(3 * k % 5):
            world.turn()
    return run(world), journal


SCENES: dict[str, Callable[[], tuple[World, Journaled]]] = {
    "crowd": crowd,
    "few_rows": few_rows,
    "cached_crowd": cached_crowd,
    "preempted": preempted,
    "pressed": pressed,
    "lost_ranks": lost_ranks,
    "lost_daemon": lost_daemon,
    "aborted": aborted,
    "siblings": siblings,
}


def numbers(journal: Journaled) -> Sequence[int]:
    """All requests of a journal."""
    return sorted(journal.world.by_request)


# --- everything that the core can say --------------------------------------------------------------------------------


def refusals() -> tuple[World, Journaled]:
    """A request for each code, as far as one front end can bring them about."""
    world, journal = journaled(pages=24, max_queued_requests=2)
    world.send("empty", [], 4)
    world.send("outside", [1, 2, 999], 4)
    world.send("long", 600, 4)
    world.send("output", 100, 900)
    world.send("huge", 200, 4)
    world.send("many", 80, 40)
    world.send("hot", 5, 4, sampling=msgspec.structs.replace(NEUTRAL, temperature=1000.0))
    world.send("choices", 5, 4, n=129)
    world.send("a", 5, 4)
    world.send("a", 6, 4)
    world.send("b", 5, 4)
    world.send("c", 5, 4)
    world.run()
    world.feed(inputs.Controlled(world.now_ns, "drain"))
    world.send("late", 5, 4)
    world.end_epoch()
    return world, journal


def unready() -> tuple[World, Journaled]:
    """Before the first epoch nothing is accepted."""
    world, journal = journaled(begin=False)
    world.send("early", 5, 4)
    world.begin()
    return run(world), journal


def deadlines() -> tuple[World, Journaled]:
    """One deadline passes while its request runs, another while it waits, and a third could never be met."""
    world, journal = journaled(max_running_requests=1)
    world.send("first", 5, 40)
    world.run()
    world.send("runs", 5, 60, deadline_ms=20)
    world.send("waits", 5, 60, deadline_ms=10)
    world.run()
    world.send("never", 200, 60, deadline_ms=1)
    return run(world), journal


def ended_by(order: str) -> tuple[World, Journaled]:
    """The daemon is told something while a request runs."""
    world, journal = journaled()
    world.send("a", 9, 20)
    drive(world, lambda: stage(world, "a") == "running")
    world.feed(inputs.Controlled(world.now_ns, order))
    return run(world), journal


def frontend_lost() -> tuple[World, Journaled]:
    """Its front end is gone for too long."""
    world, journal = journaled()
    world.send("a", 9, 20)
    drive(world, lambda: stage(world, "a") == "running")
    world.feed(inputs.FrontEndLost(world.now_ns, "fe"))
    return run(world), journal


def stopped() -> tuple[World, Journaled]:
    """One output ends by a stop string that the front end found, one by a stop token."""
    world, journal = journaled()
    prompt = list(range(1, 10))
    world.send("string", prompt, 20)
    drive(world, lambda: len(world.output("string")) >= 4)
    world.feed(inputs.FinishAsked(world.now_ns, "fe", "string", 0, 3))
    token = world.expected("string")[0][5]
    world.send("token", prompt, 20, stop_ids=np.array([token], np.int64).tobytes())
    return run(world), journal


def shrunken_arena() -> tuple[World, Journaled]:
    """The next epoch has less memory, and what waits can never fit it."""
    world, journal = journaled(max_running_requests=1)
    world.send("a", 9, 20)
    world.send("long", 120, 60)
    drive(world, lambda: stage(world, "a") == "running")
    world.end_epoch()
    world.pages = 30
    world.begin()
    return world, journal


def last_epoch() -> tuple[World, Journaled]:
    """Ranks are lost and none will follow."""
    world, journal = journaled()
    world.send("a", 9, 20)
    drive(world, lambda: stage(world, "a") == "running")
    world.end_epoch(recovers=False)
    return world, journal


def adopted() -> tuple[World, Journaled]:
    """The machine lost the newest tokens from the journal, and the client brings them back."""
    world, journal = journaled()
    world.send("a", 9, 20)
    drive(world, lambda: len(world.output("a")) >= 6)
    world.restart(4)
    world.settle()
    return run(world), journal


def poisoned() -> tuple[World, Journaled]:
    """One of three requests kills the ranks whenever it runs."""
    world, journal = journaled(pages=200)
    world.deadly["fe", "r1"] = 0
    for number in range(3):
        world.send(f"r{number}", [number, *range(1, 20)], 6)
    return run(world), journal


def protected() -> tuple[World, Journaled]:
    """Who was retracted once may not be again, and starts only beside others that fit with it."""
    fields: dict[str, Any] = {"page_size": 1, "max_running_requests": 9, "max_batched_tokens": 64, "retracts_max": 1}
    world, journal = journaled(pages=88, caching=False, chunked_prefill_size=64, overlap=False, **fields)
    for k in range(12):
        world.send(f"s{k}", 1, 30)
    return run(world), journal


def cut_hits() -> tuple[World, Journaled]:
    """Long prompts that share their beginning, where windows and states are not kept everywhere."""
    world, journal = journaled(pages=100, shape=Shape(windows=(9,), state=True), checkpoint_interval=8)
    for length in (40, 26, 33, 21):
        world.send(f"l{length}", [*range(1, length + 1)], 4)
        world.run()
    return run(world), journal


def windows_alone() -> tuple[World, Journaled]:
    """A window that was given back, of a model without states."""
    world, journal = journaled(pages=30, shape=Shape(windows=(9,)))
    for length in (60, 30, 44):
        world.send(f"l{length}", [*range(1, length + 1)], 4)
        world.run()
    return run(world), journal


def cold() -> tuple[World, Journaled]:
    """What a request finds in the cache is so large beside what it takes that it starts without it."""
    shape = Shape(state=True, slot_bytes=16 * 256)
    fields: dict[str, Any] = {"shape": shape, "checkpoint_interval": 8}
    pages = next(n for n in range(8, 400) if not _refused(n, fields))
    world, journal = journaled(pages=pages, **fields)
    world.send("seed", [*range(1, 26)], 1)
    world.run()
    world.send("whole", [*range(1, 41)], 26)
    return run(world), journal


def _refused(pages: int, fields: dict[str, Any]) -> bool:
    world, _ = journaled(pages=pages, **fields)
    world.send("asked", 40, 26)
    return bool(world.refusals)


def parked_rows() -> tuple[World, Journaled]:
    """One request decodes and finds no page; another waits behind it."""
    fields: dict[str, Any] = {"page_size": 1, "max_running_requests": 3, "max_batched_tokens": 64}
    world, journal = journaled(pages=16, caching=False, chunked_prefill_size=64, **fields)
    world.send("a", 4, 13)
    world.send("b", 4, 5)
    drive(world, lambda: stage(world, "a").startswith("parked"))
    world.send("c", 4, 5)
    return run(world), journal


def flushed() -> tuple[World, Journaled]:
    """An operator empties the cache while a request reads of it."""
    world, journal = journaled()
    world.send("a", 12, 20)
    drive(world, lambda: len(world.output("a")) > 3)
    world.feed(inputs.Controlled(world.now_ns, "flush_cache"))
    return run(world), journal


def scored() -> tuple[World, Journaled]:
    """A prompt whose log probabilities are asked for takes nothing from the cache."""
    world, journal = journaled()
    world.send("plain", [*range(1, 20)], 4)
    world.run()
    world.send("scored", [*range(1, 20)], 0, sampling=msgspec.structs.replace(NEUTRAL, prompt_logprobs=1))
    return run(world), journal


MORE: dict[str, Callable[[], tuple[World, Journaled]]] = {
    **SCENES,
    "refusals": refusals,
    "unready": unready,
    "deadlines": deadlines,
    "drain": lambda: ended_by("drain"),
    "drain_expired": lambda: ended_by("drain_expired"),
    "stop": lambda: ended_by("stop"),
    "operator": lambda: aborted("operator"),
    "frontend": lambda: aborted("frontend"),
    "frontend_lost": frontend_lost,
    "stopped": stopped,
    "shrunken_arena": shrunken_arena,
    "last_epoch": last_epoch,
    "adopted": adopted,
    "poisoned": poisoned,
    "protected": protected,
    "cut_hits": cut_hits,
    "windows_alone": windows_alone,
    "cold": cold,
    "parked_rows": parked_rows,
    "flushed": flushed,
    "scored": scored,
    "many_lives": lambda: lost_daemon(0, "drained"),
}
"""All scenes. What is left of the core's words the scenario files bring about (`SCENARIOS`)."""

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.txt"))


def scenario(path: Path) -> tuple[World, Journaled]:
    """The world of a scenario file, which runs as its commands say, and its journal."""
    acting, journal = Stage(), None
    for block in parse(path.read_text()):
        for _, line in block.commands():
            acting.do(line)
            journal = journal or Journaled(acting.world)
    assert journal is not None, "a scenario has a world"
    acting.close()
    return acting.world, journal
