"""Stop strings: found across any cut of the text, nothing of them shown, nothing held back for longer than needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.frontend.stops import StopMatcher

TEXTS = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def expected(text, stops, include):
    """By definition: the match that ends first, of those the longest; the text before it (or with it)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_any_cut_gives_the_same_match(text, stops, cuts, include):
    """However the text is cut, shown text and match are those of the definition."""
    matcher, shown, previous = StopMatcher(stops, include), [], 0
    for cut in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        shown.append(matcher.push(text[previous:cut]))
        previous = cut
    wanted, stop = expected(text, stops, include)
    assert matcher.found == stop
    assert "".join(shown) + matcher.flush() == wanted


@settings(max_examples=300, deadline=None)
@given(TEXTS, STOPS)
def test_only_what_may_become_a_stop_string_is_held(text, stops):
    """After each character exactly the longest end of the text that begins a stop string is missing."""
    matcher, shown = StopMatcher(stops), ""
    for index, character in enumerate(text):
        shown += matcher.push(character)
        if matcher.found is not None:
            return
        so_far = text[: index + 1]
        held = max(k for stop in stops for k in range(len(stop)) if so_far.endswith(stop[:k]))
        assert shown == so_far[: len(so_far) - held]


def test_a_stop_string_inside_a_joined_emoji_cuts_there():
    """Stop strings are text, so one may lie inside what a reader sees as one symbol."""
    matcher = StopMatcher(["\u200d👧"])
    assert "".join(matcher.push(character) for character in "👩\u200d👩\u200d👧\u200d👦") == "👩\u200d👩"
    assert matcher.found == "\u200d👧"


def test_nothing_is_shown_after_a_match():
    """The rest of the piece, and all later pieces, are dropped."""
    matcher = StopMatcher(["END"])
    assert matcher.push("a END b") == "a "
    assert matcher.push("more") + matcher.flush() == ""


def test_hostile_repetition_is_linear():
    """The worst text for a naive search costs a constant per character (bounded comparisons, counted by size)."""
    stop, text = "a" * 1000 + "b", "a" * 200_000
    matcher = StopMatcher([stop] * 1)
    shown = "".join(matcher.push(text[index : index + 5]) for index in range(0, len(text), 5))
    assert len(shown) == len(text) - 1000
    assert matcher.push("b") == ""
    assert matcher.found == stop
