"""The index finds the longest end, as a search through all texts does."""

import random

import pytest
from acme_corpus.index import CorpusIndex


def common(text, place, newest):
    """Return how many of the newest tokens are before a place of a text."""
    count = 0
    while count < min(place, len(newest)) and text[place - count - 1] == newest[~count]:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(30))
def test_what_follows_the_longest_end_is_found(seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(40))] for _ in range(4)]
    index = CorpusIndex(texts, longest=6)
    places = [(t, p) for t, text in enumerate(texts) for p in range(len(text))]
    for _ in range(40):
        newest = [rng.randrange(4) for _ in range(rng.randrange(1, 10))]
        ends = {(t, p): common(texts[t], p, newest[-6:]) for t, p in places}
        best = max(ends.values(), default=0)
        shortest = rng.randrange(1, 4)
        following = index.after(newest, shortest, 5)
        if best < shortest:
            assert following == []
        else:
            assert following in [texts[t][p : p + 5] for (t, p), end in ends.items() if end == best]


def test_nothing_is_found_without_texts():
    for texts in ([], [[]], [[1]]):
        assert CorpusIndex(texts, 4).after([1, 2], 1, 3) == []


def test_it_takes_eight_bytes_a_token():
    assert CorpusIndex([range(1000)], 4).num_bytes == 8 * 1000 + 4
