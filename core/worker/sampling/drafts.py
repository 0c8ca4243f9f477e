"""Draft tokens: further rows for a request, and verification of the drafts by its own tokens."""

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
    """Return one row per position to sample: each request, then a view per draft.

    Args:
        requests: those that are sampled.
        drafts: the tokens drafted for each; may be empty.
        pipeline: forks the processors' states.
        scratch_row: first row beyond the batch, for the views' device state.

    Raises:
        PluginContractError: an enabled processor does not support drafts.
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
    """Return the tokens of each request: the accepted drafts, then one sampled token.

    A sampled token depends on logits, seed and position only, so a draft is accepted if it equals
    the token that is sampled at its position.

    Args:
        chosen: the sampled tokens, one per row of `with_drafts`.
        drafts: the same as for `with_drafts`.
    """
    result: list[list[int]] = []
    first = 0
    for tokens in drafts:
        sampled = list(chosen[first : first + len(tokens) + 1])
        first += len(tokens) + 1
        num_accepted = 0
        while num_accepted < len(tokens) and sampled[num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        result.append(sampled[: num_accepted + 1])
    return result
