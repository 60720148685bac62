"""Seeded random worlds: every check of the doubles holds, and the same inputs give the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from daemon.core import inputs
from tests.core.workload import FAMILIES, Workload
from tests.core.world import World

SEEDS_EACH = 30
FAMILY_OF = sorted(FAMILIES)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("pressed", [False, True])
def test_random_workloads_keep_every_promise(block: int, pressed: bool) -> None:
    """Legal steps, conserved requests and pages, right tokens, one end each, nothing held at rest."""
    for seed in range(block * SEEDS_EACH, (block + 1) * SEEDS_EACH):
        try:
            Workload(seed, pressed=pressed).run(120)
        except AssertionError as failure:
            raise AssertionError(f"seed {seed}, pressed {pressed}") from failure


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("caching", [False, True])
def test_random_workloads_of_every_family_of_models(family: str, caching: bool) -> None:
    """The same with windows, state and a cache: each unit has one owner, rows read what their own tokens wrote."""
    cached = checkpoints = 0
    for seed in range(SEEDS_EACH):
        try:
            workload = Workload(seed, pressed=seed % 3 == 0, family=family, caching=caching)
            for _ in range(100):
                workload.act()
                workload.world.check_owners()
            world = workload.run(0)
        except AssertionError as failure:
            raise AssertionError(f"family {family}, seed {seed}, caching {caching}") from failure
        cached += world.core.gauges()["cached_tokens_total"]
        checkpoints += world.core.gauges()["checkpoints_given_total"]
    assert (cached > 0) == caching
    assert (checkpoints > 0) == (caching and FAMILIES[family].state)


@pytest.mark.parametrize("end", ["stop", "drain", "epoch"])
def test_random_workloads_end_cleanly_when_told_to(end: str) -> None:
    """A stop, a drain that expires and the end of an epoch in the middle of anything leave nothing behind."""
    for seed in range(40):
        workload = Workload(seed, pressed=bool(seed % 2), family=FAMILY_OF[seed % len(FAMILIES)], caching=seed % 4 < 2)
        for _ in range(60):
            workload.act()
        world = workload.world
        world.settle()
        if end == "epoch":
            world.feed(inputs.EpochEnded(world.now_ns, world.epoch, "a rank died"))
            world.begin()
        elif end == "drain":
            world.feed(inputs.Controlled(world.now_ns, "drain"))
            for _ in range(20):
                workload.act()
            world.feed(inputs.Controlled(world.now_ns, "drain_expired"))
        else:
            world.feed(inputs.Controlled(world.now_ns, "stop"))
        assert world.core.gauges()["live"] == 0
        world.settle()
        world.run()
        world.check_rest()


def replay(world: World) -> None:
    """Feed the recorded inputs to a fresh core: steps, decisions, tokens and final state are the same bytes."""
    log, core = world.replayed()
    assert log == world.log
    assert core.state_digest() == world.core.state_digest()
    assert core.gauges() == world.core.gauges()


def test_recorded_inputs_replay_byte_for_byte() -> None:
    """A core is a function of its inputs, also in mid-flight, also after they went through the journal's encoding."""
    for seed in range(30):
        workload = Workload(seed, pressed=bool(seed % 2), family=FAMILY_OF[seed % len(FAMILIES)], caching=seed % 4 < 2)
        for _ in range(100):
            workload.act()
        replay(workload.world)


def test_states_that_differ_have_other_digests() -> None:
    """The state digest tells worlds apart that will decide differently."""
    digests = set()
    for step in range(30):
        workload = Workload(3)
        for _ in range(step * 5):
            workload.act()
        digests.add(workload.world.core.state_digest())
    assert len(digests) == 30


PROGRAM = """
from tests.core.workload import Workload
import hashlib
total = hashlib.blake2b()
for seed in range(6):
    world = Workload(seed, pressed=bool(seed % 2)).run(100)
    total.update(bytes(world.log) + world.core.state_digest())
print(total.hexdigest())
"""


def test_nothing_depends_on_the_hash_seed() -> None:
    """Processes with other hash seeds give the same bytes."""
    results = []
    for hash_seed in ("0", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", PROGRAM]
        results.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert results[0] == results[1]
    assert len(results[0].strip()) == 2 * hashlib.blake2b().digest_size
