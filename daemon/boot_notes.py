"""Boot notes: what the sizes agreed at boot mean for the settings, said once, before a client finds out.

Owns the sentences. Must never change a setting or refuse anything: what cannot work at all was refused before. Pure:
settings, geometry and the model's facts in, notes out. Nothing that decides reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from allocator.capacity import CapacityForm, Demand
from allocator.geometry import Geometry
from daemon.rank_settings import keeps_checkpoints
from daemon.settings_table import Settings
from ipc.messages import ModelFacts


class Note(NamedTuple):
    """One log line: its event, whether somebody should act on it, and its values."""

    event: str
    warns: bool
    values: dict[str, Any]


def boot_notes(settings: Settings, geometry: Geometry, facts: ModelFacts) -> list[Note]:
    """What is worth saying of an epoch that begins with this geometry."""
    form = CapacityForm(geometry)
    longest = min(settings.max_model_len or facts.max_model_len, facts.max_model_len)
    notes = [_cache(settings, form)]
    if settings.enable_prefix_caching:
        notes += _reuse_cannot_occur(settings, form, longest)
    return notes + _concurrency(settings, form)


def _has_state(form: CapacityForm) -> bool:
    return any(band.kind == "state" for band in form.bands)


def slots_per_request(settings: Settings) -> int:
    """State slots that a running request of a model with recurrent layers holds: working and, perhaps, checkpoint."""
    return 2 if keeps_checkpoints(settings) else 1


def reuse_step_tokens(settings: Settings, form: CapacityForm) -> int:
    """Tokens between two lengths at which a cached prefix can be gone on from."""
    on_grid = _has_state(form) and keeps_checkpoints(settings)
    return settings.checkpoint_interval if on_grid else settings.page_size


def _cache(settings: Settings, form: CapacityForm) -> Note:
    if not settings.enable_prefix_caching:
        return Note("PrefixCache", False, {"enabled": False})
    kinds = [band.name for band in form.bands]
    values = {"enabled": True, "kinds": kinds, "step_tokens": reuse_step_tokens(settings, form)}
    return Note("PrefixCache", False, values | ({"state_cache": settings.state_cache} if _has_state(form) else {}))


def _demand(form: CapacityForm, slots: int, window_pages: int) -> Demand:
    """Units of one request with one full-attention page."""
    units = {"state": slots, "window": window_pages, "full": 1}
    return tuple(units[band.kind] for band in form.bands)


def _reuse_cannot_occur(settings: Settings, form: CapacityForm, longest: int) -> list[Note]:
    """A first place to go on from that lies beyond the longest prompt: every look-up would miss."""
    step = reuse_step_tokens(settings, form)
    per_page = _demand(form, 0, 0)
    base = tuple(slots_per_request(settings) if band.kind == "state" else 0 for band in form.bands)
    room = form.most(base, per_page) * settings.page_size
    # One token of a prompt is always computed, and one more position is left for the output.
    reach, limit = min((longest - 2, "the model's length"), (room - 1, "the memory"))
    if step <= reach:
        return []
    flag = "--checkpoint-interval" if step == settings.checkpoint_interval and _has_state(form) else "--page-size"
    text = (
        f"no request can reuse a cached prefix: it can be gone on from every {step} tokens ({flag} {step}), and "
        f"{limit} leaves at most {max(reach, 0)} tokens of a prompt to reuse; lower {flag}, or save the cache's work "
        "with --no-enable-prefix-caching"
    )
    return [Note("ReuseCannotOccur", True, {"step_tokens": step, "reach_tokens": max(reach, 0), "what": text})]


def _concurrency(settings: Settings, form: CapacityForm) -> list[Note]:
    """More running requests allowed than memory can hold of the shortest: the rest of them waits."""
    slots = slots_per_request(settings)
    most = form.most((0,) * len(form.bands), _demand(form, slots, 1))
    allowed = settings.max_running_requests
    if most >= allowed:
        return []
    each = [f"{slots} state slots"] if _has_state(form) else []
    pages = "a page of " + ", ".join(band.name for band in form.bands if band.kind != "state")
    text = (
        f"--max-running-requests {allowed} is more than memory holds: at most {most} requests run at once, each with "
        f"{' and '.join([*each, pages])}; the others wait; --max-running-requests {most} is the largest that can be "
        "reached, more needs a larger --arena-bytes or --mem-fraction"
    )
    return [Note("ConcurrencyClamped", True, {"allowed": allowed, "most": most, "what": text})]
