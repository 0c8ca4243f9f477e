"""Sampling: from the logits of a step to its tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.logits.fault_isolation import FaultIsolation, Recompute
from hardpoint.host.boundary.logits.processor_runner import Faults, ProcessorError
from hardpoint.host.system.transfers import select_rows
from hardpoint.plugins import (
    LogitsRequest,
    Ops,
    Phase,
    RequestFault,
    Sampler,
    SamplerContext,
    SamplingRows,
)
from hardpoint.plugins.component.behaviour import UnusableError
from hardpoint.plugins.device import to_device
from hardpoint.plugins.exponential_race import mixed_seed
from hardpoint.plugins.process.device import HostCopy
from hardpoint.plugins.requests import TokenLogprobs
from hardpoint.plugins.sampling import Distribution
from hardpoint.plugins.sampling.sampler import TOKENS
from hardpoint.toolkit.logits_calls import states
from hardpoint.toolkit.logits_calls.logprobs import logprob_tensors, token_logprobs

from .grammar_mask import GrammarMask
from .pipeline import LogitsPipeline
from .processors import RequestArguments, open_runner, open_states


@dataclass
class Sampled:
    """The result of sampling, or of one of its passes.

    Attributes:
        tokens: one per row; without meaning for the row of a request with a fault.
        device_ids: the same on the device, int64 [rows].
        bad_rows: rows with a chosen logit that is not finite, without requests with a fault.
        logprobs: by row, where the request asks for them.
        observed: the distribution of the token, by row, where a plugin of the request observes it.
        faults: requests that cannot go on, by id.
    """

    tokens: list[int]
    device_ids: torch.Tensor
    bad_rows: Sequence[int] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    observed: dict[int, Distribution] = field(default_factory=dict)
    faults: Faults = field(default_factory=dict)


@dataclass
class _Choice:
    """The result of one pass on the device.

    Attributes:
        copy: tokens, logits and the tensors of log-probabilities, on their way to the host.
        observing: rows with tokens that a processor observes.
        num_observed: number of copied tensors with their distributions.
    """

    device_ids: torch.Tensor
    copy: HostCopy
    observing: Sequence[int]
    num_observed: int


Launched = tuple[torch.Tensor, HostCopy, Callable[[], Sampled]]
"""Tokens on the device, their copy to the host, and the function that waits for the result."""


class _StepRows:
    """The rows of a step, for as long as they stay the same.

    Attributes:
        requests: one per row.
        with_logprobs: rows of requests that ask for log-probabilities.
        logprob_counts: how many most likely tokens each of these asks for.
        given: the tokens that each of these names.
    """

    def __init__(
        self,
        requests: Sequence[LogitsRequest],
        device: torch.device,
        key: str = "",
        *,
        draws: bool,
    ) -> None:
        self._key = key
        self.requests = list(requests)
        self._device = device
        greedy = [r.params.greedy for r in requests]
        self._greedy = to_device(greedy, device)
        self._all_greedy, self._any_greedy = all(greedy), any(greedy)
        seeds = [0] * len(greedy)  # which `draw` does not use if all rows are greedy
        if not (draws and self._all_greedy):
            seeds = [mixed_seed(r.params.seed, r.child_index) for r in requests]
        self._seeds = to_device(seeds, device)
        self._arguments: list[Any] = [r.sampler_arguments for r in requests]
        self._columns: dict[str, torch.Tensor] = {}
        self.with_logprobs = [row for row, r in enumerate(requests) if r.params.wants_logprobs]
        self.logprob_counts: list[int] = []
        self.given: list[list[int]] = []
        self._logprob_index: torch.Tensor | None = None
        if not self.with_logprobs:
            return
        all_params = [requests[row].params for row in self.with_logprobs]
        self.logprob_counts = [params.logprobs or 0 for params in all_params]
        self.given = [params.logprob_token_ids or [] for params in all_params]
        if len(all_params) < len(requests):
            self._logprob_index = to_device(self.with_logprobs, device)

    def for_sampler(self) -> SamplingRows:
        count = len(self.requests)
        lengths = (len(request.output_token_ids) for request in self.requests)
        return SamplingRows(
            self._greedy,
            self._all_greedy,
            self._any_greedy,
            self._seeds,
            to_device(np.fromiter(lengths, np.int64, count), self._device),
            self._arguments,
            self._columns,
            [request.state.get(self._key) for request in self.requests] if self._key else (),
        )

    def of_logprobs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor [rows, ...] that log-probabilities need; if all, itself."""
        index = self._logprob_index
        return tensor if index is None else tensor.index_select(0, index)


class SamplingStage:
    """The logits processors, then the sampler.

    A step takes one pass. Where processors fail, more follow on fresh logits, so that only the
    requests at fault end and the others get the tokens that they would have got without them:

    - normal: each processor runs on all of its rows at once.
    - isolate, at most once: processors that raised run row by row.
    - check, repeated while a row is bad: for each row without a finite choice, its processors are
      tried on that row alone, and run row by row in all other rows; rows are checked after each
      batch-level processor.

    Args:
        copy_to_host: see `Ops`.
        processed_logprobs: whether log-probabilities are of the processed logits.
    """

    def __init__(
        self,
        pipeline: LogitsPipeline,
        sampler: Sampler,
        device: torch.device,
        *,
        processed_logprobs: bool = False,
        calls: PluginCalls | None = None,
        copy_to_host: Callable[[Sequence[torch.Tensor]], HostCopy] = HostCopy,
    ) -> None:
        self._copy_to_host = copy_to_host
        self._sample = sampler.sample
        if calls is not None:
            self._sample = calls.bound("sample", sampler.sample)
        self.pipeline = pipeline
        self.sampler = sampler
        self.device = device
        self._processed_logprobs = processed_logprobs
        arguments = RequestArguments(pipeline, sampler)
        self.arguments_of, self.default_arguments = arguments.of, arguments.defaults
        self.states_key = arguments.states_key
        self._rows = _StepRows((), device, draws=sampler.draws)
        self._raw: torch.Tensor | None = None  # of the step's rows with log-probabilities

    def run(
        self,
        logits: torch.Tensor,
        requests: list[LogitsRequest],
        recompute: Recompute,
        mask: GrammarMask | None = None,
    ) -> Sampled:
        """Choose a token per row, and wait for it; as `launch`."""
        return self.launch(logits, requests, recompute, mask)[2]()

    def launch(
        self,
        logits: torch.Tensor,
        requests: list[LogitsRequest],
        recompute: Recompute,
        mask: GrammarMask | None = None,
    ) -> Launched:
        """Choose a token per row on the device.

        Args:
            logits: float32 [rows, vocab]; edited in place.
            requests: one per row.
            recompute: returns the same logits again.
            mask: mask of the rows that a grammar constrains.

        Raises:
            PluginFaultError: the sampler failed, or a plugin with faults of scope engine.
        """
        if self._rows.requests != requests:  # compares identities: LogitsRequest has no equality
            self._rows = _StepRows(requests, self.device, self.states_key, draws=self.sampler.draws)
        if self._rows.with_logprobs and not self._processed_logprobs:
            part = self._rows.of_logprobs(logits)
            self._raw = part.clone() if part is logits else part
        try:
            return self._launch(logits, requests, recompute, mask)
        except BaseException:
            self._raw = None
            raise

    def _launch(
        self,
        logits: torch.Tensor,
        requests: list[LogitsRequest],
        recompute: Recompute,
        mask: GrammarMask | None,
    ) -> Launched:
        isolation: FaultIsolation | None = None
        if mask is not None or self.pipeline.observer is not None:
            self.pipeline.masked(logits, requests, mask)
        try:
            # The normal pass.
            choice = self._choose(self.pipeline.apply(logits, requests), requests)
        except ProcessorError as error:
            isolation = self._isolation(requests, recompute, mask)
            isolation.isolate(error.runner, error.cause)
            choice = self._choose(isolation.run(isolation.recompute()), requests)
        finish = functools.partial(self._finish, choice, requests, recompute, mask, isolation)
        return choice.device_ids, choice.copy, finish

    def _finish(
        self,
        choice: _Choice,
        requests: list[LogitsRequest],
        recompute: Recompute,
        mask: GrammarMask | None,
        isolation: FaultIsolation | None,
    ) -> Sampled:
        result = self._read(choice, requests, isolation.faults if isolation else ())
        if result.bad_rows:
            isolation = isolation or self._isolation(requests, recompute, mask)
            result = self._check_pass(result, requests, isolation)
        if isolation is not None:
            result.faults = isolation.faults
        self._raw = None
        for row in () if mask is None else mask.forbidden(result.tokens):
            fault = self._forced(requests[row], result.tokens[row])
            result.faults.setdefault(requests[row].request_id, fault)
        return result

    def _forced(self, request: LogitsRequest, token: int) -> RequestFault:
        used = [runner for runner in self.pipeline.runners if runner.is_used_by(request)]
        forcing = [r for r in used if r.processor.phase is Phase.FORCE] or used
        names = " or ".join(runner.name for runner in forcing) or self.sampler.name
        return RequestFault(
            f"{names} forced the token {token}, which the grammar of `structured` forbids",
            forcing[0].name if len(forcing) == 1 else None,
        )

    def _isolation(
        self, requests: list[LogitsRequest], recompute: Recompute, mask: GrammarMask | None
    ) -> FaultIsolation:
        def masked() -> torch.Tensor:
            return self.pipeline.masked(recompute(), requests, mask)

        return FaultIsolation(self.pipeline, requests, masked, () if mask is None else mask)

    def _check_pass(
        self,
        choice: Sampled,
        requests: list[LogitsRequest],
        isolation: FaultIsolation,
    ) -> Sampled:
        """Find the fault of each bad row and choose again, until no row is bad.

        A row that is still bad although its processors ran row by row and no batch-level processor
        damaged it is the sampler's fault, or that of several processors together.
        """
        is_checked = False
        while choice.bad_rows:
            logits = isolation.recompute()
            for row in choice.bad_rows:
                request = requests[row]
                fault = isolation.find_fault(logits, row)
                if fault is None and is_checked:
                    fault = RequestFault(
                        f"sampler {self.sampler.name!r} chose a token that the logits do not "
                        f"allow, or the plugins corrupt them together, though none does alone"
                    )
                if fault is not None:
                    isolation.faults[request.request_id] = fault
                isolation.isolate_users(request)
            is_checked = True
            processed = isolation.run(logits, check_batch_level=True)
            choice = self._read(self._choose(processed, requests), requests, isolation.faults)
        return choice

    def _choose(self, logits: torch.Tensor, requests: Sequence[LogitsRequest]) -> _Choice:
        """Let the sampler choose from processed logits, and begin the copy of its result.

        All that the host gets of a step travels together, so that it waits once for the device.
        """
        chosen, picked = self._sampled(logits)
        rows, observing = self._rows, self.pipeline.observing_rows(requests)
        wanted = [chosen, picked]
        seen: Sequence[torch.Tensor] = ()
        if observing:
            rows_logits, ids = select_rows(logits, observing), select_rows(chosen, observing)
            in_full = self.pipeline.wants_distribution
            seen = states.distribution_tensors(rows_logits, ids, in_full=in_full)
            wanted += seen
        if rows.with_logprobs:
            source = rows.of_logprobs(logits) if self._raw is None else self._raw
            chosen_ids, counts = rows.of_logprobs(chosen), rows.logprob_counts
            wanted += logprob_tensors(source, chosen_ids, counts, rows.given)
        return _Choice(chosen, self._copy_to_host(wanted), observing, len(seen))

    def _read(
        self, launched: _Choice, requests: Sequence[LogitsRequest], faults: Collection[str]
    ) -> Sampled:
        """Wait for a pass; return its result, checked."""
        rows, observing = self._rows, launched.observing
        tokens, logit_of, *more = launched.copy.read()
        bad_rows = [
            row
            for row, (logit,) in enumerate(logit_of)
            if not math.isfinite(logit) and requests[row].request_id not in faults
        ]
        choice = Sampled(tokens, launched.device_ids, bad_rows)
        if observing:
            values = states.distributions(more[: launched.num_observed])
            choice.observed.update(zip(observing, values, strict=True))
            del more[: launched.num_observed]
        if rows.with_logprobs:
            chosen_there = [tokens[row] for row in rows.with_logprobs]
            entries = token_logprobs(more, chosen_there, rows.logprob_counts, rows.given)
            choice.logprobs.update(zip(rows.with_logprobs, entries, strict=True))
        return choice

    def _sampled(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token that the sampler chooses of each row, and its logit [rows, 1]."""
        chosen = self._sample(logits, self._rows.for_sampler())
        try:
            TOKENS.check(chosen, (logits,), (logits,))
        except UnusableError as wrong:
            raise PluginFaultError(f"sampler {self.sampler.name!r}: {wrong}") from None
        # NaN and +inf win every maximum, and -inf is chosen only where no other token is left; so
        # the chosen logit shows whether its row is finite.
        try:
            return chosen, logits.gather(1, chosen.unsqueeze(1))
        except RuntimeError:
            self._check_vocabulary(chosen, logits.shape[1])
            raise

    def _check_vocabulary(self, chosen: torch.Tensor, size: int) -> None:
        wrong = [token for token in chosen.tolist() if not 0 <= token < size]
        if wrong:
            raise PluginFaultError(
                f"sampler {self.sampler.name!r}: expected token ids in 0..{size - 1}, "
                f"got {wrong[0]}"
            )


def open_stage(
    spec: WorkerSpec, ops: Ops, activity: Activity, observed_states: states.ObservedStates
) -> SamplingStage:
    """Build the logits processors and the sampler of a worker.

    Args:
        observed_states: states of logits processors of an earlier model.

    Raises:
        PluginError: one cannot be built.
    """
    runners = [
        open_runner(spec, entry, ops, activity)
        for entry in spec.plugins.entries("logits_processors")
    ]
    entry = spec.plugins.one("samplers")
    sampler = spec.plugins.create(
        entry, SamplerContext, device=spec.device, vocab_size=spec.model_config.vocab_size, ops=ops
    )
    keeping = open_states(spec, sampler, entry.source, activity)
    quarantined = spec.plugins.manifest.quarantined_of("logits_processors")
    pipeline = LogitsPipeline(runners, spec.device, observed_states, keeping, quarantined)
    if spec.num_draft_tokens:
        pipeline.check_drafts()
    return SamplingStage(
        pipeline,
        sampler,
        spec.device,
        processed_logprobs=spec.config.sampler.logprobs == "processed",
        calls=PluginCalls(activity, "samplers", entry.source),
        copy_to_host=ops.copy_to_host,
    )
