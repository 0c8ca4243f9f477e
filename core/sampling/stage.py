"""From the logits of a step to its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.plugins import LogitsRequest, Sampler, SamplingRows, TokenLogprobs

from .logprobs import gather_logprobs
from .pipeline import LogitsPipeline

__all__ = ["SamplingStage", "mixed_seed"]


class SamplingStage:
    """Processors, then the sampler; log-probabilities are those of the model itself."""

    def __init__(self, pipeline: LogitsPipeline, sampler: Sampler, device: torch.device) -> None:
        """Take what the worker built."""
        self.pipeline = pipeline
        self.sampler = sampler
        self._device = device
        self._requests: list[LogitsRequest] = []
        self._greedy = torch.empty(0, dtype=torch.bool, device=device)
        self._seeds = torch.empty(0, dtype=torch.int64, device=device)

    def run(
        self, logits: torch.Tensor, requests: list[LogitsRequest]
    ) -> tuple[list[int], dict[str, TokenLogprobs]]:
        """Choose a token per row.

        Args:
            logits: float32 [rows, vocab]; edited in place.
            requests: one per row.

        Returns:
            The token of each row; and by request id the log-probabilities that were asked for.
        """
        asking = [row for row, r in enumerate(requests) if r.params.logprobs is not None]
        raw = logits[asking] if asking else None  # a copy: processors edit in place
        chosen = self.sampler.sample(self.pipeline.apply(logits, requests), self._rows(requests))
        tokens: list[int] = chosen.tolist()
        if raw is None:
            return tokens, {}
        counts = [requests[row].params.logprobs or 0 for row in asking]
        entries = gather_logprobs(raw, chosen[asking], counts)
        return tokens, {
            requests[row].request_id: entry for row, entry in zip(asking, entries, strict=True)
        }

    def _rows(self, requests: Sequence[LogitsRequest]) -> SamplingRows:
        if requests != self._requests:
            self._requests = list(requests)
            self._greedy = torch.tensor([r.params.greedy for r in requests], device=self._device)
            self._seeds = torch.tensor([mixed_seed(r) for r in requests], device=self._device)
        greedy = [r.params.greedy for r in requests]
        positions = torch.tensor([len(r.output_token_ids) for r in requests], device=self._device)
        return SamplingRows(self._greedy, all(greedy), any(greedy), self._seeds, positions)


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the completions of one seed


def mixed_seed(request: LogitsRequest) -> int:
    """Return a request's seed, different for each of its completions, as a signed 64-bit int."""
    mixed = ((request.params.seed or 0) + request.child_index * _GOLDEN) & (2**64 - 1)
    return mixed - 2**64 if mixed >= 2**63 else mixed
