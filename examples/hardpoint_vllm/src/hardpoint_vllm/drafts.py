"""Rows for draft tokens: their request in the batch, and their depth."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import LogitsRequest
from hardpoint.toolkit.logits_calls import drafts_of


def base_of(request: LogitsRequest) -> LogitsRequest:
    """Return the request in the batch for which a row stands."""
    return request.draft_of or request


def by_depth(requests: Sequence[LogitsRequest]) -> list[list[int]]:
    """Group the positions of rows by the number of draft tokens before them, ascending from 0.

    Groups may be empty: the rows of a step that runs again after a fault are some of the step's.
    """
    groups: list[list[int]] = [[]]
    for index, request in enumerate(requests):
        depth = len(drafts_of(request))
        groups.extend([] for _ in range(depth + 1 - len(groups)))
        groups[depth].append(index)
    return groups
