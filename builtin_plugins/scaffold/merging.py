"""Merges two changes of one text, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

Lines = Sequence[str]
Hunk = tuple[int, int, int, int]
"""Lines of the base from, to; lines from, to that replace them."""

OURS, MIDDLE, THEIRS = "<<<<<<< ", "=======", ">>>>>>> "


def merge(base: str, ours: str, theirs: str, label: str) -> tuple[str, int]:
    """Return the text with both changes, and the number of conflicts.

    Changes conflict if they replace the same lines of the base, or neighboring ones, by different
    lines. Both then stand in the result, between markers as git writes them.

    Args:
        base: text that both were made from.
        ours: text with the one change.
        theirs: text with the other change.
        label: name of the other text, for the markers.
    """
    texts = [text.splitlines(keepends=True) for text in (base, ours, theirs)]
    sides = [_hunks(texts[0], side) for side in texts[1:]]
    merged: list[str] = []
    conflicts = end = 0
    for first, last in _regions([*sides[0], *sides[1]]):
        merged += texts[0][end:first]
        end = last
        old = texts[0][first:last]
        mine, other = (
            _replaced(texts[0], side, hunks, first, last)
            for side, hunks in zip(texts[1:], sides, strict=True)
        )
        if other in (old, mine):
            merged += mine
        elif mine == old:
            merged += other
        else:
            conflicts += 1
            merged += [f"{OURS}yours\n", *_ended(mine), f"{MIDDLE}\n", *_ended(other)]
            merged += [f"{THEIRS}{label}\n"]
    return "".join(merged + texts[0][end:]), conflicts


def conflict_line(text: str) -> int | None:
    """Return the number of the first line that is a marker of a conflict."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith((OURS, THEIRS)):
            return number
    return None


def _hunks(base: Lines, side: Lines) -> list[Hunk]:
    opcodes = SequenceMatcher(None, base, side, autojunk=False).get_opcodes()
    return [hunk for tag, *hunk in opcodes if tag != "equal"]  # type: ignore[misc]  # four numbers


def _regions(hunks: list[Hunk]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the base's lines that hunks replace; merge adjacent hunks."""
    regions: list[tuple[int, int]] = []
    for first, last, *_ in sorted(hunks):
        if regions and first <= regions[-1][1]:
            regions[-1] = (regions[-1][0], max(last, regions[-1][1]))
        else:
            regions.append((first, last))
    yield from regions


def _replaced(base: Lines, side: Lines, hunks: list[Hunk], first: int, last: int) -> list[str]:
    """Return the lines of a side in place of a range of the base's."""
    lines: list[str] = []
    for start, stop, new_start, new_stop in hunks:
        if first <= start and stop <= last:
            lines += [*base[first:start], *side[new_start:new_stop]]
            first = stop
    return [*lines, *base[first:last]]


def _ended(lines: list[str]) -> list[str]:
    """Return lines with a line end after the last one, so that a marker may follow."""
    return [line if line.endswith("\n") else f"{line}\n" for line in lines]
