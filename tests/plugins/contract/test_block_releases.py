"""Releases of KV blocks: the columns of block tables, gaps, and the ends of steps."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from hardpoint.plugins.requests.releases import BlockReleases

SIZE = 4
SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 9)), max_size=8)


@given(SPANS)
def test_columns_are_those_of_a_table_without_released_blocks(spans):
    releases, at, expected = BlockReleases(), 100, set(range(20))
    for first, length, later in spans:
        at += later
        releases.add(range(first, first + length), at, SIZE)
        expected -= {*range(first, first + length)}
    table = list(range(20))
    for release in releases.all:
        del table[slice(*release.columns)]
    assert table == sorted(expected)
    gone = [position for gap in releases.gaps for position in gap]
    blocks = sorted(set(range(20)) - expected)
    assert gone == [block * SIZE + offset for block in blocks for offset in range(SIZE)]


@given(SPANS, st.integers(0, 200))
def test_steps_end_at_each_release_and_take_effect_once(spans, start):
    releases, at = BlockReleases(), 0
    for first, length, later in spans:
        at += later + 1
        releases.add(range(first, first + length), at, SIZE)
    position, seen = 0, []
    while position < 200:
        seen += releases.starting_at(position)
        position += min(releases.num_before_next(position), 7)
    assert seen == [release.columns for release in releases.all]
    after = [release.at for release in releases.all if release.at > start]
    assert releases.num_before_next(start) == (after[0] - start if after else sys.maxsize)
