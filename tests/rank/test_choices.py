"""What a rank chooses at boot: dtype, threads, model definition, arena size; and the options it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from allocator.decl import MHA, Full, Layer, Part
from daemon.rank.backend import open_backend
from daemon.rank.dtypes import choose_dtype, cpu_flags
from daemon.rank.errors import BadOption, RankError, UnsupportedModel
from daemon.rank.facts import read_files
from daemon.rank.model_choice import load_model
from daemon.rank.products import Product, can_pack
from daemon.rank.runner import open_runner
from daemon.rank.sizes import budget_bytes, plan_and_size
from daemon.rank.threads import best_count, candidates, choose_threads
from tests.rank.models import tiny_model
from tools.rank_driver import Driver, settings

CPU = torch.device("cpu")

# asked, checkpoint, device, flags -> dtype
DTYPES = [
    ("auto", torch.float32, "cpu", {"avx512f"}, torch.float32),
    ("auto", torch.bfloat16, "cpu", {"avx2"}, torch.float32),
    ("auto", torch.float32, "cpu", {"avx512_bf16"}, torch.bfloat16),
    ("auto", torch.float16, "cpu", {"amx_bf16"}, torch.bfloat16),
    ("auto", torch.float16, "cuda", set(), torch.float16),
    ("auto", torch.float32, "cuda", set(), torch.bfloat16),
    ("float32", torch.bfloat16, "cpu", {"avx512_bf16"}, torch.float32),
]


@pytest.mark.parametrize("row", DTYPES, ids=lambda row: f"{row[0]}-{row[2]}-{'-'.join(sorted(row[3])) or 'none'}")
def test_dtype_by_what_the_machine_multiplies(
    row: tuple[str, torch.dtype, str, set[str], torch.dtype],
) -> None:
    """bfloat16 on a CPU only with the instructions for it; what is asked for always wins."""
    asked, checkpoint, device, flags, want = row
    dtype, why = choose_dtype(asked, checkpoint, device, flags)
    assert (dtype, bool(why)) == (want, True)


def test_cpu_flags_are_read_from_the_kernel(tmp_path: Path) -> None:
    """The first core's flags; nothing where there is no such file."""
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor : 1\nflags : fpu\n")
    assert cpu_flags(file) == {"fpu", "avx2", "avx512_bf16"}
    assert cpu_flags(tmp_path / "none") == set()


def test_threads_leave_a_core_and_must_pay() -> None:
    """Powers of two below cores - 1; a higher count only for a real gain."""
    assert [candidates(cores) for cores in (1, 2, 3, 4, 8)] == [[1], [1], [1, 2], [1, 2, 3], [1, 2, 4, 7]]
    assert best_count({1: 100.0, 2: 97.0, 4: 60.0, 7: 59.0}) == 4
    assert best_count({1: 50.0, 2: 80.0}) == 1


def test_threads_are_measured_or_fixed() -> None:
    """The work is run at both batch sizes for every count; a fixed count is not measured."""
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        count, measured = choose_threads(0, seen.append)
        assert torch.get_num_threads() == count
        assert set(seen) == {1, 16}
        assert set(measured) >= {1}
        seen.clear()
        assert choose_threads(1, seen.append) == (1, {})
        assert not seen
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_products_mean_the_same(dtype: torch.dtype, rows: int) -> None:
    """A packed product equals the plain one to rounding, with and without bias."""
    chance = torch.Generator().manual_seed(rows)
    weight = torch.randn(70, 33, generator=chance).to(dtype)
    x = torch.randn(rows, 33, generator=chance).to(dtype)
    bias = torch.randn(70, generator=chance).to(dtype)
    for given in (None, bias):
        want = torch.nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        torch.testing.assert_close(Product(weight, given)(x).double(), want, atol=0.1, rtol=2e-2)
    assert not can_pack(weight.to(torch.float16))


def test_native_or_generic(tmp_path: Path) -> None:
    """`native` refuses a family it does not cover, `auto` falls back, an unknown name is refused."""
    phi = read_files(tiny_model(tmp_path, "phi3"), "phi", 0)
    with pytest.raises(UnsupportedModel, match="'phi3' is not one of"):
        load_model(phi, torch.float32, CPU, "native")
    assert load_model(phi, torch.float32, CPU, "auto")[0].name == "generic"
    with pytest.raises(BadOption, match="model_impl='fast'"):
        load_model(phi, torch.float32, CPU, "fast")
    llama = read_files(tiny_model(tmp_path, "llama"), "llama", 0)
    native = load_model(llama, torch.float32, CPU, "auto")[0]
    generic = load_model(llama, torch.float32, CPU, "generic")[0]
    assert native.layers == generic.layers == [Layer((Part(MHA(2, 8, 8, "float32"), Full()),))] * 3


def test_weights_must_be_complete(tmp_path: Path) -> None:
    """A directory without one tensor is refused by its name."""
    from safetensors.torch import load_file, save_file

    directory = tiny_model(tmp_path, "llama")
    weights = load_file(directory / "model.safetensors")
    weights.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(RankError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(read_files(directory, "llama", 0), torch.float32, CPU, "native")


def test_the_budget_is_given_or_a_share() -> None:
    """`arena_bytes` wins; else parts per million of what is free. Too little is refused with the table."""
    assert budget_bytes(settings(arena_bytes=77), 1000) == 77
    assert budget_bytes(settings(arena_bytes=0, mem_fraction_ppm=250_000), 1000) == 250
    with pytest.raises(RankError, match="floor: full"):
        plan_and_size([Layer((Part(MHA(2, 64, 64, "bfloat16"), Full()),))], settings(page_size=16), 512, 4096)


def test_unknown_runners_ranks_and_options_are_refused() -> None:
    """Every one by name."""
    with pytest.raises(RankError, match="'magic'"):
        open_runner(settings(runner="magic"), 0, 0)
    with pytest.raises(BadOption, match="stage 1"):
        open_runner(settings(runner="torch"), 1, 0)
    with pytest.raises(BadOption, match="'turbo'"):
        open_runner(settings(runner="torch", options={"turbo": "1"}), 0, 0)
    with pytest.raises(BadOption, match="device='tpu'"):
        open_runner(settings(runner="torch", options={"device": "tpu"}), 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    """`cuda` is refused without one, `auto` takes the CPU."""
    with pytest.raises(BadOption, match="finds no CUDA GPU"):
        open_backend("cuda")
    assert open_backend("auto").torch_device == CPU


def test_facts_and_versions_of_a_real_model(tmp_path: Path) -> None:
    """`Ready` names the architecture, the lengths, what was chosen and why."""
    config = settings(
        runner="torch", model_path=str(tiny_model(tmp_path, "qwen3")), max_model_len=64, arena_bytes=1 << 20, threads=1
    )
    prepared = Driver(config).prepared
    assert prepared.facts.architecture == "Qwen3ForCausalLM"
    assert (prepared.facts.vocab_size, prepared.facts.max_model_len, prepared.facts.eos_ids) == (211, 64, [1])
    assert prepared.versions["model"] == "native qwen3"
    assert prepared.versions["dtype"].startswith(prepared.facts.dtype)
    assert prepared.table
