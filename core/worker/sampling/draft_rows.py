"""Draft tokens: additional rows of logits of a request, to sample its tokens from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch

from hardpoint.host.boundary.logits.fault_isolation import Recompute
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.plugins import LogitsRequest, ModelRunnerOutput, RequestFault, SchedulerOutput
from hardpoint.plugins.device import to_device
from hardpoint.plugins.requests import TokenLogprobs
from hardpoint.plugins.sampling import Distribution

from .grammar_mask import GrammarMask
from .sampling_stage import SamplingStage


def planned_drafts(
    plan: SchedulerOutput, requests: Sequence[LogitsRequest], last: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Return the drafts of each request, and the index of each row's token.

    Args:
        last: last token of each in the step.
    """
    drafts: list[list[int]] = []
    rows: list[int] = []
    for request, end in zip(requests, last, strict=True):
        planned = plan.draft_token_ids.get(request.request_id, ())
        drafts.append(list(takewhile(lambda token: token != SchedulerOutput.NO_DRAFT, planned)))
        first = end - len(planned)
        rows += range(first, first + 1 + len(drafts[-1]))
    return drafts, rows


class _Sampled(NamedTuple):
    """A sampled token, its distribution if a plugin observes it, its entry if that is wanted."""

    token: int
    seen: Distribution | None
    entry: TokenLogprobs | None


class DraftRows:
    """The rows of the requests of a step; see `DraftedStep` of the contract."""

    def __init__(
        self,
        requests: Sequence[LogitsRequest],
        drafts: Sequence[Sequence[int]],
        stage: SamplingStage,
        recompute: Recompute,
        mask: GrammarMask | None,
    ) -> None:
        """Sample nothing yet.

        Args:
            drafts: drafts of each; may be empty.
            recompute: returns the logits of all rows.
            mask: mask of the rows that a grammar constrains.

        Raises:
            PluginContractError: an enabled processor does not support drafts.
        """
        stage.pipeline.check_drafts()
        self.requests, self.drafts = requests, drafts
        drafted = [request for request, tokens in zip(requests, drafts, strict=True) if tokens]
        self.in_turn = stage.pipeline.observes(drafted)
        self._stage, self._recompute, self._mask = stage, recompute, mask
        self._starts = list(accumulate((1 + len(tokens) for tokens in drafts), initial=0))
        self._logits: torch.Tensor | None = None  # of all rows
        self._views: dict[tuple[int, int], LogitsRequest] = {}
        self._sampled: dict[tuple[int, int], _Sampled | RequestFault] = {}

    def sample(self, rows: Sequence[tuple[int, int]]) -> list[int | None]:
        """Sample tokens, with new copies of the processors' states after drafts."""
        for row in rows:
            self._sampled.pop(row, None)
        views = self._fork(rows)
        at = [self._starts[index] + depth for index, depth in views]
        if not at:
            return [None] * len(rows)
        if at == list(range(self._starts[-1])):
            logits, recompute, mask = self._recompute(), self._recompute, self._mask
        else:
            if self._logits is None:
                self._logits = self._recompute()
            part = to_device(at, self._logits.device)
            logits, recompute = self._logits[part], lambda: self._recompute()[part]
            mask = self._mask and self._mask.rows(at)
        result = self._stage.run(logits, list(views.values()), recompute, mask)
        for place, (row, view) in enumerate(views.items()):
            seen, entry = result.observed.get(place), result.logprobs.get(place)
            fault = result.faults.get(view.request_id)
            self._sampled[row] = fault or _Sampled(result.tokens[place], seen, entry)
        return [self._token(row) for row in rows]

    def _fork(self, rows: Sequence[tuple[int, int]]) -> dict[tuple[int, int], LogitsRequest]:
        """Return the request of each row, or its view after drafts, if that can be made."""
        pipeline, views = self._stage.pipeline, {}
        forks: list[tuple[LogitsRequest, LogitsRequest, int]] = []
        for index, depth in rows:
            if not depth:
                views[index, 0] = self._views[index, 0] = self.requests[index]
                continue
            draft, scratch = self.drafts[index][depth - 1], self._starts[index] + depth - 1
            source = self._views.get((index, depth - 1))
            before = self._sampled.get((index, depth - 1))
            self._views.pop((index, depth), None)
            if source is None:
                continue
            seen = before.seen if isinstance(before, _Sampled) else None
            try:
                view = pipeline.fork(source, draft, pipeline.batch_size + scratch, seen)
            except BaseException as cause:  # it fails again when the token is kept
                raise_unless_fault(cause)
                continue
            forks.append((source, view, draft))
            views[index, depth] = self._views[index, depth] = view
        pipeline.fork_device_state(forks)
        return views

    def _token(self, row: tuple[int, int]) -> int | None:
        sampled = self._sampled.get(row)
        return sampled.token if isinstance(sampled, _Sampled) else None

    def defect(self, accepted: object) -> str | None:
        """Return an error message for the numbers of accepted drafts; None if they are right."""
        if not isinstance(accepted, Sequence) or len(accepted) != len(self.requests):
            return f"expected a number for each of {len(self.requests)} requests"
        for index, count in enumerate(accepted):
            if type(count) is not int or not 0 <= count <= len(self.drafts[index]):
                return f"expected numbers up to the number of drafts, {len(self.drafts[index])}"
            tokens = [self._token((index, depth)) for depth in range(count + 1)]
            if tokens[:-1] != list(self.drafts[index][:count]) or (count and tokens[-1] is None):
                return "expected drafts that equal the tokens sampled for the rows before them"
            if (index, 0) not in self._sampled:
                return "expected that the first row of each request is sampled"
        return None

    def keep(
        self,
        accepted: Sequence[int],
        append: Callable[[str, int], None],
        output: ModelRunnerOutput,
    ) -> None:
        """Add tokens and faults to the result; append tokens and carry the states on.

        Args:
            accepted: number of accepted drafts of each request, without a `defect`.
        """
        pipeline = self._stage.pipeline
        remaining: list[tuple[LogitsRequest, list[_Sampled]]] = []
        for index, (request, count) in enumerate(zip(self.requests, accepted, strict=True)):
            if isinstance(fault := self._sampled[index, 0], RequestFault):
                output.faults[request.request_id] = fault
                continue
            rows = [self._sampled[index, depth] for depth in range(count + 1)]
            sampled = [row for row in rows if isinstance(row, _Sampled)]
            remaining.append((request, sampled))
            output.sampled_token_ids[request.request_id] = [row.token for row in sampled]
            if entries := [row.entry for row in sampled if row.entry is not None]:
                output.logprobs[request.request_id] = entries
            if logprobs := [row.seen.logprob for row in sampled if row.seen is not None]:
                output.observed_logprobs[request.request_id] = logprobs
        depth = 0
        while remaining:
            requests = [request for request, _ in remaining]
            now = [rows[depth] for _, rows in remaining]
            tokens = [sampled.token for sampled in now]
            for request, token in zip(requests, tokens, strict=True):
                append(request.request_id, token)
            pipeline.active_rows(requests)
            ids = to_device(tokens, self._stage.device)
            output.end(pipeline.advance(requests, tokens, ids))
            seen = [place for place, sampled in enumerate(now) if sampled.seen is not None]
            if seen:
                values = [sampled.seen for sampled in now if sampled.seen is not None]
                chosen = [tokens[place] for place in seen]
                output.end(pipeline.observe([requests[place] for place in seen], chosen, values))
            depth += 1
            for request_id in output.finishes.keys() & {request.request_id for request in requests}:
                del output.sampled_token_ids[request_id][depth:]
            over = output.faults.keys() | output.finishes.keys()
            remaining = [k for k in remaining if len(k[1]) > depth and k[0].request_id not in over]
