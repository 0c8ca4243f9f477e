"""Rows for draft tokens: which request they stand for, and after how many drafts."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins.sampling.rows import LogitsRequest


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


def drafts_of(request: LogitsRequest) -> Sequence[int]:
    """Return the draft tokens before the position of a row; none for a row without drafts."""
    if request.draft_of is None:
        return ()
    return request.output_token_ids[len(request.draft_of.output_token_ids) :]
