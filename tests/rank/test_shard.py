"""Parts of weights: every element is in one part, what is read is what is kept, and nothing foreign has memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from daemon.rank.errors import UnsupportedModel
from daemon.rank.layout import SOLO, Layout
from daemon.rank.mixers.table import MIXERS
from daemon.rank.shard.cuts import Block, Once, Part, Take, rows_of, share, spread
from daemon.rank.shard.load import NO_READ_AHEAD, load_parts
from daemon.rank.shard.recurrent import RECURRENT
from daemon.rank.shard.vocabulary import vocabulary_cut
from daemon.rank.weights import Weights
from tests.rank.models import tiny_model


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 7, 64, 80, 96, 250, 11008])
def test_spread_units_are_each_in_one_part(count: int, ranks: int) -> None:
    """Parts of a hidden layer follow each other without gap or overlap, and differ by less than a piece."""
    parts = [spread(count, Part(rank, ranks)) for rank in range(ranks)]
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == count
    sizes = [end - start for start, end in parts]
    assert max(sizes) - min(sizes) <= 64
    if count % ranks == 0 and count % 16 == 0 and count // ranks % 8 == 0:
        assert set(sizes) == {count // ranks}


def test_shared_units_follow_the_heads_that_read_them() -> None:
    """With fewer groups than ranks, the one group of a rank is that of each of its heads."""
    for heads, groups, ranks in [(6, 2, 6), (8, 2, 4), (8, 8, 4), (12, 3, 6), (6, 1, 3), (16, 4, 8)]:
        covered = []
        for rank in range(ranks):
            part = Part(rank, ranks)
            first, end = share(groups, part)
            mine = range(*share(heads, part))
            assert {head * groups // heads for head in mine} == set(range(first, end))
            covered += mine
        assert covered == list(range(heads))


def test_blocks_lie_one_behind_the_other() -> None:
    """Ranges of a joined projection: Q of three heads, K and V of one, each 4 wide; the second rank of three."""
    own, kv = share(3, Part(1, 3)), share(1, Part(1, 3))
    assert rows_of([Block(3, 4, own), Block(1, 4, kv), Block(1, 4, kv)]) == ((4, 8), (12, 16), (16, 20))


def test_a_part_owns_its_memory_and_fills_up_with_zeros() -> None:
    """The last part of a vocabulary is padded, and no part keeps the whole alive."""
    whole = torch.arange(7 * 3, dtype=torch.float32).view(7, 3)
    parts = [vocabulary_cut(7, Part(rank, 4))(whole) for rank in range(4)]
    assert [tuple(part.shape) for part in parts] == [(2, 3)] * 4
    assert torch.equal(torch.cat(parts)[:7], whole)
    assert not parts[3][1].any()
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    assert [float(Once(Part(rank, 2))(whole).sum()) for rank in range(2)] == [float(whole.sum()), 0.0]


def test_weights_read_the_part_that_cutting_the_whole_would_leave(tmp_path: Path) -> None:
    """Rows, columns, several ranges and padding, straight from the file."""
    whole = torch.randn(10, 6)
    save_file({"w": whole, "b": whole[0].clone()}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, torch.float32, torch.device("cpu"))
    for cut in (
        Take(0, ((2, 5),)),
        Take(1, ((1, 2), (4, 6))),
        Take(0, ((8, 10), (-3, 0))),
        Take(0, ((10, 10), (-3, 0))),
        Once(Part(1, 2)),
    ):
        assert torch.equal(weights.get("w", cut), cut(whole))
    assert weights.unread() == ["b"]
    assert weights.unread(lambda name: name == "b") == []


def test_every_mixer_with_a_forward_has_a_rule() -> None:
    """No recurrent family runs on one rank only."""
    assert set(RECURRENT) == set(MIXERS)


def test_foreign_parameters_have_no_memory(tmp_path: Path) -> None:
    """Those of other stages stay on meta with their shapes; all others hold what the whole model holds."""
    directory = tiny_model(tmp_path, "bamba")
    whole, _ = load_parts(directory, torch.float32, "eager", SOLO, lambda name: False)
    part, _ = load_parts(directory, torch.float32, "eager", Layout(1, 2, 0, 1), lambda name: ".layers.0." in name)
    expected = dict(whole.named_parameters())
    seen = {True: 0, False: 0}
    for name, parameter in part.named_parameters():
        assert parameter.shape == expected[name].shape
        assert parameter.is_meta == (".layers.0." in name)
        assert parameter.is_meta or torch.equal(parameter, expected[name])
        seen[parameter.is_meta] += 1
    assert min(seen.values()) > 4


def test_the_loader_is_as_before_when_loading_failed(tmp_path: Path) -> None:
    """A refusal comes out as it is, and leaves neither the hook nor the environment changed."""
    import transformers.core_model_loading as loader

    directory = tiny_model(tmp_path, "llama")
    original, before = loader.set_param_for_module, os.environ.get(NO_READ_AHEAD)
    with pytest.raises(UnsupportedModel, match="6 attention heads in 2 groups cannot be split over tp=4"):
        load_parts(directory, torch.float32, "eager", Layout(0, 1, 0, 4), lambda name: False)
    assert loader.set_param_for_module is original
    assert os.environ.get(NO_READ_AHEAD) == before
