"""Where reasoning begins and ends in token ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.plugins import ReasoningMarkers, ReasoningTracker

SEQUENCES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
MARKERS = st.builds(
    ReasoningMarkers,
    start=st.lists(SEQUENCES, max_size=3, unique=True).map(tuple),
    end=st.lists(SEQUENCES, max_size=3, unique=True).map(tuple),
).filter(lambda markers: not set(markers.start) & set(markers.end))
TOKENS = st.lists(st.integers(0, 3), max_size=16)


def inside_of(markers, tokens, inside):
    """Return whether tokens end inside reasoning: every marker is looked for at every place."""
    for end in range(1, len(tokens) + 1):
        matches = [
            (len(marker), begins)
            for sequences, begins in ((markers.start, True), (markers.end, False))
            for marker in sequences
            if tuple(tokens[max(end - len(marker), 0) : end]) == marker
        ]
        if matches:
            inside = max(matches)[1]
    return inside


@given(markers=MARKERS, prompt=TOKENS, output=TOKENS, begins_open=st.booleans())
def test_a_tracker_finds_what_a_search_finds(markers, prompt, output, begins_open):
    markers = ReasoningMarkers(markers.start, markers.end, begins_open)
    tracker = ReasoningTracker(markers)
    position = tracker.after(prompt)
    inside = begins_open or inside_of(markers, prompt, inside=False)
    assert position.inside == markers.is_open(prompt) == inside
    for count, token in enumerate(output, start=1):
        before, position = position, tracker.advance(position, token)
        assert tracker.advance(before, token) == position
        together = [*prompt, *output[:count]]
        since = len(prompt) + count
        # Only markers that end in the output change what the prompt decided.
        matches = [
            (len(marker), begins)
            for sequences, begins in ((markers.start, True), (markers.end, False))
            for marker in sequences
            if tuple(together[max(since - len(marker), 0) : since]) == marker
        ]
        inside = max(matches)[1] if matches else inside
        assert position.inside == inside


def test_a_call_ends_reasoning_and_is_no_sign_of_it():
    markers = ReasoningMarkers(start=((1,),), end=((2,),), calls=(3, 4))
    tracker = ReasoningTracker(markers)
    inside = tracker.after([1])
    assert inside.inside
    assert not tracker.advance(inside, 3).inside
    assert not tracker.advance(inside, 4).inside
    assert tracker.next_of_end(inside) == 2
    assert [markers.is_open(ids) for ids in ([1, 5], [1, 3], [3, 1])] == [True, False, True]
    assert [markers.ended(ids) for ids in ([1, 2], [3], [5])] == [True, False, False]


def test_a_start_in_an_earlier_message_opens_nothing():
    """The marker may be in the text of a user who asks about it."""
    markers = ReasoningMarkers(start=((1,),), end=((2,),), boundaries=(8, 9))
    opens = {(1,): True, (7, 1, 5): True, (1, 5, 8, 9): False, (1, 8, 9, 1): True, (1, 8, 2): False}
    assert {ids: markers.is_open(ids) for ids in opens} == opens
    assert ReasoningTracker(markers).after([1, 8]).inside is False
    assert markers.thinking_since([1, 8, 1, None]) == 3


@given(markers=MARKERS, prompt=TOKENS)
def test_the_end_that_is_forced_goes_on_from_what_was_begun(markers, prompt):
    if not markers.end:
        return
    tracker = ReasoningTracker(markers)
    marker = markers.end[0]
    position = tracker.after(prompt)
    token = tracker.next_of_end(position)
    assert token in marker
    for _ in range(len(marker)):
        prompt = [*prompt, tracker.next_of_end(position)]
        position = tracker.advance(position, prompt[-1])
        if tuple(prompt[-len(marker) :]) == marker:
            return
    pytest.fail(f"{marker} is not complete in {prompt}")


@pytest.mark.parametrize(
    ("prompt", "since"),
    [([7, 1, 7], 2), ([1, 2], None), ([1, 2, 1], 3), ([4, 4, 9], 2), ([], None), ([2], None)],
)
def test_since_when_a_prompt_is_inside(prompt, since):
    markers = ReasoningMarkers(start=((1,), (4, 4)), end=((2,), (3, 3)))
    assert markers.thinking_since(prompt) == since
    assert markers.is_open(prompt) is (since is not None)


def test_the_last_marker_of_a_prompt_may_end_it():
    markers = ReasoningMarkers(start=((1,),), end=((2,),))
    assert [markers.ended(prompt) for prompt in ([1, 2, 7], [2, 1], [7], [2])] == [
        True, False, False, True
    ]  # fmt: skip


def test_equal_bytes_across_tokens_are_no_marker():
    markers = ReasoningMarkers(start=((1 << 32,),))
    assert markers.thinking_since([0, 1, 0]) is None


def test_without_markers_nothing_is_reasoning():
    tracker = ReasoningTracker(ReasoningMarkers())
    position = tracker.after([1, 2])
    assert tracker.advance(position, 5) is position
    assert not position.inside
    with pytest.raises(IndexError):
        tracker.next_of_end(position)


def opened_once(markers, tokens):
    """Return whether tokens are inside reasoning that comes before the answer alone."""
    starts = [marker for marker in markers.start if marker]
    for first in range(len(tokens)):
        for start in starts:
            if tuple(tokens[first : first + len(start)]) == start:
                rest = tokens[first + len(start) :]
                return inside_of(ReasoningMarkers(end=markers.end), rest, inside=True)
        if tokens[first] not in markers.blanks:
            return False
    return False


@given(end=SEQUENCES, start=SEQUENCES, output=TOKENS)
def test_a_start_in_an_answer_is_text(end, start, output):
    # No marker begins with a blank, or with the beginning of another one.
    markers = ReasoningMarkers(((4, *start),), ((5, *end),), blanks=(0,))
    tokens = [token for part in output for token in ([4, *start], [5, *end], [0], [1])[part]]
    tracker, position = ReasoningTracker(markers), ReasoningTracker(markers).after([1, 1])
    for count, token in enumerate(tokens, 1):
        position = tracker.advance(position, token)
        assert position.inside == opened_once(markers, tokens[:count]), tokens[:count]


@pytest.mark.parametrize(
    ("tokens", "inside"),
    [
        ([0, 0, 4, 6], True),
        ([4, 4, 6], False),
        ([1, 4, 6], False),
        ([4, 6, 5, 0, 4, 6], False),
        ([5, 4, 6], False),
    ],
)
def test_only_blanks_come_before_reasoning(tokens, inside):
    tracker = ReasoningTracker(ReasoningMarkers(((4, 6),), ((5,),), blanks=(0,)))
    position = tracker.after([])
    for token in tokens:
        position = tracker.advance(position, token)
    assert position.inside == inside
