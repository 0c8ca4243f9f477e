"""Log-probabilities of the chosen and the most likely tokens, and of prompt tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from hardpoint.core.worker.step_input import StepInput
from hardpoint.host.system.transfers import fetch
from hardpoint.plugins.device import to_device
from hardpoint.plugins.requests import TokenLogprobs

PROMPT_ROWS = 256
"""Rows of logits of prompt tokens that are held at once."""

_HELD_BYTES = 64 << 20  # of results that stay on the device, so that the host waits once for them

Entries = list[TokenLogprobs | None]


def logprob_tensors(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    counts: Sequence[int],
    given: Sequence[Sequence[int]] = (),
) -> list[torch.Tensor]:
    """Return the tensors that `token_logprobs` needs of each row on the host.

    Args:
        logits: float32 [rows, vocab].
        chosen: int64 [rows]; the tokens of which to return the log-probability.
        counts: per row, the number of most likely tokens; -1 is the whole vocabulary.
        given: further tokens, per row; empty if there are none.
    """
    logprobs = logits.log_softmax(-1)
    picked = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = (logprobs > picked).sum(1) + 1
    vocab = logits.shape[1]
    top_values, top_ids = logprobs.topk(max(_wanted(count, vocab) for count in counts), dim=1)
    found = [ranks, top_ids, picked.squeeze(1), top_values]
    if pairs := [(row, token) for row, ids in enumerate(given) for token in ids]:
        rows, tokens = to_device(pairs, logits.device).T
        found.append(logprobs[rows, tokens])
    return found


def token_logprobs(
    lists: Sequence[Any],
    tokens: Sequence[int],
    counts: Sequence[int],
    given: Sequence[Sequence[int]] = (),
) -> list[TokenLogprobs]:
    """Return each row's log-probabilities: of the chosen token, the likeliest, the given ones.

    Args:
        lists: the numbers of what `logprob_tensors` returned for the rows.
        tokens: the chosen ones.
        counts: the same as for `logprob_tensors`.
        given: the same.
    """
    ranks, top_ids, picked, top_values, *more = lists
    limit = len(top_ids[0]) if top_ids else 0
    wanted = [_wanted(count, limit) for count in counts]
    rows = zip(tokens, picked, ranks, top_ids, top_values, wanted, strict=True)
    entries = [
        TokenLogprobs([token, *ids[:count]], [logprob, *values[:count]], rank)
        for token, logprob, rank, ids, values, count in rows
    ]
    if more:
        values = iter(more[0])
        for entry, ids in zip(entries, given, strict=True):
            entry.token_ids += ids
            entry.logprobs += islice(values, len(ids))
    return entries


def _wanted(count: int, limit: int) -> int:
    return limit if count == -1 else min(count, limit)


class _Part(NamedTuple):
    """Log-probabilities of some tokens, on the device, and the entries that they follow."""

    entries: Entries
    tensors: list[torch.Tensor]
    tokens: list[int]
    counts: list[int]


def prompt_logprobs(
    step: StepInput, device: torch.device, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Entries]:
    """Return the log-probabilities of the prompt tokens that a step predicts, by request.

    Args:
        step: whose hidden states were computed.
        device: device of the logits.
        compute_logits: returns float32 logits of rows of the step; the next call may overwrite
            them.
    """
    result: dict[str, Entries] = {}
    held: list[_Part] = []
    for index, request in enumerate(step.requests):
        if (count := request.params.prompt_logprobs) is None:
            continue
        start, prompt = int(step.starts[index]), request.prompt_token_ids
        if start >= len(prompt):
            continue
        first, end = map(int, step.query_starts[index : index + 2])
        targets = list(prompt[start + 1 : start + 1 + end - first])
        entries = result[request.request_id] = [] if start else [None]
        for offset in range(0, len(targets), PROMPT_ROWS):
            part = targets[offset : offset + PROMPT_ROWS]
            begin = first + offset
            logits = compute_logits(torch.arange(begin, begin + len(part), device=device))
            counts = [count] * len(part)
            tensors = logprob_tensors(logits, to_device(part, device), counts)
            held.append(_Part(entries, tensors, part, counts))
            if sum(tensor.nbytes for waiting in held for tensor in waiting.tensors) > _HELD_BYTES:
                _read(held)
    if held:
        _read(held)
    return result


def _read(held: list[_Part]) -> None:
    lists = iter(fetch([tensor for part in held for tensor in part.tensors]))
    for part in held:
        own = [next(lists) for _ in part.tensors]
        part.entries.extend(token_logprobs(own, part.tokens, part.counts))
    held.clear()
