"""Figures: the head of the page, and rates with their recent past.

Owns those two panels as lines of text. Must never compute more than a ratio of what `history` has.
"""

from __future__ import annotations

from rich.text import Text

from tools.top.history import NS_PER_S, History
from tools.top.palette import (
    BAD,
    DIM,
    ENDED,
    FAINT,
    GOOD,
    HIT,
    HOT,
    PREFILL,
    STEP,
    SURFACE,
    TEXT,
    TITLE,
    WARN,
    age,
    bar,
    beside,
    fit,
    heading,
    milliseconds,
    rate,
    share,
    short,
    sparkline,
)

WIDE_FROM = 104
FIGURE_CELLS = 24
THIS_LIFE = "this life  "  # what the daemon's totals count: since its process started


def state_of(history: History) -> tuple[str, str, str]:
    """The daemon's state in a word, its colour, and the reasons."""
    if history.lost:
        return ("connecting" if history.watched is None else "lost"), BAD, history.lost
    watched = history.watched
    assert watched is not None, "a daemon that is not lost has answered"
    health, reasons = watched.health, "; ".join(watched.health["reasons"])
    if watched.gauges.get("draining"):
        return "draining", WARN, reasons
    if not watched.epoch["running"]:
        return "recovering", BAD, reasons
    if not health["ready"] or not health["progress"]:
        return ("stalled" if health["ready"] else "not ready"), BAD, reasons
    return "ready", GOOD, reasons


def head(history: History, width: int, paused: bool) -> list[Text]:
    """One line: who, how it is, since when; a second one with reasons where there are any."""
    word, colour, reasons = state_of(history)
    left = Text.assemble(("bandmaster", f"bold {TITLE}"), ("  ● ", colour), (word, f"bold {colour}"), no_wrap=True)
    right = Text(no_wrap=True)
    if paused:
        right.append(" PAUSED ", f"bold {SURFACE} on {WARN}")
        right.append(" ")
    watched = history.watched
    if watched is not None:
        if watched.facts is not None:
            left.append(f"  {watched.facts.name}", TEXT)
            if width >= WIDE_FROM:
                left.append(f"  {watched.facts.architecture}, {watched.facts.dtype}", DIM)
        right.append(f"epoch {watched.epoch['number']}", WARN if watched.epoch["restarts"] else DIM)
        if history.lives > 1:
            right.append(f"  {history.lives} lives seen", WARN)
        if width >= WIDE_FROM:
            right.append(f"  life {watched.life[:8]}", DIM)
        right.append(f"  up {age((watched.now_ns - watched.began_ns) / NS_PER_S * 1000)}", DIM)
    if width >= WIDE_FROM:
        left.append(f"  {history.where}", FAINT)
    line = bar(beside(left, right, width), SURFACE, width)
    return [line, Text(fit(reasons, width), colour, no_wrap=True)] if reasons else [line]


def _figure(title: str, value: str, unit: str, style: str = TEXT) -> Text:
    return Text.assemble((f"{title:<8}", DIM), (f"{value:>7}", f"bold {style}"), (f" {unit:<8}", DIM), no_wrap=True)


def _gauge(part: int, whole: int, width: int, colour: str) -> Text:
    """A bar of how full something is."""
    full = round(width * part / whole) if whole else 0
    full = max(full, 1) if part else 0
    return Text.assemble(("■" * min(full, width), colour), ("■" * max(0, width - full), FAINT), no_wrap=True)


def rates(history: History, width: int) -> list[Text]:
    """The panel of rates: two columns of figures, each with its recent past."""
    watched, now = history.watched, history.rates
    gauges = watched.gauges if watched is not None else {}
    cached = sum(history.watched.sums.get(name, 0) for name in ("cached_tokens",)) if history.watched else 0
    queried = history.watched.sums.get("queried_tokens", 0) if history.watched else 0
    retractions = gauges.get("retractions_total", 0)
    so_far = Text.assemble(
        (THIS_LIFE, DIM),
        (short(gauges.get("accepted_total", 0)), TEXT),
        (" accepted  ", DIM),
        (short(gauges.get("refused_total", 0)), BAD if gauges.get("refused_total") else TEXT),
        (" refused  ", DIM),
        (short(retractions), WARN if retractions else TEXT),
        (" retraction  " if retractions == 1 else " retractions  ", DIM),
        (share(cached, queried), TEXT),
        (" cached", DIM),
    )
    recovered = Text.assemble((short(gauges.get("recovered_total", 0)), TEXT), (" recovered  ", DIM))
    if gauges.get("recovered_total") and len("rates ") + recovered.cell_len + so_far.cell_len <= width:
        so_far = Text.assemble(so_far[: len(THIS_LIFE)], recovered, so_far[len(THIS_LIFE) :])
    found = [heading("rates", "", so_far, width)]
    cells = max(0, (width - 2) // 2 - FIGURE_CELLS)
    rows = [
        (
            (_figure("out", rate(now.output_tokens), "tok/s", GOOD), "output_tokens", GOOD),
            (_figure("step", milliseconds(now.step_ms).split()[0], "ms"), "step_ms", STEP),
        ),
        (
            (_figure("in", rate(now.prompt_tokens), "tok/s", PREFILL), "prompt_tokens", PREFILL),
            (_figure("steps", rate(now.steps), "/s"), "steps", STEP),
        ),
        (
            (
                _figure("cache", share(now.hit_rate or 0, 1) if now.hit_rate is not None else "-", "hits"),
                "hit_rate",
                HIT,
            ),
            (_figure("ended", rate(now.ended), "req/s"), "ended", ENDED),
        ),
    ]
    for left, right in rows:
        line = Text(no_wrap=True)
        for figure, name, colour in (left, right):
            line.append_text(figure)
            line.append_text(sparkline(history.series(name), cells, colour, 1.0 if name == "hit_rate" else 0.0))
            line.append("  ")
        line.right_crop(2)
        found.append(line)
    found.append(_load(history, width))
    return found


def _load(history: History, width: int) -> Text:
    """How full the rows are, who waits, and for how long those that started had waited."""
    watched, now = history.watched, history.rates
    gauges = watched.gauges if watched is not None else {}
    most = watched.policies["max_running_requests"] if watched is not None else 0
    running = gauges.get("running", 0) + gauges.get("prefilling", 0)
    text = Text.assemble(("rows    ", DIM), (f"{short(running):>7}", f"bold {TEXT}"), (f" of {short(most):<5}", DIM))
    text.append_text(_gauge(running, most, max(0, (width - 2) // 2 - FIGURE_CELLS), GOOD))
    text.append("  ")
    waiting, parked = gauges.get("waiting", 0), gauges.get("parked", 0)
    told = [("queue   ", DIM), (f"{short(waiting):>7}", f"bold {WARN if waiting else TEXT}"), (" wait    ", DIM)]
    told += [(f"{milliseconds(now.waited_ms)}", TEXT), (" each", DIM)]
    if parked or width >= WIDE_FROM:
        told += [("  ", DIM), (f"{parked}", f"bold {HOT}" if parked else TEXT), (" parked", DIM)]
    if now.retractions or width >= WIDE_FROM:
        told += [("  ", DIM), (rate(now.retractions), f"bold {BAD}" if now.retractions else TEXT), (" retr/s", DIM)]
    text.append_text(Text.assemble(*told))
    text.truncate(width)
    return text
