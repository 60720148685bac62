"""`bandmaster plan`: stages, budgets, mixes, tables, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from daemon.rank.convert import quiet_transformers
from tests.rank.models import tiny_model
from tools import cli, plan
from tools.planning.described import count_parameters, describe_model, read_config
from tools.planning.show import ranges
from tools.rank_driver import Driver, settings

PUBLISHED = Path(__file__).parent / "published"
ARENA = ("--arena-bytes", "8GiB")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The plan as plain values."""
    assert plan.main([*map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said of arguments that cannot be planned; nothing goes to stdout."""
    assert plan.main([*map(str, arguments)]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("bandmaster plan: ")
    return shown.err


def published(name: str) -> Path:
    """A published config."""
    return PUBLISHED / f"{name}.config.json"


def changed(tmp_path: Path, name: str, **fields: object) -> Path:
    """A published config with some fields changed."""
    config = json.loads(published(name).read_text()) | fields
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3_text", "nemotron_h", "falcon_h1", "lara_mini"])
@pytest.mark.parametrize("interval", [0, 256])
def test_a_plan_is_what_a_rank_finds_at_boot(
    name: str, interval: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The geometry, id limits and the table of a real rank with the same settings, figure for figure."""
    directory = tiny_model(tmp_path, name)
    asked = settings(
        runner="torch", model_path=str(directory), arena_bytes=16 << 20, dtype="float32", threads=1, page_size=16,
        max_running_requests=4, max_batched_tokens=64, max_model_len=200, checkpoint_interval=interval,
    )  # fmt: skip
    booted = Driver(asked).prepared
    flags = ["--arena-bytes", 16 << 20, "--dtype", "float32", "--max-running-requests", 4, "--max-batched-tokens", 64]
    caching = [] if interval else ["--no-enable-prefix-caching"]
    document = run(capsys, directory, *flags, "--max-model-len", 200, *caching)
    (stage,) = document["stages"]
    mine = (stage["arena_bytes"], stage["chain_start_bytes"], [(b["band"], b["unit_bytes"]) for b in stage["bands"]])
    found = booted.geometry
    assert mine == (found.arena_bytes, found.chain_start_bytes, [(b.name, b.unit_bytes) for b in found.bands])
    assert (document["virtual_pages"], document["virtual_slots"]) == (booted.virtual_pages, booted.virtual_slots)
    for row in document["requests"]:
        said = f"requests of {row['tokens']:,d} tokens at once: {row['at_once']:,d}"
        assert said in booted.table or row["tokens"] != 200


def test_a_stage_without_full_attention_keeps_its_owner(capsys: pytest.CaptureFixture[str]) -> None:
    """Bamba's first nine layers hold state only: the owner is listed with no bytes, and the other stage limits."""
    document = run(capsys, published("bamba-9b"), "--arena-bytes", "8GiB", "--pp", 2, "--pp-layers", "9,23")
    first, second = document["stages"]
    assert [(b["band"], len(b["layers"])) for b in first["bands"]] == [("state", 9), ("full", 0)]
    assert first["bands"][1]["unit_bytes"] == 0
    assert [(b["band"], b["layers"][:3]) for b in second["bands"]] == [("state", [10, 11, 12]), ("full", [9, 18, 27])]
    assert {row["runs_out_first"]["stage"] for row in document["requests"]} == {1}


def test_the_budget_is_a_share_of_what_the_weights_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are counted from the config or given, spread over the ranks; the rest times the fraction is the arena."""
    directory = tiny_model(tmp_path, "qwen3_next")
    config = read_config(directory)
    quiet_transformers()
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM
    real = sum(p.numel() for p in model.from_pretrained(directory).parameters())
    assert count_parameters(config) == real
    memory = ["--mem-fraction", 0.25, "--device-memory-bytes", "64MiB"]
    document = run(capsys, directory, *memory, "--dtype", "bfloat16")
    assert document["budget_bytes"] == ((64 << 20) - 2 * real) // 4
    assert f"{real:,d} parameters of the config in bfloat16" in document["budget_from"]
    document = run(capsys, directory, *memory, "--weights-bytes", "32MiB", "--tp", 2, "--pp", 2)
    assert document["budget_bytes"] == (56 << 20) // 4
    here = run(capsys, directory, "--mem-fraction", 0.01)
    assert "free now on this machine's" in here["budget_from"]
    text = refusal(capsys, directory, *memory, "--weights-bytes", "64MiB")
    assert "take 67,108,864 bytes" in text
    assert "raise --tp or --pp" in text


def mix_file(tmp_path: Path, *lines: dict[str, object]) -> Path:
    """A mix of these lines."""
    file = tmp_path / "mix.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    return file


def test_a_mix_of_one_kind_is_a_request_of_its_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt and output but the last token are stored: as many at once, the same bytes, the same limit."""
    mix = mix_file(tmp_path, {"prompt_tokens": 2000, "output_tokens": 49})
    document = run(capsys, published("lara-mini"), "--arena-bytes", "4GiB", "--lengths", "2024,2048", "--mix", mix)
    by_tokens = {row["tokens"]: row for row in document["requests"]}
    longest, midway = document["mix"]["moments"]
    for moment, row in ((longest, by_tokens[2048]), (midway, by_tokens[2024])):
        assert moment["at_once"] == row["at_once"] > 0
        assert moment["runs_out_first"] == row["runs_out_first"]
        each = row["total_bytes"] + row["checkpoint_bytes"]
        assert moment["total_bytes"] == moment["at_once"] * each


def test_a_mix_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mistral, 2 MiB a page in 3 GiB: three of four requests hold 10 pages, the fourth 40, of which 32 are shared."""
    mix = mix_file(
        tmp_path,
        {"prompt_tokens": 160, "output_tokens": 1, "weight": 1.5},
        {"prompt_tokens": 640, "output_tokens": 1, "weight": 0.5, "shared_prefix_tokens": 512},
    )
    document = run(capsys, published("mistral-7b-v0.1"), "--arena-bytes", "3GiB", "--mix", mix)
    assert document["stages"][0]["bands"][0]["unit_bytes"] == 2 << 20
    longest, midway = document["mix"]["moments"]
    assert midway | {"moment": ""} == longest | {"moment": ""}
    # 1,536 pages less the sink are 1,535, less 32 shared; a request has 10 * 3/4 + 8 * 1/4 = 9.5 of its own: 158.2.
    assert longest["at_once"] == 158
    assert longest["shared_units"] == {"window:4096": 32, "full": 32}
    assert longest["units"] == {"window:4096": 1501 + 32, "full": 1501 + 32}
    assert longest["runs_out_first"] == {"stage": 0, "band": "window:4096"}
    document = run(
        capsys, published("mistral-7b-v0.1"), "--arena-bytes", "3GiB", "--mix", mix, "--no-enable-prefix-caching"
    )
    # Nothing is shared without the cache: 10 * 3/4 + 40 * 1/4 = 17.5 each, 87.7.
    assert document["mix"]["moments"][0]["at_once"] == 87


def test_a_shared_state_is_kept_on_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With state a prefix is shared up to a checkpoint: 700 tokens share 512, with one slot and the window there."""
    mix = mix_file(tmp_path, {"prompt_tokens": 900, "output_tokens": 10, "shared_prefix_tokens": 700})
    document = run(capsys, published("lara-mini"), "--arena-bytes", "4GiB", "--mix", mix)
    shared = document["mix"]["moments"][0]["shared_units"]
    assert shared == {"state": 1, "window:512": 32, "full": 32}


def test_pages_of_one_token_hold_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without rounding to pages a request holds what its next token reads, and the alignment of units."""
    document = run(capsys, published("lfm3-1.7b"), *ARENA, "--page-size", 1, "--no-enable-prefix-caching")
    assert [row["held_bytes"] for row in document["held_over_needed"]] == [
        row["needed_bytes"] for row in document["held_over_needed"]
    ]


BAD_MIX = [
    ("", "has no lines"),
    ("{", "line 1 is no JSON"),
    ("[1]", "line 1 is no JSON object"),
    ('\n{"prompt_tokens": 5}', "line 2 lacks output_tokens"),
    ('{"prompt_tokens": 5, "output_tokens": 0}', "output_tokens must be a whole number from 1 to 131067, not 0"),
    ('{"prompt_tokens": 131072, "output_tokens": 1}', "prompt_tokens must be a whole number from 1 to 131071"),
    ('{"prompt_tokens": 5.5, "output_tokens": 1}', "prompt_tokens must be a whole number from 1 to 131071, not 5.5"),
    ('{"prompt_tokens": true, "output_tokens": 1}', "not True"),
    (
        '{"prompt_tokens": 5, "output_tokens": 1, "weight": 0}',
        "weight must be a number above 0 and at most 1e+12, not 0",
    ),
    ('{"prompt_tokens": 5, "output_tokens": 1, "weight": NaN}', "weight must be a number above 0"),
    ('{"prompt_tokens": 5, "output_tokens": 1, "weight": 1e400}', "at most 1e+12, not a number beyond 1.79769e+308"),
    ('{"prompt_tokens": 5, "output_tokens": 1, "shared_prefix_tokens": 6}', "whole number from 0 to 5, not 6"),
    ('{"prompt_tokens": 5, "output_tokens": 1, "users": 6}', "unknown field 'users'"),
]


@pytest.mark.parametrize(("text", "said"), BAD_MIX, ids=[said[-28:] for _, said in BAD_MIX])
def test_a_bad_mix_is_refused_with_its_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """File, line, field, limit and value."""
    file = tmp_path / "mix.jsonl"
    file.write_text(text)
    assert said in refusal(capsys, published("lara-mini"), "--arena-bytes", "4GiB", "--mix", file)


BAD = [
    (("/no/such/place", *ARENA), "'/no/such/place' does not exist"),
    ((PUBLISHED, *ARENA), "config.json does not exist"),
    ((PUBLISHED / "README.md", *ARENA), "is no JSON file"),
    ((published("bamba-9b"), *ARENA, "--tp", "3"), "cannot be split over tp=3; tp may be 1, 2, 4"),
    ((published("bamba-9b"), *ARENA, "--tp", "0"), "--tp: '0' is not a whole number from 1 on"),
    ((published("bamba-9b"), *ARENA, "--pp", "33"), "--pp may be 1 to 32"),
    (
        (published("bamba-9b"), *ARENA, "--pp", "2", "--pp-layers", "16,15"),
        "adds up to 31, but the model has 32 layers",
    ),
    ((published("bamba-9b"), *ARENA, "--pp-layers", "a"), "--pp-layers: 'a' is not"),
    ((published("gemma-2-9b"), *ARENA, "--max-model-len", "9000"), "more than the model's 8192 positions"),
    ((published("gemma-2-9b"), *ARENA, "--page-size", "0"), "page-size"),
    ((published("bamba-9b"), *ARENA, "--pp-layers", "16,16"), "names 2 stages, but --pipeline-parallel-size is 1"),
    ((published("gemma-2-9b"), *ARENA, "--lengths", "512,x"), "--lengths: 'x' is not"),
    ((published("bamba-9b"), *ARENA, "--checkpoint-interval", "100"), "is no multiple of --page-size 16"),
    ((published("falcon-h1-34b"), "--arena-bytes", "256MiB"), "stage 0: the memory budget of 268,435,456 bytes is"),
    ((published("bamba-9b"), "--mem-fraction", "0.5", "--device-memory-bytes", "much"), "'much' is no size"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said[:30] for _, said in BAD])
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the reason with limit and value, and no table."""
    assert said in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "no_such_model"}, "model_type 'no_such_model' is not one that transformers knows"),
        ({"model_type": "jamba"}, "the recurrent state of this family is not implemented"),
        ({"num_attention_heads": "many"}, "cannot be made of these fields"),
        ({"mamba_d_conv": 1}, "a convolution of width 1"),
    ],
)
def test_configs_that_say_nothing_usable_are_refused(
    fields: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown families, refused ones, wrong fields."""
    assert said in refusal(capsys, changed(tmp_path, "bamba-9b", **fields), *ARENA)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "is no JSON object; give"),
        ("{}", "has no model_type; give"),
        ("[" * 100_000, "is nested too deeply; give"),
    ],
)
def test_files_that_are_no_config_are_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named for what they lack."""
    (tmp_path / "config.json").write_text(text)
    assert said in refusal(capsys, tmp_path, *ARENA)


def test_defaults_of_the_library_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields that a file leaves out are named with what is planned instead; a whole config has no such note."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 4096, "max_position_embeddings": 8192}))
    (note,) = [note for note in run(capsys, file, *ARENA)["notes"] if "defaults" in note]
    said = "the config does not say num_hidden_layers 32, num_attention_heads 32: these are defaults of transformers"
    assert note == f"{said} for llama"
    for path in Path(__file__).with_name("published").glob("*.config.json"):
        assert not any("defaults" in note for note in describe_model(str(path), "auto", 0, 0, 1).notes), path


def test_what_serve_would_refuse_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantized checkpoint and a model with images are planned, with the words of the refusal at boot."""
    file = changed(tmp_path, "gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})
    notes = run(capsys, file, *ARENA)["notes"]
    assert any("serve refuses this model: gpt_oss: quantization_config" in note for note in notes)
    text = json.loads(published("gemma-3-27b").read_text())
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "dtype": "bfloat16"}))
    document = run(capsys, file, *ARENA)
    assert any("images or audio" in note for note in document["notes"])
    assert document["model_type"] == "gemma3_text"
    assert document["stages"] == run(capsys, published("gemma-3-27b"), *ARENA)["stages"]


def test_S6_more_requests_than_slots_are_said_with_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded: how many are allowed, how many memory holds, and the largest value that works."""
    document = run(capsys, published("falcon-h1-34b"), *ARENA, "--max-running-requests", 100)
    (note,) = [note for note in document["notes"] if "max-running-requests" in note]
    most = int(note.partition("at most ")[2].partition(" ")[0])
    assert note.startswith("--max-running-requests 100 is more than memory holds")
    assert f"--max-running-requests {most} is the largest" in note
    assert not [
        one
        for one in run(capsys, published("falcon-h1-34b"), *ARENA, "--max-running-requests", most)["notes"]
        if "max-running-requests" in one
    ]
    (state,) = [band for band in document["stages"][0]["bands"] if band["band"] == "state"]
    assert state["target_units"] < state["wanted_units"] == 200


def test_P2_an_interval_beyond_the_context_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that no sequence reaches: reuse cannot occur, and why."""
    arguments = (published("bamba-9b"), *ARENA, "--max-model-len", 4096, "--checkpoint-interval")
    assert any("no request can reuse a cached prefix" in note for note in run(capsys, *arguments, 8192)["notes"])
    assert not any("reuse a cached prefix" in note for note in run(capsys, *arguments, 1024)["notes"])


def test_runs_of_layers_are_joined() -> None:
    """Nothing, one, runs and gaps."""
    assert [ranges(numbers) for numbers in ([], [4], [0, 1, 2], [0, 2, 3, 9])] == ["", "4", "0-2", "0, 2-3, 9"]


def test_the_tables_align(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of a table is as wide as its frame, no cell is cut off, and the figures are those of --json."""
    mix = mix_file(tmp_path, {"prompt_tokens": 1000, "output_tokens": 200, "shared_prefix_tokens": 512, "weight": 2})
    arguments = [str(published("lara-mini")), *ARENA, "--pp", "2", "--tp", "2", "--mix", str(mix)]
    document = run(capsys, *arguments)
    assert cli.main(["plan", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    tables = 0
    for index, line in enumerate(lines):
        if line.startswith("┏"):
            tables += 1
            end = next(i for i in range(index, len(lines)) if lines[i].startswith("└"))
            assert {len(one) for one in lines[index : end + 1]} == {len(line)}
    assert tables == 6
    text = "\n".join(lines)
    assert "stage 0, full: layers 3, 8, 13\n" in text
    for row in document["requests"]:
        assert re.search(rf"│ +{row['tokens']:,d} │ +{row['at_once']:,d} │", text)
    for row in document["held_over_needed"]:
        assert f"{row['needed_bytes']:,d}" in text
        assert f"{row['ratio']:.4f}" in text
