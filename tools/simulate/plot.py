"""Plot: memory of every band over simulated time, as an SVG that any browser shows.

Owns the drawing. Must never need a library: it is text. One panel per run; bands lie on each other from the chain's
start, each with what requests hold or read (full colour) under what only the prefix cache holds (light). The dashed
line is the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int64s
from allocator.geometry import BandGeometry
from tools.simulate.run import Run
from tools.simulate.show import size

Floats = NDArray[np.float64]

PANEL_WIDTH, PANEL_HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 78, 18, 34, 40
HEAD, LEGEND_LINE = 34, 16
COLORS = {"state": "#c2571a", "full": "#2456a6"}
WINDOW_COLORS = ("#2e7d4f", "#6f8f1f", "#7a5195", "#a8862a")
LIGHT = "0.38"
TICKS = 4


def svg(runs: Sequence[Run], bands: Sequence[BandGeometry], arena_bytes: dict[str, int], title: str) -> str:
    """The whole picture; runs of one arena share a row, and all panels of a row have one scale."""
    arenas = list(dict.fromkeys(run.arena for run in runs))
    policies = list(dict.fromkeys(run.policy for run in runs))
    head = HEAD + LEGEND_LINE * len(bands)
    width, height = PANEL_WIDTH * len(policies), head + PANEL_HEIGHT * len(arenas)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        _legend(bands),
    ]
    for run in runs:
        x = PANEL_WIDTH * policies.index(run.policy)
        y = head + PANEL_HEIGHT * arenas.index(run.arena)
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(run, bands, arena_bytes[run.arena])
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def color_of(band: BandGeometry, bands: Sequence[BandGeometry]) -> str:
    """A band's colour, the same in every panel."""
    windows = [one.name for one in bands if one.kind == "window"]
    return COLORS[band.kind] if band.kind in COLORS else WINDOW_COLORS[windows.index(band.name) % len(WINDOW_COLORS)]


def _legend(bands: Sequence[BandGeometry]) -> str:
    """A line for each band, the topmost first, as the areas lie."""
    parts = []
    for line, band in enumerate(reversed(bands)):
        y, color = HEAD + LEGEND_LINE * line, color_of(band, bands)
        for x, what, opacity in (
            (LEFT, f"{band.name}: used by requests", "1"),
            (LEFT + 212, "in the cache only", LIGHT),
        ):
            mark = f'<rect x="{x}" y="{y - 4}" width="12" height="12" fill="{color}" fill-opacity="{opacity}"/>'
            parts.append(f'{mark}<text x="{x + 18}" y="{y + 6}">{escape(what)}</text>')
    return "\n".join(parts)


def _panel(run: Run, bands: Sequence[BandGeometry], arena_bytes: int) -> list[str]:
    wide, high = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
    seconds = len(run.live) * run.bucket_ns / 1e9
    parts = [f'<text x="{LEFT}" y="{TOP - 10}" font-weight="bold">{escape(f"{run.arena}, {run.policy}")}</text>']

    def at(value: Any) -> Any:
        return TOP + high * (1 - value / arena_bytes)

    if len(run.live):
        x = LEFT + wide * (np.arange(len(run.live)) + 0.5) / len(run.live)
        floor = np.zeros(len(run.live))
        for band, name_color, units, opacity in _layers(run, bands):
            top = floor + units * band.unit_bytes
            if units.any():
                parts.append(_area(x, at(floor), at(top), name_color, opacity))
            floor = top
    for tick in range(TICKS + 1):
        value, y = arena_bytes * tick / TICKS, at(arena_bytes * tick / TICKS)
        dashes = ' stroke-dasharray="5 3"' if tick == TICKS else ""
        shade = "#000" if tick == TICKS else "#0002"
        parts.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="{shade}" stroke-width="0.7"{dashes}/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{size(value)}</text>')
        place, time = LEFT + wide * tick / TICKS, seconds * tick / TICKS
        shown = f"{time / 60:.1f} min" if seconds >= 600 else f"{time:.1f} s"
        side = "end" if tick == TICKS else "middle"
        parts.append(f'<text x="{place:.1f}" y="{TOP + high + 16}" text-anchor="{side}">{shown}</text>')
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}"'
    return [*parts, f'{frame} fill="none" stroke="#0006" stroke-width="0.7"/>']


def _layers(run: Run, bands: Sequence[BandGeometry]) -> list[tuple[BandGeometry, str, Int64s, str]]:
    """From below: what requests use of each band, then what only the cache holds."""
    layers = []
    for index, band in enumerate(bands):
        idle, color = run.idle[:, index], color_of(band, bands)
        layers.append((band, color, run.live[:, index] - idle, "1"))
        layers.append((band, color, idle, LIGHT))
    return layers


def _area(x: Floats, low: Any, high: Any, color: str, opacity: str) -> str:
    there = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), high.tolist(), strict=True))
    back = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x[::-1].tolist(), low[::-1].tolist(), strict=True))
    return f'<polygon points="{there} {back}" fill="{color}" fill-opacity="{opacity}"/>'
