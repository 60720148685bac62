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
from tools.toy_reference import Toy, greedy, mismatches

SMALL = list(range(8, 31))  # below the vocabularies of the tests that shrink them
PROMPT = [100 + 7 * i for i in range(23)]

SHAPES = [
    Toy(),
    Toy(windows=(8,)),
    Toy(state=True),
    Toy(windows=(5, 11), state=True),
    Toy(full=False, windows=(7,)),
    Toy(full=False, windows=(9, 2), state=True),
    Toy(full=False, state=True),
]


def toy_driver(toy: Toy, **changes: object) -> Driver:
    """A driver over the toy's bands."""
    return Driver(settings(options=toy.options(), arena_bytes=1 << 19, **changes))


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


@pytest.mark.parametrize("toy", SHAPES)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 3), (4, 1), (4, 23), (16, 9)])
def test_every_shape_says_what_the_sequence_alone_says(toy: Toy, page_size: int, chunk: int) -> None:
    """Through pages, slots and chunks the tokens are those of the definition that knows none of them."""
    output = toy_driver(toy, page_size=page_size).generate(2, PROMPT, 14, chunk=chunk)
    assert len(output) == 14
    assert not mismatches(toy, PROMPT, output)


def test_the_definition_depends_on_every_token() -> None:
    """Changing any token changes all that is said behind it, however long the windows are not."""
    for toy in SHAPES:
        said = greedy(toy, PROMPT)
        for at in range(len(PROMPT)):
            other = greedy(toy, [*PROMPT[:at], PROMPT[at] + 1, *PROMPT[at + 1 :]])
            assert other[:at] == said[:at]
            assert not {k for k in range(at, len(PROMPT)) if other[k] == said[k]}


def live_bytes(driver: Driver, band: int, row: int) -> list[tuple[int, int]]:
    """Unit and byte of all that a row's next token sees in a band."""
    state, page_size = driver.rows[row], driver.geometry.page_size
    runner = driver.runner
    assert isinstance(runner, ModeledRunner)
    geometry, table = driver.prepared.geometry.bands[band], driver.worker.executor.tables[band]
    planes = runner._plan.bands[band].planes
    if geometry.kind == "state":
        sizes = [8 * int(np.prod(plane.shape)) for plane in planes]
        spans = zip(planes, sizes, strict=True)
        return [(int(table[state.slot]), plane.offset_bytes + k) for plane, size in spans for k in range(size)]
    first = max(0, state.length + 1 - geometry.window_tokens) if geometry.window_tokens else 0
    places = []
    for position in range(first, state.length):
        unit, slot = int(table[state.pages[position // page_size]]), position % page_size
        for plane in planes:
            base = plane.offset_bytes + slot * plane.strides_bytes[0]
            places += [(unit, base + k) for k in range(plane.strides_bytes[0])]
    return places


@pytest.mark.parametrize("toy", SHAPES[1:])
def test_every_live_byte_of_every_band_matters(toy: Toy) -> None:
    """A flipped bit anywhere in what a row still sees changes its next token; one in what it does not see changes none.

    The row continues by a prompt token and samples, so that nothing but the arena carries the past.
    """
    driver = toy_driver(toy)
    runner = driver.runner
    assert isinstance(runner, ModeledRunner)
    assert isinstance(runner.device, HostDevice)
    driver.start(0)
    driver.step([(0, PROMPT[:19], False)])
    saved = runner.device.arena.data.copy()
    expected = greedy(toy, PROMPT[:20])[-1]
    probes = {}
    for band, geometry in enumerate(driver.prepared.geometry.bands):
        if geometry.unit_bytes:
            for unit, place in live_bytes(driver, band, 0):
                probes[unit * geometry.unit_bytes + place] = band
    assert set(probes.values()) == {n for n, b in enumerate(driver.prepared.geometry.bands) if b.unit_bytes}
    batches = []
    launch = runner.launch
    runner.launch = lambda batch: (batches.append(batch), launch(batch))[1]  # type: ignore[method-assign]
    first = driver.step([(0, [PROMPT[19]], True)])
    assert i64(first.tokens).tolist() == [expected]
    stride = 1 if len(probes) < 400 else 7
    for place in sorted(probes)[::stride]:
        runner.device.arena.data[:] = saved
        runner.device.arena.data[place] ^= 1 << (place % 8)
        assert launch(batches[0]).outcome().tokens.tolist() != [expected], f"byte {place} of band {probes[place]}"
    runner.device.arena.data[:] = saved
    own = {place // 8 for place in probes}
    for place in range(driver.prepared.geometry.chain_start_bytes, saved.size, 8):
        if place // 8 not in own:
            runner.device.arena.data[place : place + 8] ^= 0x55
    assert launch(batches[0]).outcome().tokens.tolist() == [expected], "what is not its own is not read"


def test_a_row_that_starts_ignores_what_its_slot_holds() -> None:
    """The state begins at zero with a row, whatever an earlier owner left in the slot."""
    toy = Toy(windows=(6,), state=True)
    driver = toy_driver(toy)
    for row in range(3):
        prompt = [token + row for token in PROMPT]
        assert not mismatches(toy, prompt, driver.generate(row, prompt, 5, chunk=4))


def test_bad_options_are_named() -> None:
    """An unknown option, a non-number and bands that cannot be are refused by name."""
    for options in ({"windows": "8,1"}, {"windows": "8+8"}, {"full": "0"}, {"state": "2"}):
        with pytest.raises(BadOption, match=r"windows|full"):
            read_options(options)
    with pytest.raises(BadOption, match="speed"):
        read_options({"speed": "1"})
    with pytest.raises(BadOption, match="delay_us='fast'"):
        read_options({"delay_us": "fast"})
    with pytest.raises(BadOption, match="first_token=32"):
        read_options({"vocab_size": "32"})
