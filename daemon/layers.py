"""Layers over pipeline stages: which consecutive layers each stage holds.

Owns the rule that ranks apply at boot and that `bandmaster plan` shows, so that both split a model alike. Pure.
Invariants: every stage has at least one layer; together the stages have each layer once, in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class LayersError(ValueError):
    """Layers that cannot be split as asked; the text names the flag, the value and what is allowed."""


def parse_layers(text: str, pp: int) -> list[int]:
    """Layers of each of `pp` stages as `--pp-layers` gives them; all 0 when it is empty: as even as can be."""
    if not text.strip():
        return [0] * pp
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,5}", part) for part in parts):
        raise LayersError(f"--pp-layers {text}: numbers of layers from 1 up, one for each stage, like 10,22")
    if len(parts) != pp:
        raise LayersError(
            f"--pp-layers {text} names {len(parts)} stages, but --pipeline-parallel-size is {pp}; give one number for "
            f"each stage, or pass --pp {len(parts)}"
        )
    return [int(part) for part in parts]


def split_layers(count: int, stages: Sequence[int]) -> list[range]:
    """Consecutive layers of each stage, out of `count`.

    `stages` has the layers of each stage, or only zeros: as even as can be, the first stages with one more.
    Raises LayersError.
    """
    pp = len(stages)
    assert pp >= 1, "a model has at least one stage"
    if any(stages):
        if sum(stages) != count or min(stages) < 1:
            text = ",".join(map(str, stages))
            raise LayersError(
                f"--pp-layers {text} adds up to {sum(stages)}, but the model has {count} layers: {pp} stages of at "
                "least 1 layer each that add up to them"
            )
        sizes = list(stages)
    elif pp > count:
        raise LayersError(f"--pp {pp}: the model has {count} layers, so --pp may be 1 to {count}")
    else:
        sizes = [count // pp + (1 if stage < count % pp else 0) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
