"""The half in the worker: reads the logits of traced requests after each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec
import torch

from hardpoint.plugins import LogitsRequest, Sampler, SchedulerOutput
from hardpoint.plugins.sampling import LogitsStage
from hardpoint.plugins.step_part import WorkerStep
from hardpoint.toolkit.trace import Draw

from .changes import Stages, token_trace
from .messages import Asked, Report, SampledPosition


@dataclass
class _Row:
    """One position of a step.

    Attributes:
        request: the request, or its view after drafts.
        stages: logits of the last pass.
        first: logits of the pass that met a fault first; empty if there was one pass.
    """

    request: LogitsRequest
    stages: Stages
    first: Stages = field(default_factory=list)


class LogitsReader(WorkerStep):
    """Keeps the logits of the rows of a step on the host until their tokens are known."""

    def __init__(
        self,
        rank: int,
        sampler: type[Sampler],
        name: str,
        *,
        num_candidates: int,
        num_positions: int,
        max_rows: int,
    ) -> None:
        """Read nothing yet; for the numbers, see the options of the part."""
        self._rank, self._draws, self._sampler = rank, sampler.draws, name
        self._num_candidates, self._num_positions = num_candidates, num_positions
        self._max_rows = max_rows
        self._rows: dict[str, dict[int, _Row]] = {}  # by request and output position
        self._num_rows = 0
        self._drafts: Mapping[str, Sequence[int]] = {}
        self._tokens: Mapping[str, Sequence[int]] = {}
        self._step = 0
        self._asked: Asked = {}

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Forget the step before; take how many candidates each request wants."""
        self._asked = msgspec.msgpack.decode(data, type=Asked)
        self._rows, self._num_rows, self._tokens = {}, 0, {}
        self._drafts, self._step = plan.draft_token_ids, plan.step

    def processed(
        self, stage: LogitsStage, logits: torch.Tensor, requests: Sequence[LogitsRequest]
    ) -> None:
        """Keep the logits of rows after a stage."""
        for request, row in zip(requests, logits.cpu().numpy(), strict=True):
            position = len(request.output_token_ids)
            known = self._rows.setdefault(request.request_id, {})
            if stage.phase is not None:  # not the model's own logits
                if (entry := known.get(position)) is not None:
                    entry.stages.append((stage, row))
            elif (entry := known.get(position)) is not None:  # once more, after a fault
                entry.first, entry.stages = entry.first or entry.stages, [(stage, row)]
            elif position < self._num_positions and self._num_rows < self._max_rows:
                self._num_rows += 1
                known[position] = _Row(request, [(stage, row)])

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Keep the tokens of the step."""
        self._tokens = token_ids

    def report(self) -> bytes | None:
        """Return the records of the positions that got a token, or at which a request ended."""
        report: Report = {}
        for request_id, rows in self._rows.items():
            tokens, first = self._tokens.get(request_id, ()), min(rows, default=0)
            drafts = _real(self._drafts.get(request_id, ()))
            for place, token in enumerate(tokens or [None]):
                if (row := rows.get(first + place)) is not None:
                    draft = drafts[place] if place < len(drafts) else None
                    record = self._record(row, first + place, token, draft)
                    report.setdefault(request_id, []).append(record)
        self._rows = {}
        return msgspec.msgpack.encode(report) if report else None

    def _record(
        self, row: _Row, position: int, token: int | None, draft: int | None
    ) -> SampledPosition:
        stages = row.stages if token is not None or not row.first else row.first
        params = row.request.params
        seed = None if params.greedy else params.seed
        trace = token_trace(
            row.request,
            position,
            token,
            stages,
            self._asked.get(row.request.request_id, self._num_candidates),
            draws=self._draws,
            step=self._step,
            draft=draft,
            worker=self._rank,
            draw=Draw(sampler=self._sampler, greedy=params.greedy, seed=seed),
        )
        return SampledPosition(position, msgspec.json.encode(trace))


def _real(drafts: Sequence[int]) -> list[int]:
    """Return the drafts before the first missing one."""
    return list(takewhile(lambda token: token != SchedulerOutput.NO_DRAFT, drafts))
