"""Modeled ranks of every layout, in threads, over their real links: the same tokens, and every rank's bytes matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from daemon.layers import LayersError
from daemon.rank.device import HostDevice
from daemon.rank.errors import BadOption
from daemon.rank.group import Group
from daemon.rank.layout import Layout
from daemon.rank.modeled import ModeledRunner
from daemon.rank.modeled_hash import weight_of
from ipc.messages import RankSettings
from tools.group_driver import GroupDriver
from tools.rank_driver import settings
from tools.toy_reference import Toy, mismatches

PROMPT = [100 + 7 * i for i in range(23)]
MIXED = Toy(windows=(5, 11), state=True)
LAYOUTS = [(1, 2), (1, 4), (2, 1), (2, 2), (3, 2), (4, 1)]


@pytest.fixture
def meeting() -> Iterator[Path]:
    """Where the ranks of a test meet."""
    with TemporaryDirectory() as place:
        yield Path(place)


def opener(place: Path) -> Callable[[RankSettings, Layout, Group], ModeledRunner]:
    """Modeled runners that meet at a place."""

    def opened(config: RankSettings, layout: Layout, group: Group) -> ModeledRunner:
        return ModeledRunner(msgspec.structs.replace(config, rendezvous=f"file://{place}/ranks"), layout)

    return opened


def driver(toy: Toy, stages: int, ranks: int, place: Path, **changes: object) -> GroupDriver:
    """A driver of modeled ranks over the toy's bands, of two blocks if it does not say."""
    config = settings(options=toy._replace(depth=toy.depth or 2).options(), arena_bytes=1 << 19, **changes)
    return GroupDriver(config, stages, ranks, opener(place))


def closed(made: GroupDriver) -> None:
    """Every rank leaves."""
    for runner in made.runners:
        assert isinstance(runner, ModeledRunner)
        runner.close()


@pytest.mark.parametrize(("stages", "ranks"), LAYOUTS)
@pytest.mark.parametrize("toy", [MIXED, Toy(full=False, windows=(7,), state=True)])
def test_every_layout_says_what_the_sequence_alone_says(toy: Toy, stages: int, ranks: int, meeting: Path) -> None:
    """However layers are split over stages and stages over ranks, the tokens are those of the toy's definition."""
    made = driver(toy, stages, ranks, meeting, page_size=4)
    output = made.generate(2, PROMPT, 10, chunk=9)
    assert len(output) == 10
    assert not mismatches(toy, PROMPT, output)
    closed(made)


def test_deep_toys_do_not_depend_on_the_layout(meeting: Path) -> None:
    """Every layout says what the definition says, also where a stage stores nothing of full attention."""
    deep = MIXED._replace(depth=3)
    for number, (stages, ranks, layers) in enumerate([(1, 1, []), (3, 1, [4, 3, 5]), (2, 2, [1, 11]), (4, 1, [])]):
        place = meeting / str(number)
        place.mkdir()
        made = driver(deep, stages, ranks, place, page_size=4, stage_layers=layers)
        assert not mismatches(deep, PROMPT, made.generate(0, PROMPT, 8))
        closed(made)


def test_stages_store_only_their_own_layers(meeting: Path) -> None:
    """A stage without a band gives it no bytes; together the stages store what one rank stores."""
    one = driver(MIXED, 1, 1, meeting)
    whole = [band.unit_bytes for band in one.geometry.stages[0].bands]
    made = driver(MIXED, 4, 1, meeting, stage_layers=[1, 3, 1, 3])
    parts = [[band.unit_bytes for band in stage.bands] for stage in made.geometry.stages]
    assert [part[-1] > 0 for part in parts] == [True, False, True, False], "full attention is on two stages"
    assert [part[0] > 0 for part in parts] == [False, True, False, True], "state is on the two others"
    assert all(sum(column) >= size for column, size in zip(zip(*parts, strict=True), whole, strict=True))
    closed(made)


@pytest.mark.parametrize("victim", range(4))
def test_a_foreign_byte_on_any_rank_changes_the_output(victim: int, meeting: Path) -> None:
    """One flipped bit in the pages of any rank of any stage is seen in the tokens of the group."""
    tokens = []
    for hurt in (False, True):
        place = meeting / str(hurt)
        place.mkdir()
        made = driver(Toy(), 2, 2, place, page_size=4)
        made.start(0)
        made.step([(0, PROMPT[:20], False)])
        runner = made.runners[victim]
        assert isinstance(runner, ModeledRunner)
        assert isinstance(runner.device, HostDevice)
        unit = made.workers[victim].executor.tables[made.owner][made.rows[0].pages[2]]
        if hurt:
            runner.device.arena.units(made.owner)[unit, 9] ^= 4
        made.step([(0, PROMPT[20:], True)])
        tokens.append(made.rows[0].tokens[-1])
        closed(made)
    assert tokens[0] != tokens[1]


def test_weights_add_up_to_one() -> None:
    """Whatever the number of ranks, equal findings sum to themselves, and no rank counts nothing."""
    for ranks in range(1, 9):
        weights = [int(weight_of(rank, ranks)) for rank in range(ranks)]
        assert sum(weights) % 2**64 == 1
        assert all(weights)


def test_too_many_stages_and_unknown_depths_are_refused(meeting: Path) -> None:
    """A model of six layers has six stages at most; without a depth it gets the layers that the stages need."""
    with pytest.raises(LayersError, match="6 layers"):
        driver(Toy(windows=(5,), state=True), 7, 1, meeting)
    with pytest.raises(BadOption, match="depth"):
        GroupDriver(settings(options={"depth": "deep"}), 1, 1, opener(meeting))
    made = GroupDriver(settings(options={}, arena_bytes=1 << 19), 3, 1, opener(meeting))
    assert [stage.bands[-1].unit_bytes > 0 for stage in made.geometry.stages] == [True] * 3
    assert not mismatches(Toy(depth=3), PROMPT, made.generate(0, PROMPT, 6))
    closed(made)
