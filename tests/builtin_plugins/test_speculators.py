"""The built-in speculators pass the suite; drafts of `ngram`."""

from __future__ import annotations

import pytest
from support.searching import kit_examples

from hardpoint.builtin_plugins.speculators.ngram import NGram, NGramIndex
from hardpoint.testing import SpeculatorSuite

EXAMPLES = kit_examples(0.2)


class TestNGram(SpeculatorSuite):
    speculator = NGram
    examples = EXAMPLES


class TestNGramOfOne(SpeculatorSuite):
    speculator = NGram
    examples = EXAMPLES
    options = {"shortest": 1, "longest": 3}


def after(tokens, limit=4, shortest=2, longest=8):
    index = NGramIndex(shortest)
    for token in tokens:
        index.extend([token])
    return index.after(longest, limit)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([], []),
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([1, 2, 7, 8, 9, 5, 1, 2], [7, 8, 9, 5]),
        ([4, 1, 2, 7, 5, 1, 2, 8, 6, 4, 1, 2], [7, 5, 1, 2]),  # the longer run counts
        ([1, 2, 7, 5, 1, 2, 8, 6, 1, 2], [8, 6, 1, 2]),  # of equals, the latest
        ([5, 5, 5], [5, 5, 5, 5]),
    ],
)
def test_ngram_drafts_what_followed_the_longest_run(tokens, drafts):
    assert after(tokens) == drafts


def test_many_places_make_no_search_long():
    index = NGramIndex(2)
    index.extend([1, 2, 3] * 10_000)
    assert index.after(256, 3) == [1, 2, 3]
