"""Random programs of the page-safety harness, with the CUDA device beside its modeled one: nothing races."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from allocator.columns import Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.cuda import CudaDevice, Streams
from daemon.rank.modeled_device import ModeledDevice
from tests.rank.modeled_streams import Clock, Engine, Machine, Units
from tests.rank.test_cuda_order import KINDS
from tools.pagesafety import fleet
from tools.pagesafety.program import random_case, run_case

Kinds = frozenset[tuple[str, str]]


class Shadowed(ModeledDevice):
    """The harness's device; what it is told, a CUDA device on modeled streams is told too."""

    deaf: Kinds = frozenset()
    machines: ClassVar[list[Machine]] = []

    def __init__(self, stage: StageGeometry, *more: Any, **options: Any) -> None:
        super().__init__(stage, *more, **options)
        self.machine = Machine(self.deaf)
        self.machines.append(self.machine)
        self.units = Units(self.machine, [band.unit_bytes for band in stage.bands])
        stream = self.machine.stream
        streams = Streams(stream("forward"), stream("schedule"), stream("copies"), self.machine.on)
        self.cuda = CudaDevice(streams, self.units, Engine(self.machine, self.units, self._reads))
        self.ends: dict[int, Clock] = {}
        self.copies: set[int] = set()
        self.transfers: set[int] = set()

    def _reads(self, use: int, band: int, virtual: Int32s) -> bool:
        return self._peer_writes is None or self._peer_writes(use, band, virtual) is None

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        super().open_tables(tables)
        self.cuda.open_tables(tables)

    def wait_forward(self, seq: int) -> None:
        super().wait_forward(seq)
        self.cuda.wait_forward(seq)

    def wait_copy(self, use: int) -> None:
        super().wait_copy(use)
        self.cuda.wait_copy(use)

    def host_wait(self, use: int) -> None:
        super().host_wait(use)
        self.cuda.host_wait(use)

    def zero(self, band: int, units: Int32s) -> None:
        super().zero(band, units)
        self.cuda.zero(band, units)

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        super().copy(band, sources, targets)
        self.cuda.copy(band, sources, targets)

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        super().bind(band, virtual, physical)
        self.cuda.bind(band, virtual, physical)

    def host_read(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        super().host_read(use, band, units, slots)
        self.copies.add(use)
        self.cuda.host_read(use, band, units, slots)

    def host_write(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        super().host_write(use, band, units, slots)
        self.copies.add(use)
        self.cuda.host_write(use, band, units, slots)

    def send_units(self, use: int, band: int, units: Int32s, after: int) -> None:
        super().send_units(use, band, units, after)
        self.transfers.add(use)
        self.cuda.send_units(use, band, units, after)

    def publish_units(self, use: int, band: int, virtual: Int32s, units: Int32s, after: int) -> None:
        super().publish_units(use, band, virtual, units, after)
        self.transfers.add(use)
        self.cuda.publish_units(use, band, virtual, units, after)

    def schedule_done(self) -> None:
        super().schedule_done()
        self.cuda.schedule_done()

    def launch(self, seq: int, reads: Any, writes: Any, padding: Any = ()) -> None:
        super().launch(seq, reads, writes, padding)
        read = [byte for band, units in reads for byte in self.units.bytes_of(band, units)]
        written = [byte for band, units, _, _ in writes for byte in self.units.bytes_of(band, units)]
        self.machine.issue(f"forward {seq}", "forward", read, written)
        self.ends[seq] = dict(self.machine.clocks["forward"])

    def record_forward(self, seq: int) -> None:
        super().record_forward(seq)
        self.cuda.record_forward(seq)

    def retire_through(self, seq: int) -> None:
        """The host has seen the forward's tokens."""
        super().retire_through(seq)
        self.machine.order("host", "tokens", self.ends.get(seq, {}))
        self.cuda.retire_through(seq)

    def release(self, uses: Sequence[int]) -> None:
        """Proof that they are over: the engine ended, the copy's event fired."""
        super().release(uses)
        for use in uses:
            if use in self.transfers:
                self.cuda.host_wait(use)
            if use in self.copies:
                self.machine.order("host", "proof", self.cuda._copies[use][0].past)  # type: ignore[attr-defined]
        self.cuda.release(uses)


@pytest.fixture
def shadowed(monkeypatch: pytest.MonkeyPatch) -> type[Shadowed]:
    """The harness runs with shadowed devices."""
    monkeypatch.setattr(fleet, "ModeledDevice", Shadowed)
    monkeypatch.setattr(Shadowed, "machines", [])
    return Shadowed


def races(shape: str, seed: int) -> list[str]:
    """What a program's ranks found, in 150 operations."""
    Shadowed.machines.clear()
    outcome = run_case(random_case(shape, 4, seed, 150))
    assert outcome.fault is None
    return [race for machine in Shadowed.machines for race in machine.races]


@pytest.mark.parametrize("shape", ["full", "full+window", "full+window+state", "windows+state", "stages"])
def test_programs_do_not_race(shadowed: type[Shadowed], shape: str) -> None:
    """Every stream that the CUDA device orders: no two pieces of work touch a byte, a slot or an id unordered."""
    for seed in range(8):
        assert races(shape, seed) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-behind-{kind[1]}")
def test_programs_race_without_any_kind_of_wait(
    shadowed: type[Shadowed], monkeypatch: pytest.MonkeyPatch, kind: tuple[str, str]
) -> None:
    """A device that does not wait in one of these ways is found out within 40 programs."""
    monkeypatch.setattr(shadowed, "deaf", frozenset([kind]))
    assert any(races("full+window+state", seed) for seed in range(40))
