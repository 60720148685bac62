"""Decisions: what the core decided last, and the life of one request, as lines of text.

Owns the form of both. Must never leave out in silence: what is routine may be hidden, and the heading says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from rich.text import Text

from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from daemon.recent import Told
from daemon.watch import WatchedLife
from tools.top.history import NS_PER_S, Note
from tools.top.palette import BAD, DIM, FAINT, GOOD, STAGE_COLOURS, TEXT, TITLE, WARN, age, fit, heading, short
from tools.top.speak import colour_of, is_routine, spoken, stage_word, waits
from tools.why.nouns import Bands

TIME_CELLS = 8
WHO_CELLS = 8
VERDICT_CELLS = 9
AFTER_CELLS = 11  # of the time in a life


def newest(
    told: Sequence[Told | Note], bands: Bands, now_ns: int, width: int, height: int, scarce_only: bool
) -> list[Text]:
    """The panel: the newest last, each with its age; with `scarce_only` without those of routine."""
    words = "without arrivals, admissions, ends and evictions" if scarce_only else ""
    found = [heading("decisions", words, "newest last, by age", width)]
    rows = max(0, height - len(found))
    shown: list[Run] = []
    for entry in reversed(told):
        if not isinstance(entry, Note) and scarce_only and is_routine(entry):
            continue
        if shown and shown[-1].takes(entry):
            shown[-1].entries.append(entry)
        elif len(shown) < rows:
            shown.append(Run([entry]))
        else:
            break
    return found + [_line(run, bands, now_ns, width) for run in reversed(shown)]


@dataclass(slots=True)
class Run:
    """Decisions that share a line, newest first: the prefix cache giving way time after time is one piece of news."""

    entries: list[Told | Note]

    def takes(self, entry: Told | Note) -> bool:
        """Whether the next older one belongs to it."""
        newest = self.entries[0]
        if isinstance(entry, Note) or isinstance(newest, Note):
            return False
        mine, other = newest.decided, entry.decided
        return mine.verdict == other.verdict == Verdict.EVICTED and mine.reason == other.reason

    def one(self) -> Told | Note:
        """What the line tells: the only one, or all of them added up."""
        newest = self.entries[0]
        if isinstance(newest, Note) or len(self.entries) == 1:
            return newest
        sums: Counter[str] = Counter()
        for entry in self.entries:
            assert isinstance(entry, Told), "a run is of one kind"
            sums.update(entry.decided.numbers)
        return Told(newest.serial, msgspec.structs.replace(newest.decided, numbers=dict(sums)))


def _line(run: Run, bands: Bands, now_ns: int, width: int) -> Text:
    entry = run.one()
    if isinstance(entry, Note):
        told = Text.assemble((" " * WHO_CELLS, DIM), (entry.text, f"bold {BAD if entry.bad else GOOD}"))
        at_ns = entry.now_ns
    else:
        decided = entry.decided
        who = f"#{decided.request}" if decided.request else "all"
        times = f"{len(run.entries):,} times: " if len(run.entries) > 1 else ""
        who_style = TITLE if decided.request else DIM
        told = Text.assemble((f"{who:<{WHO_CELLS}}", who_style), sentence(decided, bands, times))
        at_ns = decided.now_ns
    ago = age(max(0, now_ns - at_ns) / NS_PER_S * 1000)
    line = Text.assemble((f"{ago:>{TIME_CELLS - 2}}  ", FAINT), told, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def sentence(decided: Decided, bands: Bands, times: str = "") -> Text:
    """A decision with its verdict in colour: the first word of most sentences is the verdict."""
    text, colour = spoken(decided, bands), colour_of(decided)
    return Text.assemble(
        (f"{decided.verdict:<{VERDICT_CELLS}} ", colour), (times, DIM), (_without(text, decided.verdict), TEXT)
    )


def _without(text: str, verdict: str) -> str:
    """The sentence without the verdict that it begins with."""
    rest = text.removeprefix(verdict)
    return rest.lstrip(" :") if rest != text else text


def life(told: WatchedLife | None, request: int, bands: Bands, width: int, where: str) -> list[Text]:
    """The life of one request: what it is, how it stands, and what was decided about it, oldest first."""
    if told is None:
        text = (
            f"the daemon does not know request {request} any more; its journal does: bandmaster why {request} {where}"
        )
        return [Text(text, WARN)]
    found = [*_facts(told, bands, width), Text("")]
    began_ns = told.events[0].decided.now_ns if told.events else told.now_ns
    for place, entry in enumerate(told.events):
        if place == told.gap and told.left_out:
            found.append(
                Text(f"{'':>12}… {told.left_out:,} decisions that the daemon keeps only in its journal", FAINT)
            )
        found += _event(entry, told.request, began_ns, bands, width)
    if told.live is None and not any(entry.decided.verdict == Verdict.ENDED for entry in told.events):
        found.append(Text("            its end is not among what the daemon still knows", WARN))
    found += [Text(""), Text(f"every pass that passed it over: bandmaster why {request} {where}", FAINT)]
    return found


def _facts(told: WatchedLife, bands: Bands, width: int) -> list[Text]:
    rows = [("id", told.id or "-", TEXT), ("front end", told.frontend or "-", TEXT)]
    live = told.live
    if live is None:
        rows.append(("state", "ended", DIM))
    else:
        colour = STAGE_COLOURS.get(live.stage, TEXT)
        rows.append(("state", f"{stage_word(live.stage)}, {age(live.age_ms)} after it came", colour))
        if live.waits_for:
            place = f"place {live.ahead + 1} in the queue: " if live.ahead >= 0 else ""
            rows.append(("waits for", place + waits(live.waits_for, live.waits_numbers, bands), WARN))
        tokens = f"{live.prompt_tokens:,} of the prompt ({live.cached_tokens:,} were cached), "
        tokens += f"{live.output_tokens:,} of at most {live.max_output:,} of the output"
        rows.append(("tokens", tokens, TEXT))
        pages = f"{short(live.pages)} in its table, {short(live.shared_pages)} of them the cache's"
        rows.append(("pages", pages, TEXT))
        if live.retractions or live.losses:
            rows.append(
                ("setbacks", f"retracted {_times(live.retractions)}, lost with an epoch {_times(live.losses)}", BAD)
            )
    return [Text.assemble((f"{name:<11}", DIM), (fit(text, width - 11), style)) for name, text, style in rows]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _event(entry: Told, request: int, began_ns: int, bands: Bands, width: int) -> Iterable[Text]:
    decided = entry.decided
    about = Text(
        "" if decided.request in (0, request) or decided.verdict == Verdict.ACCEPTED else f"#{decided.request} "
    )
    about.stylize(TITLE)
    after = f"+{(decided.now_ns - began_ns) / NS_PER_S:.3f}s"
    told = Text.assemble(about, sentence(decided, bands))
    indent = AFTER_CELLS + about.cell_len + VERDICT_CELLS + 1
    first, *more = wrapped(told, max(20, width - AFTER_CELLS))
    yield Text.assemble((f"{after:>{AFTER_CELLS - 2}}  ", FAINT), first)
    if more:
        behind = told[len(first.plain) :]
        for line in wrapped(behind, max(20, width - indent)):
            yield Text.assemble(" " * indent, line)


def wrapped(text: Text, width: int) -> list[Text]:
    """A text in lines of a width, cut at spaces."""
    plain, cuts, start = text.plain, list[int](), 0
    while len(plain) - start > width:
        space = plain.rfind(" ", start + 1, start + width + 1)
        start = space + 1 if space > start else start + width
        cuts.append(start)
    return [part.copy() for part in text.divide(cuts)] if cuts else [text]
