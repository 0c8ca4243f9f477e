"""The worker half of prompt embeddings: puts the rows of requests where their ids are missing."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hardpoint.plugins import SchedulerOutput
from hardpoint.plugins.step_part import InputEmbeddings, WorkerCalls, WorkerStep
from hardpoint.plugins.worker_half import WorkerHalfContext

from .rows import Positions, Rows, positions_of

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.worker_data import StepRows


class _Prompt(NamedTuple):
    rows: Rows
    positions: Positions

    def within(self, start: int, count: int) -> slice:
        first, end = np.searchsorted(self.positions, (start, start + count))
        return slice(int(first), int(end))


class EmbeddedRows(WorkerStep, InputEmbeddings, WorkerCalls):
    """Replaces embedded tokens, in each rank of the first stage.

    The rows of a request are kept until it ends.
    """

    only_users = True

    wants_layers = False

    def __init__(self, context: WorkerHalfContext, *, embeds: bool) -> None:
        """Know no request yet; `embeds` is whether the rank is one of the first stage."""
        self._width, self._embeds = context.hidden_size, embeds
        self._prompts: dict[str, _Prompt] = {}
        self._computed: dict[str, int] = {}

    def call(self, message: bytes) -> bytes:  # noqa: ARG002
        """Return the width of rows."""
        return str(self._width).encode()

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Take the rows of new requests; look which ones the step needs."""
        if not self._embeds:
            return
        for new in plan.new_requests:
            if (rows := new.source.prompt_embeds) is not None:
                self._prompts[new.source.request_id] = _Prompt(rows, positions_of(new.source))
        self._computed = plan.num_computed_tokens()
        self.wants_layers = any(
            self._needs(name, count) for name, count in plan.num_scheduled_tokens.items()
        )

    def _needs(self, name: str, count: int) -> bool:
        prompt = self._prompts.get(name)
        if prompt is None:
            return False
        span = prompt.within(self._computed[name], count)
        return bool(span.start < span.stop)

    def embedded(self, embedded: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        """Return the embedded tokens, with the rows of the step in their places."""
        changed = embedded.clone()
        for name, (start, end) in zip(rows.request_ids, pairwise(rows.starts), strict=True):
            prompt, computed = self._prompts[name], self._computed[name]
            span = prompt.within(computed, end - start)
            if span.start < span.stop:
                places = torch.from_numpy(prompt.positions[span] - computed + start)
                values = _tensor(np.array(prompt.rows[span]))  # which may be read-only
                changed[places.to(changed.device)] = values.to(changed.device, changed.dtype)
        return changed

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests."""
        for name in self._prompts.keys() & request_ids:
            del self._prompts[name]


def _tensor(rows: Rows) -> torch.Tensor:
    """Return rows as a tensor in their dtype, which may share their memory."""
    if rows.dtype == np.uint16:
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)
