"""What the requests of a step ask of its sampling, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.plugins import LogitsRequest, SamplingRows
from hardpoint.plugins.device import to_device


class StepRows:
    """The rows of a step, for as long as they stay the same.

    Attributes:
        with_logprobs: rows whose requests ask for log-probabilities.
        logprob_counts: how many most likely tokens each of these asks for.
    """

    def __init__(self, requests: Sequence[LogitsRequest], device: torch.device) -> None:
        """Derive what stays the same."""
        self._requests = list(requests)
        self._device = device
        greedy = [r.params.greedy for r in requests]
        self._greedy = to_device(greedy, device)
        self._all_greedy, self._any_greedy = all(greedy), any(greedy)
        self._seeds = to_device([mixed_seed(r) for r in requests], device)
        self._arguments: list[Any] = [r.sampler_arguments for r in requests]
        self._columns: dict[str, torch.Tensor] = {}
        counts = {row: r.params.logprobs for row, r in enumerate(requests)}
        self.logprob_counts = [count for count in counts.values() if count is not None]
        self.with_logprobs = [row for row, count in counts.items() if count is not None]
        self._logprob_index: torch.Tensor | None = None
        if self.with_logprobs and len(self.with_logprobs) < len(requests):
            self._logprob_index = to_device(self.with_logprobs, device)

    def are_of(self, requests: Sequence[LogitsRequest]) -> bool:
        """Return whether these are the rows of some requests."""
        return self._requests == requests  # compares identities: LogitsRequest has no equality

    def for_sampler(self) -> SamplingRows:
        """Return the rows as a sampler gets them in this step."""
        positions = [len(request.output_token_ids) for request in self._requests]
        return SamplingRows(
            self._greedy,
            self._all_greedy,
            self._any_greedy,
            self._seeds,
            to_device(positions, self._device),
            self._arguments,
            self._columns,
        )

    def of_logprobs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor [rows, ...] that log-probabilities need; if all, itself."""
        index = self._logprob_index
        return tensor if index is None else tensor.index_select(0, index)


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the completions of one seed


def mixed_seed(request: LogitsRequest) -> int:
    """Return a request's seed as a signed 64-bit int; each of its completions gets another."""
    mixed = ((request.params.seed or 0) + request.child_index * _GOLDEN) & (2**64 - 1)
    return mixed - 2**64 if mixed >= 2**63 else mixed
