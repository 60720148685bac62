"""Model directories: conversion of GGUF files, use in place, refusals that name what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from daemon.rank import convert
from daemon.rank.convert import embedded_gguf, main, prepare_model
from daemon.rank.errors import RankError, UnsupportedModel
from daemon.rank.facts import read_files
from daemon.rank.support import check_supported
from tests.rank.models import embedded_model, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("BANDMASTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_gguf(path: Path, architecture: str = "llama", without: str = "") -> Path:
    """A GGUF file of a random two-layer model with a byte-level vocabulary of 260 ids."""
    writer = gguf.GGUFWriter(str(path), architecture)
    hidden, inner, heads, vocab = 32, 64, 4, 260
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", *(f"t{index}" for index in range(1, vocab - 1))])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(3)
    chance = np.random.default_rng(4)
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,), "output": (vocab, hidden)}
    for layer in range(2):
        at = f"blk.{layer}."
        shapes |= {at + "attn_q": (hidden, hidden), at + "attn_k": (16, hidden), at + "attn_v": (16, hidden)}
        shapes |= {at + "attn_output": (hidden, hidden), at + "attn_norm": (hidden,), at + "ffn_norm": (hidden,)}
        shapes |= {at + "ffn_gate": (inner, hidden), at + "ffn_up": (inner, hidden), at + "ffn_down": (hidden, inner)}
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", chance.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_converted_once(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete directory, same tensors, one conversion; a changed file is converted anew; no leftovers."""
    source = tiny_gguf(tmp_path / "tiny.gguf")
    assert main([str(source)]) == 0
    printed = capsys.readouterr()
    directory = Path(printed.out.strip())
    assert "converting" in printed.err
    names = {file.name for file in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "generation_config.json" in names
    with safe_open(str(directory / "model.safetensors"), "pt") as weights:
        embed = weights.get_tensor("model.embed_tokens.weight")
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(source).tensors}
    assert np.array_equal(embed.numpy(), read["token_embd.weight"])

    def refuse(*_: object) -> None:
        raise AssertionError("converted a second time")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_convert", refuse)
        assert prepare_model(source) == directory
        assert prepare_model(source.parent) == directory
    os.utime(source, ns=(1, 1))
    assert prepare_model(source) != directory
    assert not list((cache / "models").glob(".building-*"))
    assert read_files(directory, "tiny", 0).eos_ids == [3]


def test_whoever_needs_no_weights_gets_none(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weight is read or written; text is cut the same, and a whole conversion serves too, but not the other way."""
    source = tiny_gguf(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_write_weights", None)
        assert main(["--without-weights", str(source)]) == 0
        light = Path(capsys.readouterr().out.strip())
    assert {file.suffix for file in light.iterdir()} <= {".json", ".jinja"}
    whole = prepare_model(source)
    assert (whole / "model.safetensors").is_file()
    assert prepare_model(source, weights=False) == whole
    assert (light / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    assert read_files(light, "tiny", 0).eos_ids == [3]


def test_a_failed_conversion_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    """A file without one of its tensors is refused by that tensor's name, and the cache stays empty."""
    source = tiny_gguf(tmp_path / "tiny.gguf", without="blk.1.ffn_up")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        prepare_model(source)
    assert [entry for entry in (cache / "models").iterdir() if entry.is_dir()] == []


SLOW = """
import sys, time
from pathlib import Path
from daemon.rank import convert

def build(source, target, weights):
    (target / "model.safetensors").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(60)

convert._convert = build
sys.exit(convert.main(sys.argv[1:]))
"""


def slow_converter(source: Path) -> subprocess.Popen[str]:
    """A converter in a process of its own, in the middle of its work."""
    command = [sys.executable, "-c", SLOW, str(source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(cache: Path, tmp_path: Path, number: int) -> None:
    """Either signal ends it with code 130, and what it was building is gone."""
    with slow_converter(tiny_gguf(tmp_path / "tiny.gguf")) as process:
        assert len(list((cache / "models").glob(".building-*"))) == 1
        process.send_signal(number)
        assert process.wait(20) == 130
    assert not list((cache / "models").glob(".building-*"))


def test_leftovers_of_a_killed_converter_are_swept(cache: Path, tmp_path: Path) -> None:
    """The next conversion removes what a killed one left, and nothing of one that lives."""
    with slow_converter(tiny_gguf(tmp_path / "dead.gguf")) as dead:
        dead.kill()
    with slow_converter(tiny_gguf(tmp_path / "alive.gguf", without="output")) as alive:
        (living,) = (cache / "models").glob(".building-*")
        assert prepare_model(tiny_gguf(tmp_path / "tiny.gguf")).is_dir()
        assert list((cache / "models").glob(".building-*")) == [living]
        alive.send_signal(signal.SIGINT)


def test_an_unknown_architecture_is_named(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GGUF of an architecture that nobody maps ends with one line that names it."""
    assert main([str(tiny_gguf(tmp_path / "odd.gguf", architecture="oddball"))]) == 1
    assert "oddball" in capsys.readouterr().err


def test_a_directory_is_used_in_place(cache: Path, tmp_path: Path) -> None:
    """A Hugging Face directory is returned as it is; without weights it is refused."""
    directory = tiny_model(tmp_path, "llama")
    assert prepare_model(directory) == directory
    assert not cache.exists()
    (directory / "model.safetensors").unlink()
    with pytest.raises(RankError, match="no \\*\\.safetensors"):
        prepare_model(directory)


def test_what_is_no_model_is_said(cache: Path, tmp_path: Path) -> None:
    """A missing path, an empty directory and a file of other content are told apart."""
    with pytest.raises(RankError, match="there is no model"):
        prepare_model(tmp_path / "nowhere")
    with pytest.raises(RankError, match=r"no config\.json and 0 GGUF"):
        prepare_model(tmp_path)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(RankError, match="is not a GGUF file"):
        prepare_model(tmp_path / "text.gguf")


@pytest.mark.model
def test_the_embedded_model_is_complete(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The default model: found without importing its package, its chat template and end token kept."""
    assert embedded_gguf().suffix == ".gguf"
    directory = embedded_model(tmp_path_factory.mktemp("cache"))
    files = read_files(directory, "smollm2", 0)
    assert (files.vocab_size, files.max_model_len, files.eos_ids) == (49152, 8192, [2])
    assert "im_start" in (directory / "chat_template.jinja").read_text()
    assert files.dtype == torch.float32
    assert read_files(directory, "", 0).name == embedded_gguf().stem
    cut = json.loads((directory / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert [step["type"] for step in cut] == ["Digits", "ByteLevel"]


# config class -> (fields, what the refusal must name)
REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "encoder and decoder": ("T5Config", {}, "encoder-decoder"),
    "no causal model": ("ViTConfig", {}, "no causal language model"),
    "latent attention": ("DeepseekV3Config", {}, "kv_lora_rank=512; latent"),
    "its own attention": ("BloomConfig", {}, "attention interface"),
    "quantized weights": ("LlamaConfig", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "rope by length": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 64},
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_by_what_is_missing(name: str) -> None:
    """Each refusal names the feature, from the config alone."""
    import transformers

    class_name, fields, text = REFUSED[name]
    config = getattr(transformers, class_name)(**fields)
    length = 128 if name == "rope by length" else 0
    with pytest.raises(UnsupportedModel, match=text or "set --max-model-len to at most 64"):
        check_supported(config, length)


def test_a_length_beyond_the_models_own_is_refused(tmp_path: Path) -> None:
    """Positions are never stretched."""
    directory = tiny_model(tmp_path, "llama")
    assert read_files(directory, "tiny", 100).max_model_len == 100
    with pytest.raises(RankError, match="max_model_len=257 is more than the model's 256"):
        read_files(directory, "tiny", 257)


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    """Several end ids in generation_config.json win over the config's one."""
    directory = tiny_model(tmp_path, "llama")
    assert read_files(directory, "tiny", 0).eos_ids == [1]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert read_files(directory, "tiny", 0).eos_ids == [4, 9]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp", "7"], "--tp 7"),
        (["--stages", "1,1"], "--pp-layers 1,1 adds up to 2, but the model has 3 layers"),
        (["--stages", "0,0,0,0"], "--pp 4: the model has 3 layers"),
        (["--stages", "5"], "--pp-layers 5 adds up to 5"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_from_the_config(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stdout, nothing else there, and a code of its own; layouts that can be give the directory."""
    directory = tiny_model(tmp_path / "tiny", "llama")
    assert main([*flags, str(directory)]) == convert.NO_SUCH_LAYOUT
    said = capsys.readouterr().out
    assert says in said
    assert said.count("\n") == 1
    assert main(["--tp", "2", "--stages", "1,2", str(directory)]) == 0
    assert capsys.readouterr().out.strip() == str(directory)
