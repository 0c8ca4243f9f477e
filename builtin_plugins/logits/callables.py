"""`SamplingParams.logits_processors`: callables of the request itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardpoint.plugins import Arguments as BaseArguments
from hardpoint.plugins import (
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Phase,
    PrepareContext,
    RequestError,
    Rows,
)
from hardpoint.toolkit.logits_calls import (
    RequestProcessor,
    ResultCache,
    call_signature,
    prompt_of,
    with_ids,
)

if TYPE_CHECKING:
    import torch


class RequestCallables(LogitsProcessor):
    """Runs `SamplingParams.logits_processors` over the request's own row, in order.

    They travel as they are, so they work only where the engine runs in the caller's process.

    A callable takes `(output_ids, logits)` or `(prompt_ids, output_ids, logits)` and returns
    the logits, also after an edit in place. Each completion calls a deep copy; an object that
    cannot be copied ends the request. In other processes, use a factory with the package
    hardpoint-vllm.
    """

    contract = 1
    phase = Phase.BIAS
    params_fields = ("logits_processors",)

    class Arguments(BaseArguments):
        """No arguments: the callables stay in the request's parameters."""

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._results = ResultCache()

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Check the signature of each callable.

        Raises:
            RequestError: it cannot be called, does not take two or three positional parameters, or
                needs ids of a prompt that has embeddings.
        """
        for index, call in enumerate(context.params.logits_processors):
            try:
                with_ids(call_signature(call), context.prompt_token_ids)
            except (TypeError, ValueError) as cause:
                raise RequestError(f"logits_processors[{index}]: {cause}") from None
        return arguments

    def start(self, request: LogitsRequest) -> list[RequestProcessor]:
        """Return a processor per callable, a separate one for each completion of a request."""
        prompt = prompt_of(request)
        return [
            RequestProcessor(prompt, call, call_signature(call)).copy()
            for call in request.params.logits_processors
        ]

    def advance(self, state: list[RequestProcessor], token: int) -> list[RequestProcessor]:  # noqa: ARG002
        """Return the state unchanged, for the token ids carry it."""
        return state  # defined because only states that advance are forked

    def fork(self, state: list[RequestProcessor]) -> list[RequestProcessor]:
        """Return the state unchanged: `apply` makes the copies for draft rows."""
        return state

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the logits, edited row by row."""
        for row, request, processors in zip(logits, rows.requests, rows.states(), strict=True):
            for processor in processors:
                self._results.run_for(processor, request, row)
        return logits
