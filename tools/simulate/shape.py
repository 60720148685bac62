"""Shape: the bands of the simulated model, from `--band` flags or from a model's config.

Owns the syntax of `--band` and its errors. Must never size an arena. Invariants: bands come in chain order (state,
windows from the longest, full attention), each once, full attention always; unit bytes are those of one page of the
simulated page size, or of one slot.

    --band full=BYTES/PAGE --band window:TOKENS=BYTES/PAGE --band state:INTERVAL=BYTES/SLOT

`PAGE` is the word `page` (of the simulated size), `token`, or a number of tokens: `1835008/128` is what 128
tokens take. `INTERVAL` is how many tokens lie between two checkpoints of a state.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from allocator.geometry import BandGeometry
from daemon.config import ConfigError, parse_value
from daemon.settings_table import BY_KEY
from tools.simulate.errors import SimulateError

SYNTAX = "full=BYTES/PAGE, window:TOKENS=BYTES/PAGE or state:INTERVAL=BYTES/SLOT"
TOKENS_MAX = 1 << 24
_SIZE = dataclasses.replace(BY_KEY["arena-bytes"], low=None, high=None)  # a unit may be of any size
_BAND = re.compile(r"(full|window|state)(?::([^=]*))?=([^/]+)(?:/(.+))?")


class Shape(NamedTuple):
    """What a model stores: its bands in chain order, the checkpoint grid (0: no state), and where that comes from.

    `max_model_len` is the model's own, 0 where there is no model.
    """

    bands: list[BandGeometry]
    interval: int
    origin: str
    max_model_len: int = 0
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The bands in words: `full + window:1024 + state`."""
        return " + ".join(band.name for band in reversed(self.bands))


def shape_of_bands(texts: Sequence[str], page_size: int) -> Shape:
    """The bands that flags describe; raises SimulateError naming the wrong one."""
    found: dict[str, BandGeometry] = {}
    interval = 0
    for text in texts:
        band, grid = _band(text, page_size)
        if band.name in found:
            raise SimulateError(f"--band {text}: the band {band.name} is there already; give each once")
        found[band.name] = band
        interval = grid or interval
    if "full" not in found:
        given = ", ".join(found) or "none"
        raise SimulateError(f"--band: full is missing ({given} given); a model of windows only has full=0/page")
    windows = [band for band in found.values() if band.kind == "window"]
    windows.sort(key=lambda band: -band.window_tokens)
    states = [band for band in found.values() if band.kind == "state"]
    bands = [*states, *windows, found["full"]]
    if not any(band.unit_bytes for band in bands):
        raise SimulateError("--band: no band has a byte, so nothing ever fills an arena")
    return Shape(bands, interval, "--band")


def _band(text: str, page_size: int) -> tuple[BandGeometry, int]:
    """One band and, of a state, its checkpoint interval."""
    match = _BAND.fullmatch(text.strip())
    if match is None:
        raise SimulateError(f"--band {text!r} is not {SYNTAX}")
    kind, number, size, per = match.groups()
    if kind == "full":
        if number is not None:
            raise SimulateError(f"--band {text}: full attention has no number; write full={size}/{per or 'page'}")
        return BandGeometry("full", "full", _unit_bytes(text, size, per, page_size)), 0
    if not (number or "").isdecimal() or not 1 <= int(number or 0) <= TOKENS_MAX:
        what = "tokens of the window" if kind == "window" else "tokens between two checkpoints"
        shown = "nothing" if not number else repr(number)
        raise SimulateError(f"--band {text}: {kind}: needs the {what}, 1 to {TOKENS_MAX}, not {shown}")
    if kind == "window":
        tokens = int(number)
        return BandGeometry(f"window:{tokens}", "window", _unit_bytes(text, size, per, page_size), tokens), 0
    if per not in (None, "slot", "SLOT"):
        raise SimulateError(f"--band {text}: a state's bytes are those of a slot; write {size}/slot, not {size}/{per}")
    return BandGeometry("state", "state", _bytes(text, size)), int(number)


def _unit_bytes(text: str, size: str, per: str | None, page_size: int) -> int:
    """Bytes of one page of the simulated size."""
    count, word = _bytes(text, size), (per or "page").lower()
    if word == "page":
        return count
    if word == "token":
        return count * page_size
    if not word.isdecimal() or not 1 <= int(word) <= TOKENS_MAX:
        raise SimulateError(f"--band {text}: {per!r} is not page, token or a number of tokens")
    if count * page_size % int(word):
        raise SimulateError(
            f"--band {text}: {count} bytes for {word} tokens are no whole number of bytes for a page of {page_size}"
        )
    return count * page_size // int(word)


def _bytes(text: str, size: str) -> int:
    try:
        return int(parse_value(_SIZE, size, "flag"))
    except ConfigError:
        raise SimulateError(f"--band {text}: {size!r} is no size; write bytes, or 512KiB, 7MiB") from None


def shape_of_model(path: str, dtype: str, page_size: int, interval: int, keeps: bool, tp: int) -> Shape:
    """The bands of a model as its config describes them, of one of `tp` tensor ranks; raises SimulateError.

    `keeps`: whether requests own a checkpoint slot, `interval` tokens apart.
    """
    # Imported here: it brings `transformers` along, which `--band` needs nothing of.
    from allocator.errors import DeclarationError
    from allocator.plan import plan_storage
    from tools.planning.described import describe_model
    from tools.planning.errors import PlanError

    try:
        model = describe_model(path, dtype, 0, interval if keeps else 0, tp)
        bands = plan_storage(model.layers, page_size).band_geometries()
    except (PlanError, DeclarationError) as error:
        raise SimulateError(str(error)) from error
    has_state = any(band.kind == "state" for band in bands)
    return Shape(bands, interval if has_state else 0, f"{path}, {model.dtype}", model.max_model_len, tuple(model.notes))
