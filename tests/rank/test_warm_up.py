"""The warm-up before Ready: everything on a request's way runs once, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allocator.geometry import BandGeometry, StageGeometry
from daemon.rank import backend, paged_attention, sampler
from daemon.rank.runner import open_runner
from daemon.rank.warm_up import warm_up
from kernels import host_attention
from tests.rank.models import tiny_model
from tools.rank_driver import Driver, settings


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Queries of every layer's attention, and rows of every draw, in the order of the calls."""
    calls: dict[str, list[int]] = {"attend": [], "draw": []}
    attend, draw = host_attention.attend, sampler.draw_on_host

    def attended(plan: Any, q: Any, *rest: Any) -> Any:
        calls["attend"].append(int(q.shape[0]))
        return attend(plan, q, *rest)

    def drawn(scaled: Any, keys: Any) -> Any:
        calls["draw"].append(int(scaled.shape[0]))
        return draw(scaled, keys)

    monkeypatch.setattr(paged_attention, "attend", attended)
    monkeypatch.setattr(sampler, "draw_on_host", drawn)
    return calls


@pytest.mark.parametrize("implementation", ["native", "generic"])
@pytest.mark.parametrize("limits", [{}, {"max_batched_tokens": 5}, {"max_model_len": 2}, {"page_size": 64}])
def test_prefill_decode_and_draw_run_before_ready(
    seen: dict[str, list[int]], tmp_path: Path, implementation: str, limits: dict[str, int]
) -> None:
    """`prepare` runs a chunk and one more token through every layer, drawing both; limits of the settings hold."""
    model = str(tiny_model(tmp_path, "llama"))
    values: dict[str, Any] = {"arena_bytes": 1 << 20, "dtype": "float32", "max_batched_tokens": 64} | limits
    config = settings(model_path=model, runner="torch", options={"model_impl": implementation}, **values)
    open_runner(config, 0, 0).prepare()
    tokens = min(33, values["max_batched_tokens"], values.get("max_model_len", 99))
    assert seen == {"attend": [tokens - 1] * 3 + [1] * 3, "draw": [1, 1]}


def test_a_move_runs_before_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` zeroes a unit, copies it and updates the id table with columns of every size, in the chain's bytes."""
    calls: list[tuple[str, int]] = []

    class Watched(backend.HostDevice):
        def zero(self, band: int, units: Any) -> None:
            calls.append(("zero", units.size))
            super().zero(band, units)

        def copy(self, band: int, sources: Any, targets: Any) -> None:
            calls.append(("copy", sources.size))
            super().copy(band, sources, targets)

        def bind(self, band: int, virtual: Any, physical: Any) -> None:
            calls.append(("bind", virtual.size))

    monkeypatch.setattr(backend, "HostDevice", Watched)
    model = str(tiny_model(tmp_path, "llama"))
    open_runner(settings(model_path=model, runner="torch", arena_bytes=1 << 20, page_size=64), 0, 0).prepare()
    assert calls == [("zero", 1), ("copy", 1), *(("bind", 1 << bits) for bits in range(13))]


def test_a_warm_rank_starts_like_a_cold_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, counts of live units and the sink are what they are without a warm-up."""
    model = str(tiny_model(tmp_path, "llama"))
    config = settings(model_path=model, runner="torch", arena_bytes=1 << 20, dtype="float32")
    warm = Driver(config)
    monkeypatch.setattr("daemon.rank.torch_runner.warm_up", lambda *_: None)
    cold = Driver(config)
    for driver in (warm, cold):
        driver.generate(0, [5, 6, 7], 12)
        driver.step([])
    assert warm.rows[0].tokens == cold.rows[0].tokens
    assert [report.bands for report in warm.reports] == [report.bands for report in cold.reports]
    assert not warm.runner.device.arena.data[: warm.prepared.geometry.chain_start_bytes].any()  # type: ignore[attr-defined]


def test_every_band_that_a_stage_stores_is_moved_once() -> None:
    """A stage that lacks the owner, with a state and a window band: both are zeroed and copied, none else is named."""
    seen: list[tuple[str, int]] = []

    class Watched(backend.HostDevice):
        def copy(self, band: int, sources: Any, targets: Any) -> None:
            seen.append(("copy", band))
            super().copy(band, sources, targets)

        def zero(self, band: int, units: Any) -> None:
            seen.append(("zero", band))
            super().zero(band, units)

    class Done:
        def outcome(self) -> None:
            """Nothing was computed."""

    bands = [BandGeometry("state", "state", 512), BandGeometry("window:64", "window", 256, 64)]
    stage = StageGeometry(8192, 1024, [*bands, BandGeometry("full", "full", 0)])
    warm_up(Watched, lambda batch: Done(), stage, 16, 64)  # type: ignore[arg-type,return-value]
    assert seen == [("zero", 0), ("copy", 0), ("zero", 1), ("copy", 1)]
