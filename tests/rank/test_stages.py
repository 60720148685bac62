"""Pipeline stages of real models: the same tokens as one stage, and only what a stage needs in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon.rank.errors import StepRefused, UnsupportedModel
from daemon.rank.layout import Layout
from daemon.rank.stages import StagePart, layers_path, skeleton
from daemon.rank.torch_runner import TorchRunner
from ipc.messages import RankSettings, RowLogprobs, Sampling
from tests.rank.models import tiny_model
from tools.group_driver import GroupDriver
from tools.rank_driver import Driver, settings

# One of each way in which families differ: native, tied, bias, windows, sinks, layers that return pairs, layers of an
# MLP alone, K/V and state in one layer, all three kinds, scaled embeddings, experts.
FAMILIES = [
    ("llama", [1, 2]),
    ("qwen2", [2, 1]),
    ("granite", [1, 1, 1]),
    ("gemma2", [3, 1]),
    ("gpt_oss", [1, 3]),
    ("bamba", [2, 2]),
    ("nemotron_h", [2, 2, 2]),
    ("falcon_h1", [1, 2]),
    ("lara_mini", [2, 3]),
    ("lfm3", [2, 1, 2]),
    ("qwen3_moe", [2, 1]),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module are saved."""
    return tmp_path_factory.mktemp("stages")


def config_of(directory: Path, **changes: object) -> RankSettings:
    """A torch rank in float32, with a small arena and every invariant checked."""
    values: dict[str, object] = {"runner": "torch", "dtype": "float32", "arena_bytes": 8 << 20}
    return settings(model_path=str(directory), **(values | changes))


def program(driver: Driver, seed: int) -> list[list[int]]:
    """Three rows in one batch: chunks of random sizes, decodes, one row after the other's end; their outputs."""
    rng = random.Random(seed)
    prompts = {row: [rng.randrange(2, 200) for _ in range(length)] for row, length in ((0, 33), (1, 6), (2, 19))}
    given = dict.fromkeys(prompts, 0)
    for row in prompts:
        driver.start(row)
    for _ in range(16):
        work: list[tuple[int, list[int] | None, bool]] = []
        for row, prompt in prompts.items():
            left = len(prompt) - given[row]
            size = min(left, rng.randrange(1, 12))
            part = prompt[given[row] : given[row] + size] if left else None
            given[row] += size
            work.append((row, part, given[row] == len(prompt)))
        driver.step(work)
    outputs = [driver.rows[row].tokens[len(prompt) :] for row, prompt in prompts.items()]
    for row in prompts:
        driver.end(row)
    driver.step([])  # checks that nothing is left
    return outputs


@pytest.mark.parametrize(("name", "layers"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_stages_give_the_tokens_of_one_stage(place: Path, name: str, layers: list[int]) -> None:
    """Uneven stages, also without full attention or without anything stored; every report's digests agree."""
    directory = tiny_model(place, name)
    one = Driver(config_of(directory), TorchRunner(config_of(directory)))
    several = GroupDriver(config_of(directory, stage_layers=layers), len(layers))
    for seed in (1, 2):
        outputs = program(several, seed)
        assert outputs == program(one, seed)
        assert len({token for output in outputs for token in output}) > 5
    bands = [[(band.name, band.unit_bytes > 0) for band in stage.bands] for stage in several.geometry.stages]
    assert len({tuple(name for name, _ in stage) for stage in bands}) == 1, "every stage has the same bands in order"


def test_a_stage_without_full_attention_still_has_the_owner_band(place: Path) -> None:
    """granitemoehybrid's last layers keep states only: their stage's full band has no bytes, and it serves."""
    directory = tiny_model(place, "granitemoehybrid")
    driver = GroupDriver(config_of(directory, stage_layers=[2, 2]), 2)
    sizes = [{band.name: band.unit_bytes for band in stage.bands} for stage in driver.geometry.stages]
    assert sizes[0]["full"] > 0
    assert sizes[1]["full"] == 0
    assert sizes[1]["state"] > 0
    one = Driver(config_of(directory), TorchRunner(config_of(directory)))
    assert program(driver, 3) == program(one, 3)


def test_sampling_and_log_probabilities_come_from_the_last_stage_as_from_one(place: Path) -> None:
    """A drawn row with penalties and a row that reports its prompt: values of the same bits, each position once."""
    directory = tiny_model(place, "llama")
    drawn = Sampling(temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=2)
    asking = Sampling(temperature=0.0, seed=0, logprobs=1, prompt_logprobs=2)
    found: list[tuple[list[int], list[int], list[RowLogprobs]]] = []
    for driver in (
        Driver(config_of(directory), TorchRunner(config_of(directory))),
        GroupDriver(config_of(directory), 3),
    ):
        prompt = list(range(20, 43))
        more: dict[str, Any] = {"prompt_ids": torch.tensor(prompt).numpy().tobytes()}
        drawn_tokens = driver.generate(0, prompt, 12, 9, sampling=drawn, **more)
        asked_tokens = driver.generate(1, prompt, 6, 9, sampling=asking)
        found.append((drawn_tokens, asked_tokens, [entry for report in driver.reports for entry in report.logprobs]))
    assert found[0] == found[1]
    prompts = [entry for entry in found[1][2] if entry.prompt_position >= 0]
    assert sum(len(entry.values.chosen) // 4 for entry in prompts) == 22, "every prompt position but the first, once"


def test_foreign_weights_have_no_memory(place: Path) -> None:
    """A middle stage holds its layer, but neither the others, nor the embeddings, nor the head."""
    directory = tiny_model(place, "qwen3_moe")
    driver = GroupDriver(config_of(directory), 3)
    held = []
    for runner in driver.runners:
        model = runner._model._model  # type: ignore[attr-defined]
        held.append({name for name, tensor in model.named_parameters() if not tensor.is_meta and tensor.ndim > 1})
    # Packed linear layers keep a placeholder; experts and embeddings do not.
    assert [sorted(name for name in names if "experts" in name or "embed" in name) for names in held] == [
        ["model.embed_tokens.weight", *experts(0)],
        experts(1),
        experts(2),
    ]


def experts(layer: int) -> list[str]:
    """The stacked experts of a layer."""
    return [f"model.layers.{layer}.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_where_tokens_or_a_tied_head_need_them(tmp_path: Path, tied: bool) -> None:
    """The first stage embeds, the last has the head, which tied embeddings are; the middle one has neither."""
    directory = tiny_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    bare = skeleton(directory)
    names = [name for name, _ in bare.named_parameters()] + ["lm_head.weight"]
    parts = [StagePart(bare, range(stage, stage + 1), Layout(stage, 3, 0, 1)) for stage in range(3)]
    outside = {"model.embed_tokens.weight", "lm_head.weight"}
    kept = [sorted(name for name in set(names) & outside if not part.foreign(name)) for part in parts]
    assert kept == [
        ["lm_head.weight", "model.embed_tokens.weight"] if tied else ["model.embed_tokens.weight"],
        [],
        ["lm_head.weight", "model.embed_tokens.weight"] if tied else ["lm_head.weight"],
    ]
    for stage, part in enumerate(parts):
        own = {name.split(".")[2] for name in names if name.startswith("model.layers") and not part.foreign(name)}
        assert own == {str(stage)}


def test_a_model_whose_layers_are_no_one_list_is_refused() -> None:
    """Two lists of the model's length: which one has the layers is not guessed."""
    bare = torch.nn.Module()
    bare.config = type("Config", (), {"num_hidden_layers": 2, "model_type": "twins"})()
    bare.one = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    bare.other = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    with pytest.raises(UnsupportedModel, match="twins: its 2 layers cannot be told apart"):
        layers_path(bare)


def test_a_row_cannot_go_on_from_a_token_that_the_first_stage_does_not_have(place: Path) -> None:
    """A decode step that does not bring its token is refused, by name of the row, with several stages."""
    directory = tiny_model(place, "llama")
    driver = GroupDriver(config_of(directory), 2)
    driver.start(4)
    driver.step([(4, [7, 8, 9], True)])
    step = Driver.make(driver, [(4, None, True)])
    with pytest.raises(StepRefused, match="row 4 goes on from its last sampled token"):
        driver.launch(step)
