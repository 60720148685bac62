"""Boot notes: a limit that memory cannot reach and a cache that cannot hit are said at boot, with both numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from allocator.capacity import CapacityForm
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.boot_notes import Note, boot_notes
from daemon.settings_table import Settings
from ipc.messages import ModelFacts

STATE = BandGeometry("state", "state", 4096)
WINDOW = BandGeometry("window:64", "window", 512, 64)
FULL = BandGeometry("full", "full", 256)


def geometry(arena_bytes: int, *bands: BandGeometry, page_size: int = 16) -> Geometry:
    """One stage; the chain starts where the largest unit ends."""
    start = max(band.unit_bytes for band in bands)
    return Geometry(page_size, 1 << 20, 1 << 20, [StageGeometry(arena_bytes, start, list(bands))])


def notes(where: Geometry, model_len: int = 8192, **settings: Any) -> dict[str, Note]:
    """Notes by event."""
    facts = ModelFacts("m", "x", 100, model_len, "float32")
    chosen = dataclasses.replace(Settings(), page_size=where.page_size, **settings)
    return {note.event: note for note in boot_notes(chosen, where, facts)}


def test_S6_a_concurrency_above_the_slots_is_said_with_both_numbers() -> None:
    """Room for 20 slots, two a request: of 64 at most 9 run beside their pages, and 9 is what works."""
    where = geometry(21 * 4096, STATE, FULL)
    note = notes(where)["ConcurrencyClamped"]
    assert note.warns
    assert (note.values["allowed"], note.values["most"]) == (64, 9)
    assert "--max-running-requests 64" in note.values["what"]
    assert "--max-running-requests 9 is the largest" in note.values["what"]
    form = CapacityForm(where)
    assert form.fits((18, 9))
    assert not form.fits((20, 10))
    assert "ConcurrencyClamped" not in notes(where, max_running_requests=9)
    assert notes(where, max_running_requests=10)["ConcurrencyClamped"].values["most"] == 9


@pytest.mark.parametrize("off", [{"enable_prefix_caching": False}, {"state_cache": "no_buffer"}])
def test_S6_without_a_checkpoint_slot_twice_as_many_run(off: dict[str, Any]) -> None:
    """A request that owns its working slot alone needs half the slots."""
    assert notes(geometry(21 * 4096, STATE, FULL), **off)["ConcurrencyClamped"].values["most"] == 18


def test_S6_pages_can_be_the_limit_too() -> None:
    """A model without state in a tiny arena: the shortest request needs a page of each kind."""
    note = notes(geometry(512 + 10 * (512 + 256), WINDOW, FULL))["ConcurrencyClamped"]
    assert note.values["most"] == 10
    assert "a page of window:64, full" in note.values["what"]


def test_P2_a_checkpoint_interval_beyond_the_context_is_said_with_the_reason() -> None:
    """Every look-up would miss: the line has the step, the reach and the flag; one step less is silent."""
    where = geometry(1 << 24, STATE, FULL)
    note = notes(where, model_len=1024, checkpoint_interval=1024)["ReuseCannotOccur"]
    assert note.warns
    assert (note.values["step_tokens"], note.values["reach_tokens"]) == (1024, 1022)
    for word in ("--checkpoint-interval 1024", "the model's length", "1022"):
        assert word in note.values["what"]
    assert "ReuseCannotOccur" not in notes(where, model_len=1026, checkpoint_interval=1024)
    limited = notes(where, model_len=8192, max_model_len=512, checkpoint_interval=512)
    assert limited["ReuseCannotOccur"].values["reach_tokens"] == 510
    assert "ReuseCannotOccur" not in notes(where, model_len=512, checkpoint_interval=512, enable_prefix_caching=False)


def test_P2_a_page_as_long_as_the_context_is_said_too() -> None:
    """Without recurrent layers the step is a page; the checkpoint interval says nothing there."""
    note = notes(geometry(1 << 24, FULL, page_size=128), model_len=128)["ReuseCannotOccur"]
    assert "--page-size 128" in note.values["what"]
    assert "ReuseCannotOccur" not in notes(geometry(1 << 24, FULL), model_len=128, checkpoint_interval=4096)


def test_P2_memory_can_be_shorter_than_the_step() -> None:
    """An arena that holds fewer tokens than one interval can never see a second request begin behind it."""
    where = geometry(3 * 4096 + 4 * 256, STATE, FULL)
    note = notes(where, checkpoint_interval=256, max_running_requests=1)["ReuseCannotOccur"]
    assert "the memory" in note.values["what"]
    assert note.values["reach_tokens"] < 256


@pytest.mark.parametrize(
    ("bands", "settings", "values"),
    [
        ((FULL,), {}, {"enabled": True, "kinds": ["full"], "step_tokens": 16}),
        ((FULL,), {"enable_prefix_caching": False}, {"enabled": False}),
        (
            (STATE, WINDOW, FULL),
            {"checkpoint_interval": 512},
            {
                "enabled": True,
                "kinds": ["state", "window:64", "full"],
                "step_tokens": 512,
                "state_cache": "extra_buffer",
            },
        ),
    ],
)
def test_what_the_cache_does_is_one_line(
    bands: tuple[BandGeometry, ...], settings: dict[str, Any], values: dict[str, Any]
) -> None:
    """Whether it is on, which kinds it keeps, and at which lengths a request can go on."""
    note = notes(geometry(1 << 24, *bands), **settings)["PrefixCache"]
    assert (note.warns, note.values) == (False, values)
