"""callables: functions inside SamplingParams that change a request's own logits."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint import plugins
from hardpoint.plugins import (
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Phase,
    PrepareContext,
    RequestError,
    Rows,
)
from hardpoint.registry.adapters.per_request import Answers, Seat, form_of


class RequestCallables(LogitsProcessor):
    """Runs `SamplingParams.logits_processors` over the request's own row, in order.

    They travel as they are, so they work only where the engine runs in the caller's process.
    """

    contract = 1
    phase = Phase.BIAS
    params_fields = ("logits_processors",)

    class Arguments(plugins.Arguments):
        """None: the callables stay in the request's parameters."""

    def __init__(self, context: LogitsContext) -> None:
        """Start with no answers."""
        super().__init__(context)
        self._answers = Answers()

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Check each callable's form.

        Raises:
            RequestError: it is none, or does not take two or three positional parameters.
        """
        for index, call in enumerate(context.params.logits_processors):
            try:
                form_of(call)
            except TypeError as cause:
                raise RequestError(f"logits_processors[{index}]: {cause}") from None
        return arguments

    def start(self, request: LogitsRequest) -> list[Seat]:
        """Give each callable its place; the ids tell them how far the request is."""
        prompt = list(request.prompt_token_ids)
        return [Seat(prompt, call, form_of(call)) for call in request.params.logits_processors]

    def advance(self, state: list[Seat], token: int) -> list[Seat]:  # noqa: ARG002
        """Return the state. (Only what advances is forked.)"""
        return state

    def fork(self, state: list[Seat]) -> list[Seat]:
        """Return fresh places: the callables are the caller's own and are not copied."""
        return [Seat(seat.prompt, seat.call, seat.form) for seat in state]

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the logits, edited row by row."""
        for row, request, seats in zip(logits, rows.requests, rows.states(), strict=True):
            for seat in seats:
                self._answers.run(seat, request, row)
        return logits
