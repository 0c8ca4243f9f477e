"""From the logits of a step to its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hardpoint.plugins import LogitsRequest, RequestFault, Sampler, SamplingRows
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.requests import TokenLogprobs

from .logprobs import gather_logprobs
from .pipeline import Faults, LogitsPipeline
from .processor_runner import StageFault

Recompute = Callable[[], torch.Tensor]
"""Returns the step's logits again, untouched, from its hidden states."""


@dataclass
class Sampled:
    """What sampling came to.

    Attributes:
        tokens: one per row; of a row at fault it means nothing.
        device_ids: the same on the device, int64 [rows].
        logprobs: by row, where they were asked for.
        faults: requests that cannot go on, by id.
    """

    tokens: list[int]
    device_ids: torch.Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    faults: Faults = field(default_factory=dict)


class SamplingStage:
    """Processors, then the sampler; a faulty processor ends the requests that it is guilty of."""

    def __init__(
        self,
        pipeline: LogitsPipeline,
        sampler: Sampler,
        device: torch.device,
        *,
        processed_logprobs: bool = False,
    ) -> None:
        """Take what the worker built."""
        self.pipeline = pipeline
        self.sampler = sampler
        self._device = device
        self._processed_logprobs = processed_logprobs
        self._requests: list[LogitsRequest] = []
        self._greedy = torch.empty(0, dtype=torch.bool, device=device)
        self._seeds = torch.empty(0, dtype=torch.int64, device=device)

    def run(
        self, logits: torch.Tensor, requests: list[LogitsRequest], recompute: Recompute
    ) -> Sampled:
        """Choose a token per row.

        A choice that is not finite, or a processor that raises, makes the step run again on fresh
        logits, with the suspects applied row by row; so the guilty are found, and the others get
        what they would have got without them.

        Args:
            logits: float32 [rows, vocab]; edited in place.
            requests: one per row.
            recompute: gives the same logits again.
        """
        asking = [row for row, r in enumerate(requests) if r.params.logprobs is not None]
        raw = logits[asking] if asking and not self._processed_logprobs else None  # a copy
        isolated: dict[str, Exception | None] = {}
        faults: Faults = {}
        checking = False
        while True:
            try:
                processed = self.pipeline.apply(
                    logits, requests, isolated, faults, checking=checking
                )
            except StageFault as fault:
                isolated[fault.stage.name] = fault.cause
                logits = recompute()
                continue
            chosen = self._chosen(processed, requests)
            tokens, unsound = _to_host(chosen, processed)
            spoilt = [row for row in unsound if requests[row].request_id not in faults]
            if not spoilt:
                break
            logits = recompute()
            self._blame(logits, requests, spoilt, isolated, faults, last=checking)
            checking = True
        result = Sampled(tokens, chosen, faults=faults)
        if asking:
            source = processed[asking] if raw is None else raw
            counts = [requests[row].params.logprobs or 0 for row in asking]
            entries = gather_logprobs(source, chosen[asking], counts)
            result.logprobs = dict(zip(asking, entries, strict=True))
        return result

    def _blame(
        self,
        logits: torch.Tensor,
        requests: Sequence[LogitsRequest],
        spoilt: Sequence[int],
        isolated: dict[str, Exception | None],
        faults: Faults,
        *,
        last: bool,
    ) -> None:
        """Name who spoils each row by itself; isolate whatever may have touched others' rows.

        With `last`, everybody was isolated and checked already.
        """
        for row in spoilt:
            request = requests[row]
            fault = self.pipeline.culprit(logits[row], request)
            if fault is None and last:
                fault = RequestFault(
                    f"sampler {self.sampler.name!r} chose a token that the logits do not allow, "
                    f"or the plugins spoil them together, though none does alone"
                )
            if fault is not None:
                faults[request.request_id] = fault
            for name in self.pipeline.suspects(request):
                isolated.setdefault(name, None)

    def _chosen(self, logits: torch.Tensor, requests: Sequence[LogitsRequest]) -> torch.Tensor:
        """Let the sampler choose, and check what it returns."""
        chosen = self.sampler.sample(logits, self._rows(requests))
        wanted = (torch.int64, (len(requests),))
        got = (getattr(chosen, "dtype", None), tuple(getattr(chosen, "shape", ())))
        if got != wanted:
            raise PluginFaultError(
                f"sampler {self.sampler.name!r}: expected token ids int64 [{len(requests)}], got "
                f"{type(chosen).__name__} {got[0]} {list(got[1])}"
            )
        return chosen

    def _rows(self, requests: Sequence[LogitsRequest]) -> SamplingRows:
        if requests != self._requests:
            self._requests = list(requests)
            self._greedy = torch.tensor([r.params.greedy for r in requests], device=self._device)
            self._seeds = torch.tensor([mixed_seed(r) for r in requests], device=self._device)
        greedy = [r.params.greedy for r in requests]
        positions = torch.tensor([len(r.output_token_ids) for r in requests], device=self._device)
        return SamplingRows(self._greedy, all(greedy), any(greedy), self._seeds, positions)


def _to_host(chosen: torch.Tensor, logits: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the tokens, and the rows whose choice is not finite, in one transfer.

    NaN and +inf win every maximum, and -inf is chosen only where nothing else is left; so the
    chosen logit tells for its whole row.
    """
    sound = logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite()
    tokens, flags = torch.stack((chosen, sound.to(chosen.dtype))).tolist()
    return tokens, [row for row, flag in enumerate(flags) if not flag]


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the completions of one seed


def mixed_seed(request: LogitsRequest) -> int:
    """Return a request's seed, different for each of its completions, as a signed 64-bit int."""
    mixed = ((request.params.seed or 0) + request.child_index * _GOLDEN) & (2**64 - 1)
    return mixed - 2**64 if mixed >= 2**63 else mixed
