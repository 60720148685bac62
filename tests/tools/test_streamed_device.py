"""Programs on streams beside the model: what is compared, over streams that run at once in host memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from allocator.columns import Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.host_pool import HostPool
from kernels import reference
from tools import stress
from tools.pagesafety.program import Outcome, random_case, run_case
from tools.pagesafety.streamed_device import UNIT_SCALE, StreamedDevice, host_machinery


class HostUnits:
    """What a CUDA device enqueues, done at once by the torch twins of its kernels; `lazy` is left out."""

    lazy = ""

    def __init__(self, stage: StageGeometry, data: Tensor, pool: HostPool) -> None:
        self._sizes = [band.unit_bytes for band in stage.bands]
        self._data, self._pool = data, pool
        self._tables: list[Tensor] = []

    def open_tables(self, tables: list[Int32s]) -> None:
        self._tables = [torch.from_numpy(table.copy()) for table in tables]

    def zero(self, band: int, units: Int32s) -> None:
        if self.lazy != "zero":
            reference.zero_units(self._data, torch.from_numpy(units.copy()), self._sizes[band])

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        if self.lazy != "copy":
            pair = torch.from_numpy(sources.copy()), torch.from_numpy(targets.copy())
            reference.copy_units(self._data, *pair, self._sizes[band])

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        reference.update_table(self._tables[band], torch.from_numpy(virtual.copy()), torch.from_numpy(physical.copy()))

    def to_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        if self.lazy != "to_host":
            self._pool.put(band, slots, self._view(band).numpy(), units)
        else:
            self._pool.fill(band, slots)

    def from_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        if self.lazy != "from_host":
            self._pool.get(band, slots, self._view(band).numpy(), units)

    def _view(self, band: int) -> Tensor:
        size = self._sizes[band]
        return self._data[: self._data.numel() // size * size].view(-1, size)


def run(shape: str, seed: int, lazy: str = "") -> Outcome:
    """One program with a streamed device on every rank."""
    units = type("Units", (HostUnits,), {"lazy": lazy})
    make = partial(StreamedDevice, machinery=host_machinery(units))
    return run_case(random_case(shape, 16, seed, 250), True, make, UNIT_SCALE)


@pytest.mark.parametrize("shape", ["full", "full+state", "full+window+state", "windows+state"])
def test_a_device_that_does_its_work_holds_what_the_model_holds(shape: str) -> None:
    """Forwards, host slots, transfers and the arena at the end are equal, on several seeds."""
    assert [run(shape, seed).fault for seed in range(3)] == [None] * 3


@pytest.mark.parametrize("lazy", ["zero", "copy", "to_host", "from_host"])
def test_a_device_that_leaves_work_out_is_found(lazy: str) -> None:
    """Each kind of work that is not done shows as bytes that differ from the model's."""
    for seed in range(40):
        fault = run("full+window+state", seed, lazy).fault
        if fault is not None:
            assert fault.check == "lost_write"
            assert "on real streams" in fault.text
            return
    pytest.fail(f"nothing missed {lazy}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the reason."""
    with pytest.raises(SystemExit) as ended:
        stress.main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "finds no CUDA GPU" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_programs_are_safe_on_a_gpu() -> None:
    """Real streams with delayed kernels hold what the model holds."""
    assert stress.main(["--device", "cuda", "--seeds", "0:2", "--ops", "100", "--page-sizes", "16"]) == 0
