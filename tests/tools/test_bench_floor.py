"""`bench floor` and `bench kernels`: which products the floor is made of, and the arithmetic of the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank.models import tiny_model
from tools import bench_floor, bench_kernels
from tools.bench_floor import CHUNK_TOKENS, Floor, group_of, row_of
from tools.bench_kernels import Case, batch_of
from tools.bench_kernels import row_of as kernel_row


def test_products_with_the_same_rows_are_joined() -> None:
    """Q, K, V and gate, up of one layer; nothing else."""
    layer = "model.layers.3."
    assert len({group_of(f"{layer}self_attn.{name}_proj.weight") for name in "qkv"}) == 1
    assert len({group_of(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")}) == 1
    others = [f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight", "model.layers.4.mlp.up_proj.weight"]
    assert len({group_of(name) for name in [*others, f"{layer}mlp.up_proj.weight"]}) == 4


@pytest.mark.parametrize("name", ["llama", "llama-tied-bias"])
def test_the_floor_reads_every_weight_once(tmp_path: Path, name: str) -> None:
    """Its bytes are those of all layers' matrices and of one head, whether that is tied to the embedding or not."""
    directory = tiny_model(tmp_path, name)
    config = json.loads((directory / "config.json").read_text())
    hidden, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    stored = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    per_layer = 2 * hidden * hidden + 2 * hidden * stored + 3 * hidden * wide
    floor = Floor(directory, torch.float32)
    assert floor.weight_bytes == 4 * (per_layer * config["num_hidden_layers"] + hidden * vocabulary)


def test_a_load_is_its_prompts_in_chunks_and_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token goes through the layers once, the head only where a token comes out."""
    floor = Floor(tiny_model(tmp_path, "llama"), torch.float32)
    passes: list[tuple[int, int]] = []

    def seconds(tokens: int, heads: int, threads: object = ()) -> float:
        passes.append((tokens, heads))
        return tokens * 1.0 + heads * 100.0

    monkeypatch.setattr(floor, "seconds", seconds)
    took = floor.load_seconds(32, 128, 64)
    assert passes == [(CHUNK_TOKENS, 0), (32, 32)]
    assert took == 2 * CHUNK_TOKENS + 64 * (32 + 3200)
    passes.clear()
    floor.load_seconds(1, 128, 64)
    assert passes == [(128, 0), (1, 1)]


def test_figures_of_the_floor(tmp_path: Path) -> None:
    """Medians over rounds, in ms, the share and the rate of reading."""
    floor = Floor(tiny_model(tmp_path, "llama"), torch.float32)
    floor.threads[8] = 2
    floor.weight_bytes = 3_000_000
    row = row_of(8, floor, "float32", 1, [0.001, 0.009, 0.003], [0.004, 0.005, 0.006])
    assert (row["floor_ms"], row["step_ms"], row["floor_share"]) == (3.0, 5.0, 0.6)
    assert (row["floor_gb_s"], row["floor_threads"], row["threads"]) == (1.0, 2, 1)
    assert row["rounds"] == [[1.0, 4.0], [9.0, 5.0], [3.0, 6.0]]


def test_the_floor_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows for programs, of a tiny model; a missing model is one line."""
    model = str(tiny_model(tmp_path, "llama"))
    options = ["--model", model, "--dtype", "float32", "--concurrency", "1", "3", "--tokens", "3", "--rounds", "1"]
    assert bench_floor.main([*options, "--prompt-tokens", "5", "--threads", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["concurrency"] for row in rows] == [1, 3]
    assert all(row["floor_share"] > 0 and row["dtype"] == "float32" for row in rows)
    assert bench_floor.main(["--model", str(tmp_path / "nowhere")]) == 1
    assert "there is no model" in capsys.readouterr().err


def test_figures_of_a_kernel() -> None:
    """Rates are of what must be moved and done, over the median."""
    case = Case("copy", "", "memcpy", lambda: None, 4_000_000, 6_000_000)
    row = kernel_row(case, [0.001, 0.004, 0.002])
    assert (row["us"], row["gb_s"], row["gflop_s"]) == (2000.0, 2.0, 3.0)
    assert kernel_row(case._replace(flops=0), [0.001])["gflop_s"] is None


def test_batches_of_kernels_list_what_a_window_sees() -> None:
    """Pages are distinct, the sink is not among them, and a window lists only its own."""
    full, seen = batch_of([(99, 1), (0, 20)], 0).bands[0], batch_of([(99, 1), (0, 20)], 32).bands[0]
    assert full is not None
    assert seen is not None
    assert full.tables.shape == (2, 7)
    assert sorted(full.tables[full.tables > 0].tolist()) == list(range(1, 10))
    assert seen.first.tolist() == [4, 0]
    assert seen.tables.shape == (2, 3)
    assert seen.write_pages[0] == seen.tables[0, 2]


@pytest.mark.parametrize("only", ["Mamba-2", "gated delta", "convolution", "attention"])
def test_the_kernels_command(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind runs at its stated shapes, beside the measured copy and product."""
    options = ["--device", "cpu", "--rounds", "1", "--threads", "1", "--dtype", "float32", "--heads", "2", "1", "16"]
    assert bench_kernels.main([*options, "--only", only, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kernel"] for row in rows[:2]] == ["copy", "product"]
    assert {row["kernel"] for row in rows[2:]} == {only}
    assert all(row["us"] > 0 and row["gb_s"] > 0 for row in rows)


def test_sampling_and_units_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest of the kernels."""
    names = ["sampling", "zero units", "copy units"]
    assert bench_kernels.main(["--device", "cpu", "--rounds", "1", "--only", *names]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
