"""The modeled runner: its tokens depend on the whole history, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.columns import f32, i64
from daemon.rank.device import HostDevice
from daemon.rank.errors import BadOption
from daemon.rank.modeled import ModeledRunner, read_options
from ipc.messages import Sampling
from tools.rank_driver import Driver, settings

SMALL = list(range(8, 31))  # below the vocabularies of the tests that shrink them
PROMPT = [100 + 7 * i for i in range(23)]


def drawn(seed: int, **more: object) -> Sampling:
    """Sampling parameters that use the seed."""
    return Sampling(temperature=1.0, seed=seed, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_tokens_do_not_depend_on_chunks_or_pages(page_size: int, chunk: int) -> None:
    """Any page size and any cut of the prompt give the same tokens."""
    whole = Driver(settings(page_size=4)).generate(0, PROMPT, 12)
    assert Driver(settings(page_size=page_size)).generate(3, PROMPT, 12, chunk=chunk) == whole


def test_tokens_do_not_depend_on_neighbours() -> None:
    """Rows decoded together give what each gives alone."""
    prompts = {row: [50 + row * 3 + i for i in range(1 + 4 * row)] for row in range(5)}
    alone = {row: Driver(settings()).generate(0, prompt, 9) for row, prompt in prompts.items()}
    together = Driver(settings())
    for row in prompts:
        together.start(row)
    together.step([(row, prompt, True) for row, prompt in prompts.items()])
    for _ in range(8):
        together.step([(row, None, True) for row in prompts])
    assert {row: together.rows[row].tokens[len(prompts[row]) :] for row in prompts} == alone


def test_every_earlier_token_matters() -> None:
    """Changing any one prompt token changes what follows."""
    original = Driver(settings()).generate(0, PROMPT, 3)
    for at in range(len(PROMPT)):
        changed = [*PROMPT[:at], PROMPT[at] + 1, *PROMPT[at + 1 :]]
        assert Driver(settings()).generate(0, changed, 3) != original


@pytest.mark.parametrize("page", range(5))
def test_a_foreign_byte_in_any_page_changes_the_output(page: int) -> None:
    """One flipped bit in any page of a row is seen in its next tokens: wrong memory cannot hide."""
    clean, hurt = Driver(settings()), Driver(settings())
    for driver in (clean, hurt):
        driver.start(0)
        driver.step([(0, PROMPT[:20], False)])
    runner = hurt.runner
    assert isinstance(runner, ModeledRunner)
    assert isinstance(runner.device, HostDevice)
    unit = hurt.worker.executor.tables[hurt.owner][hurt.rows[0].pages[page]]
    runner.device.arena.units(hurt.owner)[unit, 9] ^= 4
    for driver in (clean, hurt):
        driver.step([(0, PROMPT[20:], True)])
    assert clean.rows[0].tokens != hurt.rows[0].tokens


def test_seed_choice_and_position_key_the_noise() -> None:
    """Drawn rows differ by seed and by choice; greedy ones ignore both."""
    base = Driver(settings()).generate(0, PROMPT, 6, sampling=drawn(1))
    assert Driver(settings()).generate(0, PROMPT, 6, sampling=drawn(1)) == base
    assert Driver(settings()).generate(0, PROMPT, 6, sampling=drawn(2)) != base
    assert Driver(settings()).generate(0, PROMPT, 6, sampling=drawn(1), choice=1) != base
    greedy = Driver(settings()).generate(0, PROMPT, 6)
    assert Driver(settings()).generate(0, PROMPT, 6, sampling=Sampling(temperature=0.0, seed=9), choice=2) == greedy


def test_tokens_stay_in_range_and_end_only_when_asked() -> None:
    """No special token by chance; with eos_ppm a row ends itself about that often."""
    driver = Driver(settings(options={"vocab_size": "64", "first_token": "8"}))
    tokens = driver.generate(0, SMALL, 300)
    assert min(tokens) >= 8
    assert max(tokens) < 64
    often = Driver(settings(options={"eos_ppm": "250000", "eos_id": "5"})).generate(0, PROMPT, 400)
    assert 60 < often.count(5) < 140


def test_banned_ids_give_way_until_their_position() -> None:
    """A banned id is not sampled before `ban_before`, and is afterwards."""
    options = {"vocab_size": "40", "first_token": "32"}
    free = Driver(settings(options=options)).generate(0, SMALL, 20)
    banned = np.array(sorted(set(free)), dtype="<i8")
    driver = Driver(settings(options=options))
    held = driver.generate(0, SMALL, 20, ban_before=len(SMALL) + 10, banned=banned.tobytes())
    assert not set(held[:10]) & set(free)
    assert set(held[10:]) & set(free)


def test_log_probabilities_come_with_the_tokens() -> None:
    """Output rows carry k alternatives, best first; prompt rows cover every position but the first."""
    driver = Driver(settings())
    driver.start(0, Sampling(temperature=0.0, seed=0, logprobs=3, prompt_logprobs=0))
    first = driver.step([(0, PROMPT[:9], False)]).logprobs
    second = driver.step([(0, PROMPT[9:], True)]).logprobs
    assert [(item.prompt_position, f32(item.values.chosen).size) for item in first] == [(1, 8)]
    assert [(item.prompt_position, f32(item.values.chosen).size) for item in second] == [(-1, 1), (9, 14)]
    top = f32(second[0].values.top_values)
    assert i64(second[0].values.top_ids)[0] == driver.rows[0].tokens[-1]
    assert list(top) == sorted(top, reverse=True)


def test_bad_options_are_named() -> None:
    """An unknown option and a non-number are refused by name."""
    with pytest.raises(BadOption, match="speed"):
        read_options({"speed": "1"})
    with pytest.raises(BadOption, match="delay_us='fast'"):
        read_options({"delay_us": "fast"})
    with pytest.raises(BadOption, match="first_token=32"):
        read_options({"vocab_size": "32"})
