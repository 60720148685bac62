"""Seeded random workloads for the tests of the core: the cases of `bandmaster worlds`, driven action by action."""

from __future__ import annotations

from typing import Any

import msgspec

from tools.worlds.cases import FAMILIES, draw
from tools.worlds.run import Player
from tools.worlds.world import World

__all__ = ["FAMILIES", "Workload"]


class Workload:
    """One seed: a world and the actions on it, without the checks that the command adds; `config` overrides fields."""

    def __init__(
        self, seed: int, *, pressed: bool = False, family: str = "full", caching: bool = False, **config: Any
    ) -> None:
        case = draw(seed, pressed=pressed, family=family, caching=caching, actions=240)
        case = msgspec.structs.replace(case, config=msgspec.structs.replace(case.config, **config))
        self.player = Player(case, checks=())
        self.actions = iter(case.actions)

    @property
    def world(self) -> World:
        """The world that the actions are done to."""
        return self.player.world

    def act(self) -> None:
        """The next action."""
        self.player.act(*next(self.actions))

    def run(self, actions: int) -> World:
        """So many actions, then rest."""
        for _ in range(actions):
            self.act()
        self.world.settle()
        self.world.run()
        self.world.check_rest()
        return self.world
