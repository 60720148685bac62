"""Page: a film as one HTML file, with its style, its program and its data inside.

Owns the making of the file. Must never refer to anything outside it: no address of a network is in it, and its own
rules for a browser forbid every connection. The program is in the `.js` files beside this one, in the order of PROGRAM.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, TextIO

from tools.view.arena import COUNTS
from tools.view.film import STEP_COLUMNS, Film, Stretch
from tools.view.heat import POINTS, ROWS, heat, pieces
from tools.view.pack import LEVEL_WORDS, Column, pack_columns, squeeze, text_of
from tools.view.requests import HOLDS, Phase
from tools.view.units import CODES

PROGRAM = (
    "words.js",
    "data.js",
    "film.js",
    "board.js",
    "theme.js",
    "axis.js",
    "plot.js",
    "marks.js",
    "places.js",
    "picture.js",
    "moves.js",
    "exact.js",
    "memory.js",
    "overview.js",
    "work.js",
    "lanes.js",
    "map.js",
    "side.js",
    "hands.js",
    "player.js",
    "link.js",
    "app.js",
    "check.js",
)
TEXTS = 1024  # sentences in one chunk
RISING = frozenset({"sequence", "us", "seq"})  # columns of steps that are kept as differences
FORM = 1  # of the data; the program is in the same file, so that only tools need it


def write_page(film: Film, title: str, notes: Sequence[str], chosen: int, out: TextIO) -> None:
    """Write the page of a complete film; with `chosen` it opens on that request."""
    shown = pieces(film.stretches)
    picture = heat(film, shown)
    lanes = film.requests.lanes(film.position)  # before the requests are packed, which have theirs
    chunks = list(_chunks(film))
    meta = _meta(film, title, notes, chosen) | {
        "heat": {"rows": ROWS, "points": POINTS, "steps": picture.steps},
        "pieces": shown,
        "runLanes": lanes[0],
        "lanes": lanes[1],
    }
    chunks += [(f"heat{stage}", squeeze(plane.tobytes())) for stage, plane in enumerate(picture.planes)]
    template = (files(__package__) / "page.html").read_text("utf-8")
    head, tail = template.split("<!--DATA-->")
    program = "\n".join((files(__package__) / name).read_text("utf-8") for name in PROGRAM)
    style = (files(__package__) / "page.css").read_text("utf-8")
    out.write(head.replace("/*STYLE*/", style).replace("{{TITLE}}", html.escape(title)))
    out.write(f'<script type="application/json" id="meta">{_json(meta)}</script>\n')
    for name, squeezed in chunks:
        out.write(f'<script type="text/plain" id="c-{name}">{text_of(squeezed)}</script>\n')
    out.write(tail.replace("/*PROGRAM*/", program))


def _json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _meta(film: Film, title: str, notes: Sequence[str], chosen: int) -> dict[str, Any]:
    """All that is small."""
    started = film.start_ns / 1e9
    decisions = film.decisions
    return {
        "form": FORM,
        "title": title,
        "notes": list(notes),
        "chosen": chosen,
        "clock": datetime.fromtimestamp(started, UTC).isoformat(timespec="milliseconds") if started > 1e9 else "",
        "steps": film.position,
        "us": film.us,
        "lives": film.lives,
        "records": film.records,
        "arrivals": film.requests.arrivals(),
        "stretches": [_stretch(stretch) for stretch in film.stretches],
        "blocks": [[block.first, block.steps] for block in film.writer.blocks],
        "marks": [[mark.at, mark.us, mark.sequence, mark.kind, mark.text] for mark in film.marks],
        "codes": CODES,
        "counts": COUNTS,
        "stepColumns": STEP_COLUMNS,
        "phases": [phase.name.lower() for phase in Phase],
        "holds": [int(phase) for phase in HOLDS],
        "verdicts": sorted(set(decisions.verdicts)),
        "reasons": sorted(set(decisions.reasons)),
        "ends": sorted({life.end for life in film.requests.lives.values()}),
        "frontends": sorted({life.frontend for life in film.requests.lives.values()}),
        "texts": TEXTS,
    }


def _stretch(stretch: Stretch) -> dict[str, Any]:
    """An epoch's shape."""
    stages = [
        {
            "arena": stage.arena_bytes,
            "start": stage.chain_start_bytes,
            "bands": [[band.name, band.kind, band.unit_bytes] for band in stage.bands],
        }
        for stage in stretch.geometry.stages
    ]
    return {
        "life": stretch.life,
        "epoch": stretch.epoch,
        "first": stretch.first,
        "end": stretch.end,
        "why": stretch.why,
        "pageSize": stretch.geometry.page_size,
        "pages": stretch.geometry.virtual_pages,
        "slots": stretch.geometry.virtual_slots,
        "stages": stages,
        "bands": stretch.bands,
    }


def _chunks(film: Film) -> Iterator[tuple[str, bytes]]:
    """Every chunk but the picture's, by name."""
    yield "steps", _squeezed(Column(film.steps[name], differences=name in RISING) for name in STEP_COLUMNS)
    for at, stretch in enumerate(film.stretches):
        yield f"counts{at}", _squeezed(Column(column, differences=True) for column in stretch.counts)
    yield from _request_chunks(film)
    yield from _decision_chunks(film)
    for at, block in enumerate(film.writer.blocks):
        yield f"units{at}", block.squeezed


def _request_chunks(film: Film) -> Iterator[tuple[str, bytes]]:
    lives = list(film.requests.by_number())
    ends = sorted({life.end for life in lives})
    frontends = sorted({life.frontend for life in lives})
    columns = [
        Column([getattr(life, name) for life in lives], differences=name in ("number", "at", "us"))
        for name in ("number", "at", "us", "end_at", "end_us", "prompt_tokens", "max_tokens", "out")
    ]
    columns += [
        Column([getattr(life, name) for life in lives])
        for name in ("retractions", "cached_tokens", "lane", "queue_lane", "held_at")
    ]
    columns.append(Column([ends.index(life.end) for life in lives]))
    columns.append(Column([frontends.index(life.frontend) for life in lives]))
    yield "requests", _squeezed(columns)
    yield "ids", squeeze("\n".join(_line(life.id) for life in lives).encode())
    phases, place = film.requests.phases, {life.number: at for at, life in enumerate(lives)}
    kept = [at for at, number in enumerate(phases.requests) if number in place]
    yield (
        "phases",
        _squeezed(
            [
                Column([place[phases.requests[at]] for at in kept]),
                Column([phases.at[at] for at in kept], differences=True),
                Column([phases.us[at] for at in kept], differences=True),
                Column([phases.phases[at] for at in kept]),
            ]
        ),
    )


def _decision_chunks(film: Film) -> Iterator[tuple[str, bytes]]:
    told = film.decisions
    verdicts = {name: at for at, name in enumerate(sorted(set(told.verdicts)))}
    reasons = {name: at for at, name in enumerate(sorted(set(told.reasons)))}
    yield (
        "decisions",
        _squeezed(
            [
                Column(told.at, differences=True),
                Column(told.us, differences=True),
                Column(told.sequences, differences=True),
                Column(told.requests),
                Column(told.by),
                Column([verdicts[name] for name in told.verdicts]),
                Column([reasons[name] for name in told.reasons]),
            ]
        ),
    )
    for at in range(0, len(told.texts), TEXTS):
        yield f"texts{at // TEXTS}", squeeze("\n".join(map(_line, told.texts[at : at + TEXTS])).encode(), LEVEL_WORDS)


def _line(text: str) -> str:
    """Text of one line."""
    return " ".join(text.split("\n"))


def _squeezed(columns: Any) -> bytes:
    return squeeze(pack_columns(columns))
