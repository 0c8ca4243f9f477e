"""Noticing that an output goes round in a loop."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import RepetitionDetection


def repeats(tokens: Sequence[int], detection: RepetitionDetection) -> bool:
    """Whether the newest tokens are `min_count` copies of a pattern of an allowed length.

    Asked after every token, so it looks at the tail only: usually at two older tokens per length
    of pattern, and never at more than 2 * `min_count` * `max_pattern` of them.
    """
    count = detection.min_count
    longest = min(detection.max_pattern, len(tokens) // count)
    if longest < detection.min_pattern:
        return False
    newest = tokens[-1]
    # A pattern's last token stands at the end of each copy; the oldest copy is the best witness.
    likely = [
        length
        for length in range(detection.min_pattern, longest + 1)
        if tokens[-1 - length * (count - 1)] == newest == tokens[-1 - length]
    ]
    if not likely:
        return False
    return _any_period(tokens[: -1 - count * likely[-1] : -1], likely, count)


def _any_period(backwards: Sequence[int], likely: Sequence[int], count: int) -> bool:
    """Whether `backwards` begins with `count` copies of as many tokens as one of `likely` says.

    By the Z algorithm (Gusfield, Algorithms on Strings, 1997): `same[n]` is how many tokens from n
    on equal those from 0 on, and no token is compared twice.
    """
    same = [0]
    left = right = 0  # the stretch of equal tokens that reaches furthest
    for at in range(1, likely[-1] + 1):
        size = min(right - at, same[at - left]) if at < right else 0
        while at + size < len(backwards) and backwards[size] == backwards[at + size]:
            size += 1
        if at + size > right:
            left, right = at, at + size
        same.append(size)
    return any(same[length] >= length * (count - 1) for length in likely)
