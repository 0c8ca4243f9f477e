"""Draft tokens: further rows for a request, and verification of the drafts by its own tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import torch

from hardpoint.host.boundary.logits.fault_isolation import Recompute
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.plugins import LogitsRequest, ModelRunnerOutput, RequestFault, SchedulerOutput
from hardpoint.plugins.device import to_device
from hardpoint.plugins.requests import TokenLogprobs

from .grammar_mask import GrammarMask
from .pipeline import LogitsPipeline
from .sampling_stage import Sampled, SamplingStage


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
    forks: list[tuple[LogitsRequest, LogitsRequest, int]] = []
    for request, tokens in zip(requests, drafts, strict=True):
        source = request
        rows.append(source)
        for token in tokens:
            view = pipeline.fork(source, token, scratch_row + len(forks))
            forks.append((source, view, token))
            rows.append(view)
            source = view
    pipeline.fork_device_state(forks)
    return rows


@dataclass
class Verified:
    """The drafts of one request after verification.

    Attributes:
        tokens: the accepted drafts, then one sampled token.
        logprobs: logprobs of the tokens, for processors that observe them.
        entries: entries of the tokens, where the request asks for log-probabilities.
        fault: ends the request.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    fault: RequestFault | None = None

    def add(self, token: int, row: int, sampled: Sampled) -> None:
        """Add a token that was sampled in a row."""
        self.tokens.append(token)
        if (logprob := sampled.observed.get(row)) is not None:
            self.logprobs.append(logprob)
        if (entry := sampled.logprobs.get(row)) is not None:
            self.entries.append(entry)


class DraftStep:
    """The rows of a step in which some requests have drafts.

    Attributes:
        views: request of each row: itself, then once more per draft.
        rows: int64 [rows]; token of the step from whose hidden state each is sampled.
    """

    def __init__(
        self,
        plan: SchedulerOutput,
        requests: list[LogitsRequest],
        last: Sequence[int],
        device: torch.device,
    ) -> None:
        """Find the rows.

        Args:
            requests: those that are sampled.
            last: last token of each in the step.
            device: device of the logits.
        """
        self._requests, self._device = requests, device
        self._drafts: list[list[int]] = []
        self.views: list[LogitsRequest] = []
        rows: list[int] = []
        for request, end in zip(requests, last, strict=True):
            planned = plan.draft_token_ids.get(request.request_id, ())
            drafts = list(takewhile(lambda token: token != SchedulerOutput.NO_DRAFT, planned))
            first = end - len(planned)
            self._drafts.append(drafts)
            self.views += [request] * (1 + len(drafts))
            rows += range(first, first + 1 + len(drafts))
        self.rows = to_device(rows, device)

    def verify(
        self, stage: SamplingStage, recompute: Recompute, mask: GrammarMask | None
    ) -> list[Verified]:
        """Sample the rows; return the tokens of each request.

        The rows of a draft that turns out to be wrong must not end a request. So where anything
        fails for one with drafts, they are sampled in turn.

        Args:
            stage: samples the rows.
            recompute: returns the logits of all rows.
            mask: mask of the rows that a grammar constrains.

        Raises:
            PluginContractError: an enabled processor does not support drafts.
        """
        pipeline, requests, drafts = stage.pipeline, self._requests, self._drafts
        pipeline.check_drafts()
        drafted = [r for r, tokens in zip(requests, drafts, strict=True) if tokens]
        scratch_row = pipeline.batch_size
        if not pipeline.observes(drafted):
            try:
                views = with_drafts(requests, drafts, pipeline, scratch_row)
            except BaseException as cause:
                raise_unless_fault(cause)
            else:
                sampled = stage.run(recompute(), views, recompute, mask)
                if not any(request.request_id in sampled.faults for request in drafted):
                    return _verified(sampled, requests, drafts)
        return verify_in_turn(stage, requests, drafts, recompute, scratch_row, mask)

    def keep(
        self,
        verified: Sequence[Verified],
        pipeline: LogitsPipeline,
        append: Callable[[str, int], None],
        output: ModelRunnerOutput,
    ) -> None:
        """Add tokens and faults to the result; append tokens and carry the states on.

        Args:
            verified: what `verify` returned.
            pipeline: holds the states.
            append: appends a token to a request in the batch.
            output: gets the tokens.
        """
        kept: list[tuple[LogitsRequest, Verified]] = []
        for request, result in zip(self._requests, verified, strict=True):
            request_id = request.request_id
            if result.fault is not None:
                output.faults[request_id] = result.fault
                continue
            kept.append((request, result))
            output.sampled_token_ids[request_id] = result.tokens
            if result.entries:
                output.logprobs[request_id] = result.entries
            if result.logprobs:
                output.observed_logprobs[request_id] = result.logprobs
        depth = 0
        while kept:
            requests = [request for request, _ in kept]
            tokens = [result.tokens[depth] for _, result in kept]
            for request, token in zip(requests, tokens, strict=True):
                append(request.request_id, token)
            pipeline.active_rows(requests)
            output.faults |= pipeline.advance(requests, tokens, to_device(tokens, self._device))
            seen = [(request, result) for request, result in kept if result.logprobs]
            if seen:
                output.faults |= pipeline.observe(
                    [request for request, _ in seen],
                    [result.tokens[depth] for _, result in seen],
                    [result.logprobs[depth] for _, result in seen],
                )
            depth += 1
            kept = [
                (request, result)
                for request, result in kept
                if len(result.tokens) > depth and request.request_id not in output.faults
            ]


def _verified(
    sampled: Sampled, requests: Sequence[LogitsRequest], drafts: Sequence[Sequence[int]]
) -> list[Verified]:
    results: list[Verified] = []
    first = 0
    kept = accepted(sampled.tokens, drafts)
    for request, own, tokens in zip(requests, drafts, kept, strict=True):
        result = Verified(fault=sampled.faults.get(request.request_id))
        for row, token in enumerate(tokens, first):
            result.add(token, row, sampled)
        first += 1 + len(own)
        results.append(result)
    return results


def verify_in_turn(
    stage: SamplingStage,
    requests: Sequence[LogitsRequest],
    drafts: Sequence[Sequence[int]],
    recompute: Recompute,
    scratch_row: int,
    mask: GrammarMask | None = None,
) -> list[Verified]:
    """Verify drafts of requests with processors that observe: one position after the other.

    The state after a draft depends on the processed logits of the row before. So the rows of one
    request run one after the other, on copies of its states, up to the first draft that is not
    accepted; those of different requests run together.

    Args:
        stage: samples the rows.
        requests: those that are sampled.
        drafts: the tokens drafted for each; may be empty.
        recompute: returns the logits of all rows, in the order of `with_drafts`.
        scratch_row: first row beyond the batch, for the views' device state.
        mask: mask of the rows that a grammar constrains, in the same order.

    Raises:
        PluginContractError: an enabled processor does not support drafts.
    """
    pipeline = stage.pipeline
    pipeline.check_drafts()
    starts = list(accumulate((1 + len(tokens) for tokens in drafts), initial=0))
    results = [Verified() for _ in requests]
    views = dict(enumerate(requests))  # of the requests whose drafts were all accepted so far
    logits = recompute()
    depth = 0
    while views:
        at = [starts[index] + depth for index in views]
        rows = to_device(at, logits.device)
        again = functools.partial(_some_rows, recompute, rows)
        sampled = stage.run(logits[rows], list(views.values()), again, mask and mask.rows(at))
        forks: list[tuple[LogitsRequest, LogitsRequest, int]] = []
        following: dict[int, LogitsRequest] = {}
        for row, (index, view) in enumerate(views.items()):
            result = results[index]
            if (fault := sampled.faults.get(view.request_id)) is not None:
                # After a draft, the next step meets it again, unless the request ends before.
                result.fault = None if depth else fault
                continue
            token = sampled.tokens[row]
            result.add(token, row, sampled)
            if list(drafts[index][depth : depth + 1]) == [token]:
                scratch, observed = scratch_row + starts[index] + depth, sampled.observed.get(row)
                try:
                    following[index] = pipeline.fork(view, token, scratch, observed)
                except BaseException as cause:  # it fails again when the token is kept
                    raise_unless_fault(cause)
                    continue
                forks.append((view, following[index], token))
        pipeline.fork_device_state(forks)
        views = following
        depth += 1
    return results


def _some_rows(recompute: Recompute, rows: torch.Tensor) -> torch.Tensor:
    return recompute()[rows]


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
