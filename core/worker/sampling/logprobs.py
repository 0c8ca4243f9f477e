"""Log-probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hardpoint.core.worker.input_batch import StepInput
from hardpoint.plugins.device import to_device
from hardpoint.plugins.process.device import HostCopy
from hardpoint.plugins.requests import TokenLogprobs
from hardpoint.toolkit.logits_calls.logprobs import logprob_tensors, token_logprobs

PROMPT_ROWS = 256
"""Rows of logits of prompt tokens that are held at once."""

_HELD_BYTES = 64 << 20  # of results that stay on the device, so that the host waits once for them

Entries = list[TokenLogprobs | None]


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
    lists = iter(HostCopy([tensor for part in held for tensor in part.tensors]).read())
    for part in held:
        values = [next(lists) for _ in part.tensors]
        part.entries.extend(token_logprobs(values, part.tokens, part.counts))
    held.clear()


class Float32Rows:
    """Memory for rows of logits in float32, which each call overwrites.

    New memory of this size costs a page fault per 4 KB, many times the conversion.
    """

    def __init__(self) -> None:
        self._rows = torch.empty(0)

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows, vocab], in float32."""
        count = len(logits)
        if len(self._rows) < count:
            shape = 1 << (count - 1).bit_length(), logits.shape[1]
            self._rows = torch.empty(shape, dtype=torch.float32)
        return self._rows[:count].copy_(logits)
