"""KV blocks that a running request releases: its later tokens do not attend to them."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

__all__: list[str] = []

_AT = attrgetter("at")


class BlockRelease(NamedTuple):
    """Consecutive blocks of a request that no token from a position on attends to.

    Attributes:
        at: position of the first token that does not see them.
        columns: first and last + 1 column of the block table, in which the blocks of earlier
            releases are left out.
    """

    at: int
    columns: tuple[int, int]


class BlockReleases:
    """The releases of a request, in the order of their positions.

    A release takes effect between two steps: no step computes tokens before and after its `at`.
    So tokens do not depend on how they are divided into steps, and a preempted request computes the
    same keys and values again.

    Attributes:
        all: every release.
        gaps: positions without blocks after the last release, in order, in separate ranges.
    """

    def __init__(self) -> None:
        """Release nothing yet."""
        self.all: list[BlockRelease] = []
        self.gaps: list[range] = []

    def add(self, blocks: range, at: int, block_size: int) -> None:
        """Release blocks of positions before `at`, which is not before an earlier release.

        Args:
            blocks: their indices, counted from the first token of the request.
            at: see `BlockRelease`.
            block_size: tokens per block.
        """
        span = range(blocks.start * block_size, max(blocks.start, blocks.stop) * block_size)
        first, end = self._column(span.start) // block_size, self._column(span.stop) // block_size
        self.all.append(BlockRelease(at, (first, end)))
        if first < end:
            self.gaps = _with(self.gaps, span)

    def _column(self, position: int) -> int:
        """Return how many positions before a position have blocks."""
        return position - sum([max(min(gap.stop, position) - gap.start, 0) for gap in self.gaps])

    def starting_at(self, position: int) -> Sequence[tuple[int, int]]:
        """Return the columns that leave the block table before the token at a position."""
        first = bisect_left(self.all, position, key=_AT)
        end = bisect_right(self.all, position, key=_AT)
        return [release.columns for release in self.all[first:end]]

    def until(self, position: int, skip: int = 0) -> Sequence[tuple[int, int]]:
        """Return the columns of releases up to the token at a position, without the first ones."""
        count = bisect_right(self.all, position, key=_AT)
        return [release.columns for release in self.all[skip:count]]

    def num_before_next(self, position: int) -> int:
        """Return how many tokens from a position on a step can compute, up to the next release."""
        following = bisect_right(self.all, position, key=_AT)
        return self.all[following].at - position if following < len(self.all) else sys.maxsize


def _with(gaps: Sequence[range], span: range) -> list[range]:
    """Return ranges with another one; ranges that touch become one."""
    apart = [gap for gap in gaps if gap.stop < span.start or gap.start > span.stop]
    touching = [gap for gap in gaps if gap not in apart] + [span]
    both = range(min(gap.start for gap in touching), max(gap.stop for gap in touching))
    return sorted([*apart, both], key=lambda gap: gap.start)
