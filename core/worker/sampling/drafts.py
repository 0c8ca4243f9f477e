"""Draft tokens: more rows for a request, and which of them its own choices confirm."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import LogitsRequest

from .pipeline import LogitsPipeline


def with_drafts(
    requests: Sequence[LogitsRequest],
    drafts: Sequence[Sequence[int]],
    pipeline: LogitsPipeline,
    scratch_row: int,
) -> list[LogitsRequest]:
    """Return one row per position to choose at: each request, then a view per draft.

    Args:
        requests: those that are sampled.
        drafts: the tokens drafted for each; may be empty.
        pipeline: forks the states.
        scratch_row: first row beyond the batch, for the views' device state.

    Raises:
        PluginContractError: a processor that is on does not support drafts.
    """
    pipeline.check_drafts()
    rows: list[LogitsRequest] = []
    views: list[LogitsRequest] = []
    added: list[int] = []
    for request, tokens in zip(requests, drafts, strict=True):
        rows.append(request)
        for count in range(1, len(tokens) + 1):
            view = pipeline.fork(request, tokens[:count], scratch_row + len(views))
            rows.append(view)
            views.append(view)
            added.append(tokens[count - 1])
    if views:
        pipeline.fork_device_state(views, added)
    return rows


def accepted(chosen: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens that each request gets: confirmed drafts, then one of its own.

    A choice depends on nothing but logits, seed and position, so a draft is confirmed when it is
    the very token that would have been chosen without it.

    Args:
        chosen: one per row of `with_drafts`.
        drafts: as given there.
    """
    result: list[list[int]] = []
    first = 0
    for tokens in drafts:
        own = list(chosen[first : first + len(tokens) + 1])
        first += len(tokens) + 1
        confirmed = 0
        while confirmed < len(tokens) and own[confirmed] == tokens[confirmed]:
            confirmed += 1
        result.append(own[: confirmed + 1])
    return result
