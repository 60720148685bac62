"""The free set against a plain Python set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.free_set import FreeSet


class Pair:
    """A FreeSet and the plain set it must equal."""

    def __init__(self, size: int, filled: bool) -> None:
        self.free = FreeSet(size, filled)
        self.plain = set(range(size)) if filled else set()

    def agree(self) -> None:
        assert self.free.count == len(self.plain)
        assert self.free.members().tolist() == sorted(self.plain)
        assert self.free.check()

    def act(self, kind: int, rng: np.random.Generator) -> None:
        """One random operation, the same on both."""
        out = sorted(set(range(self.free.size)) - self.plain)
        if kind == 0 and self.plain:
            k = int(rng.integers(1, len(self.plain) + 1)) if rng.integers(4) == 0 else min(len(self.plain), 3)
            assert self.free.peek_lowest(k).tolist() == sorted(self.plain)[:k]
            taken = self.free.take_lowest(k).tolist()
            assert taken == sorted(self.plain)[:k], "the lowest members come first"
            self.plain -= set(taken)
        elif kind == 1 and out:
            some = np.unique(rng.choice(out, size=int(rng.integers(1, len(out) + 1)))).astype(np.int32)
            self.free.add(some)
            self.plain |= set(some.tolist())
        elif kind == 2 and self.plain:
            some = np.unique(rng.choice(sorted(self.plain), size=int(rng.integers(1, 6)))).astype(np.int32)
            self.free.remove(some)
            self.plain -= set(some.tolist())


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 7, 511, 512, 513, 3000]),
    filled=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.integers(0, 2), max_size=30),
)
def test_it_is_a_set_that_gives_its_lowest_first(size: int, filled: bool, seed: int, kinds: list[int]) -> None:
    """Whatever is taken, added and removed, the members equal a plain set's and takes are the lowest."""
    pair = Pair(size, filled)
    rng = np.random.default_rng(seed)
    for kind in kinds:
        pair.act(kind, rng)
        pair.agree()


def test_more_is_never_handed_out_than_there_is() -> None:
    """Taking more than the members is a defect of the caller and stops there."""
    free = FreeSet(4, filled=True)
    free.take_lowest(3)
    with pytest.raises(AssertionError):
        free.take_lowest(2)
    assert free.take_lowest(1).tolist() == [3]
