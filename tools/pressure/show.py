"""Tables of the pressure benches for people: numbers right-aligned, none shortened, the verdict in words below.

Owns the layout and what the comparison with the published table comes to. Must never change or round a figure that the
comparison uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tools.pressure.curve import Point
from tools.pressure.episode import Episode
from tools.pressure.mapping import CONDITIONS, PAGE_TOKENS, Condition


class Verdict:
    """One policy beside the published table: the rows below their "after" value, and by how much the sum is above."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.policy = episodes[0].policy
        self.below = [one for one in episodes if one.cached_tokens < one.condition.after]
        self.above = [one for one in episodes if one.cached_tokens > one.condition.after]
        self.sum_tokens = sum(one.cached_tokens for one in episodes)
        self.after_tokens = sum(one.condition.after for one in episodes)
        self.possible_tokens = sum(one.condition.possible for one in episodes)
        self.whole = len(episodes) == len(CONDITIONS)

    @property
    def holds(self) -> bool:
        """No row below and, where all 48 were run, the sum at least a page above."""
        return not self.below and (not self.whole or self.sum_tokens >= self.after_tokens + PAGE_TOKENS)

    def text(self) -> str:
        """One line."""
        more = self.sum_tokens - self.after_tokens
        line = f"{self.policy}: {len(self.below)} rows below, {len(self.above)} above; sum {self.sum_tokens:,d},"
        line += f" {abs(more):,d} {'above' if more >= 0 else 'below'} the published {self.after_tokens:,d}"
        line += f" ({self.possible_tokens:,d} if nothing of the hot prompts were lost)"
        lost = [f"{one.condition.name} {one.cached_tokens} < {one.condition.after}" for one in self.below]
        return "\n  below: ".join([line, *lost])


def mapping_rows(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """One JSON row per condition: the published values, and per policy what was cached, computed and evicted."""
    rows: dict[Condition, dict[str, Any]] = {}
    for one in episodes:
        condition = one.condition
        row = rows.setdefault(
            condition,
            {
                "model": condition.model.name,
                "bands": condition.model.kinds,
                "cap_tokens": condition.cap_tokens,
                "hot_tokens": condition.hot_tokens,
                "cold_requests": condition.cold,
                "order": condition.order,
                "before": condition.before,
                "after": condition.after,
                "possible": condition.possible,
            },
        )
        names = [band.name for band in condition.model.bands]
        row[one.policy] = one.cached_tokens
        row[f"{one.policy}_computed_tokens"] = one.computed_tokens
        row[f"{one.policy}_evicted_units"] = dict(zip(names, one.evicted, strict=True))
    return list(rows.values())


def mapping_table(episodes: Sequence[Episode], policies: Sequence[str]) -> Table:
    """One line per condition, the published values, then a column per policy; a value below "after" has a `<`."""
    heads = ["model", "bands", "cap", "hot", "cold", "first back", "before", "after", *policies, "possible"]
    table = new_table("cached prompt tokens of the two revisits", heads, left=("model", "bands", "first back"))
    found = {(one.condition, one.policy): one.cached_tokens for one in episodes}
    conditions = list(dict.fromkeys(one.condition for one in episodes))
    for number, condition in enumerate(conditions):
        cells = [condition.model.name, condition.model.kinds]
        cells += [f"{n:,d}" for n in (condition.cap_tokens, condition.hot_tokens, condition.cold)]
        cells += [condition.order, f"{condition.before:,d}", f"{condition.after:,d}"]
        for policy in policies:
            value = found[condition, policy]
            cells.append(f"{value:,d}" if value >= condition.after else f"[red]< {value:,d}[/red]")
        shown = condition[:3]
        ends = number + 1 < len(conditions) and conditions[number + 1][:3] != shown
        table.add_row(*cells, f"{condition.possible:,d}", end_section=ends or number + 1 == len(conditions))
    sums = [sum(getattr(condition, name) for condition in conditions) for name in ("before", "after", "possible")]
    ours = [sum(found[condition, policy] for condition in conditions) for policy in policies]
    table.add_row("sum", "", "", "", "", "", *(f"{n:,d}" for n in (*sums[:2], *ours, sums[2])))
    return table


def episode_table(one: Episode) -> Table:
    """One line per request of an episode: what it found, what the cache gave up for it and holds after it, and how much
    of each hot prompt could be used then."""
    names = [band.name for band in one.condition.model.bands]
    heads = ["request", "prompt", "cached", "matched", "cut", *(f"evicted\n{name}" for name in names)]
    heads += [*(f"held\n{name}" for name in names), "usable\nof A", "usable\nof B"]
    title = f"{one.condition.name}, {one.policy}, checkpoints {one.checkpoints}: {one.cached_tokens:,d} tokens,"
    table = new_table(f"{title} published {one.condition.after:,d}", heads, left=("request", "cut"))
    for served in one.served:
        numbers = (served.prompt_tokens, served.cached_tokens, served.matched_tokens)
        cells = [served.name, *(f"{n:,d}" for n in numbers), served.cut or "-"]
        table.add_row(*cells, *(f"{n:,d}" for n in (*served.evicted, *served.held, *served.usable)))
    return table


def new_table(title: str, heads: Sequence[str], left: Sequence[str] = ()) -> Table:
    """An empty table; columns are right-aligned but for those named in `left`."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    return table


def curve_table(points: Sequence[Point]) -> Table:
    """One line per oversubscription of one load and family: the default reservation, and the full one beside it."""
    heads = ["over", "arena\nMiB", "tokens/s", "of full", "running", "ms/token\np50", "ms/token\np99"]
    heads += ["retracted\na request", "most\ntimes", "computed\nagain", "again\n%", "parks", "cached\n%"]
    heads += ["full:\ntokens/s", "full:\nrunning", "full: ms/\ntoken p99"]
    table = new_table(f"{points[0].load}, {points[0].family}", heads)
    full = {one.oversubscription: one for one in points if one.reserve == "full"}
    for one in points:
        if one.reserve == "full":
            continue
        beside = full[one.oversubscription]
        cells = [f"{one.oversubscription:.2f}", f"{one.arena_bytes / 2**20:,.1f}", f"{one.tokens_per_s:,.0f}"]
        cells += [f"{one.tokens_per_s / beside.tokens_per_s:.3f}", f"{one.running_mean:.1f}"]
        cells += [f"{one.tpot_ms_p50:.2f}", f"{one.tpot_ms_p99:.2f}", f"{one.retractions_per_request:.3f}"]
        cells += [f"{one.retractions_most:d}", f"{one.recomputed_tokens:,d}", f"{one.recomputed_percent:.2f}"]
        cells += [f"{one.parks:,d}", f"{one.cached_percent:.1f}"]
        table.add_row(*cells, f"{beside.tokens_per_s:,.0f}", f"{beside.running_mean:.1f}", f"{beside.tpot_ms_p99:.2f}")
    return table
