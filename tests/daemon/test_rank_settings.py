"""Rank settings: stages, ranks and where they meet, by the settings of the daemon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daemon.config import ConfigError, resolve
from daemon.rank_settings import rank_ids, rank_settings, stage_layers
from daemon.settings_table import Settings

RUN = Path("/run/bandmaster")
LIFE = "0123456789abcdef" * 2


def given(**changes: object) -> Settings:
    """Settings that differ from the defaults in these."""
    return replace(Settings(), **changes)  # type: ignore[arg-type]


def test_one_rank_meets_nobody() -> None:
    """Nothing of groups is told to the only rank."""
    told = rank_settings(given(), 1, LIFE, RUN)
    assert (told.tensor_ranks, told.stage_layers, told.rendezvous) == (1, [], "")


def test_ranks_are_numbered_stage_by_stage() -> None:
    """The order of `torch.distributed`: tensor ranks of a stage side by side."""
    settings = given(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert rank_ids(settings) == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_layers_of_stages_are_left_to_the_ranks_unless_given() -> None:
    """Zeros for each stage: only ranks know how many layers the model has."""
    assert stage_layers(given(pipeline_parallel_size=3)) == [0, 0, 0]
    assert stage_layers(given(pipeline_parallel_size=2, pp_layers="10,20")) == [10, 20]
    assert stage_layers(given(pp_layers="30")) == [30]


def test_ranks_meet_at_another_place_in_each_epoch_of_each_life() -> None:
    """A file in the run directory, or a name within a store that may outlive both."""
    two = given(tensor_parallel_size=2)
    for settings, start in (
        (two, f"file://{RUN}/"),
        (replace(two, rank_launch="wait"), "env:///"),
        (replace(two, rendezvous="10.0.0.1:29500"), "tcp://10.0.0.1:29500/"),
    ):
        places = {
            rank_settings(settings, epoch, life, RUN).rendezvous for epoch in (1, 2) for life in (LIFE, LIFE[::-1])
        }
        assert len(places) == 4
        assert all(place.startswith(start) for place in places)


BAD = [
    ({"pp": "2", "pp_layers": "1,2,3"}, "names 3 stages, but --pipeline-parallel-size is 2"),
    ({"ranks_endpoint": "udp://x"}, "--ranks-endpoint: 'udp://x' is not allowed"),
    ({"ranks_endpoint": "tcp://x:1"}, "make keys with `bandmaster keys DIR rank`"),
    ({"rendezvous": "host"}, "--rendezvous: 'host' is not allowed; allowed: HOST:PORT"),
]


@pytest.mark.parametrize(("flags", "said"), BAD, ids=[said[:20] for _, said in BAD])
def test_settings_that_no_ranks_could_meet_by_are_refused(flags: dict[str, str], said: str) -> None:
    """Before anything starts, with the flag's name and the remedy."""
    named = {"pipeline_parallel_size" if name == "pp" else name: value for name, value in flags.items()}
    with pytest.raises(ConfigError, match=said):
        resolve("daemon", named, {})
