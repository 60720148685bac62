"""Tables of the hit benchmark for people, and its rows for machines.

Owns the layout. Must never change or round a figure that a goal is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tools.hits.arena import ROOM_PPM, SLOT_BYTES
from tools.hits.chat import Cost
from tools.hits.sweep import Split


def split_rows(splits: Sequence[Split]) -> list[dict[str, Any]]:
    """One JSON row per split."""
    return [
        {
            "part": "sweep",
            "mode": one.mode,
            "shared_tokens": one.shared_tokens,
            "own_tokens": one.own_tokens,
            "requests": len(one.found),
            "interval_tokens": one.interval,
            "found_tokens": list(one.found),
            "below_tokens": one.below_tokens,
            "settled_at": one.settled_at,
            "checkpoints_given": one.given,
            "checkpoints_hit": one.hit,
            "holds": one.holds,
        }
        for one in splits
    ]


def split_table(splits: Sequence[Split]) -> Table:
    """What the requests of every split found."""
    table = Table(box=SIMPLE_HEAD, title="Hit sweep: usable tokens of what requests share")
    for name in ("mode", "shared", "own", "first", "second", "least from third", "below", "all from", "states", "hits"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for one in splits:
        cells = [one.mode, one.shared_tokens, one.own_tokens, *one.found[:2], min(one.found[2:]), one.below_tokens]
        table.add_row(*(str(cell) for cell in [*cells, f"request {one.settled_at}", one.given, one.hit]))
    return table


class Comparison:
    """The two policies on one chat in one arena."""

    def __init__(self, likely: Cost, grid: Cost) -> None:
        assert (likely.chat, likely.room_ppm) == (grid.chat, grid.room_ppm), "one chat in one arena"
        self.likely, self.grid = likely, grid

    @property
    def ratio(self) -> float:
        """How many times fewer bytes of checkpoints per hit token the policy `likely` needs."""
        return self.grid.bytes_per_hit_token / self.likely.bytes_per_hit_token if self.likely.hit_tokens else 0.0

    @property
    def lost_tokens(self) -> int:
        """Hit tokens that the grid has more; negative where it has fewer."""
        return self.grid.hit_tokens - self.likely.hit_tokens

    @property
    def holds(self) -> bool:
        """What is promised of an arena that holds everything: as few bytes as the chat says, and hits as on the grid.

        But for the common beginning, which the second conversation computes once more: only then is it known as one.
        """
        if self.likely.room_ppm < ROOM_PPM:
            return True
        return self.ratio >= self.likely.chat.fewer and self.lost_tokens <= self.likely.chat.system


def cost_rows(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """One JSON row per chat, arena and policy."""
    return [
        {
            "part": "chat",
            "chat": one.chat.name,
            "policy": one.policy,
            "arena_share": one.room_ppm / ROOM_PPM,
            "prompt_tokens": one.prompt_tokens,
            "hit_tokens": one.hit_tokens,
            "computed_tokens": one.computed_tokens,
            "checkpoints_given": one.given,
            "checkpoints_held": one.held,
            "checkpoint_bytes_given": one.given * SLOT_BYTES,
            "checkpoint_bytes_per_hit_token": round(one.bytes_per_hit_token, 3),
            "given_by_kind": {kind: given for kind, (given, _) in one.kinds.items() if given},
            "hit_by_kind": {kind: hit for kind, (_, hit) in one.kinds.items() if hit},
            "times_fewer_bytes": round(both.ratio, 2),
        }
        for both in comparisons
        for one in (both.likely, both.grid)
    ]


def cost_table(comparisons: Sequence[Comparison]) -> Table:
    """Hits of both policies beside the bytes of their checkpoints."""
    table = Table(box=SIMPLE_HEAD, title="Chat: checkpoints beside a grid that keeps every point")
    table.add_column("chat", no_wrap=True)
    table.add_column("arena", justify="right", no_wrap=True)
    for name in ("prompts", "hits, grid", "likely", "states, grid", "likely", "bytes/hit, grid", "likely", "fewer"):
        table.add_column(name, justify="right", no_wrap=True)
    for both in comparisons:
        likely, grid = both.likely, both.grid
        table.add_row(
            likely.chat.name,
            f"{likely.room_ppm / ROOM_PPM:.0%}",
            f"{likely.prompt_tokens:,d}",
            f"{grid.hit_tokens / grid.prompt_tokens:.2%}",
            f"{likely.hit_tokens / likely.prompt_tokens:.2%}",
            f"{grid.given:,d}",
            f"{likely.given:,d}",
            f"{grid.bytes_per_hit_token:.1f}",
            f"{likely.bytes_per_hit_token:.1f}",
            f"{both.ratio:.1f}x",
        )
    return table


def kind_table(comparisons: Sequence[Comparison]) -> Table:
    """Which kinds of states the policy `likely` gave, and which of them were hit."""
    table = Table(box=SIMPLE_HEAD, title="States of the policy `likely`, given / hit")
    table.add_column("chat", no_wrap=True)
    table.add_column("arena", justify="right", no_wrap=True)
    kinds = [kind for kind in comparisons[0].likely.kinds if any(sum(both.likely.kinds[kind]) for both in comparisons)]
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    for both in comparisons:
        cells = [f"{given} / {hit}" for given, hit in (both.likely.kinds[kind] for kind in kinds)]
        table.add_row(both.likely.chat.name, f"{both.likely.room_ppm / ROOM_PPM:.0%}", *cells)
    return table
