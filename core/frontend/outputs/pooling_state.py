"""State of one pooling request in the frontend; it has no tokens and no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.plugins import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestOutputKind
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.requests.stats import RequestMetrics

from .request_state import ParentRequest


class PoolingState:
    """The result of one pooling request so far; the counterpart of RequestState.

    Attributes:
        observed: states that observers have of it.
        metrics: for its last output, which has none.
        index: always 0, because a prompt has one pooling request.
        num_tokens: always 0.
        plain: None, because it has no text.
    """

    index = 0
    num_tokens = 0
    plain: None = None
    observed: Sequence[Any] = ()
    metrics: RequestMetrics | None = None

    def __init__(self, request: EngineCoreRequest, parent: ParentRequest) -> None:
        self.parent = parent
        self.plugins = tuple(request.plugin_args)
        self.finish_reason: FinishReason | None = None
        self._request = request
        self._final_only = request.params.output_kind is RequestOutputKind.FINAL_ONLY
        self._result: Any = None
        self._error: str | None = None

    def update(self, output: EngineCoreOutput) -> None:
        """Update the state from one engine output."""
        self.finish_reason, self._error = output.finish_reason, output.error
        if output.pooling_output is not None:
            self._result = output.pooling_output

    def end(self, reason: FinishReason) -> None:
        """End the request without the engine."""
        self.finish_reason = reason

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def rejected(self, output: EngineCoreOutput) -> PoolingRequestOutput:
        """Return the user's output of a request that the engine rejected."""
        self.finish_reason, self._error = FinishReason.ERROR, output.error
        rejection = self._to_user()
        rejection.error_kind = output.error_kind
        return rejection

    def output(self) -> PoolingRequestOutput | None:
        """Return the user's next output, if there is one."""
        if self.finish_reason is None and (self._final_only or self._result is None):
            return None
        return self._to_user()

    def _to_user(self) -> PoolingRequestOutput:
        finished = self.finish_reason is not None
        return PoolingRequestOutput(
            request_id=self.parent.request_id,
            outputs=self._result,
            prompt_token_ids=self._request.known_prompt_ids,
            finished=finished,
            finish_reason=str(self.finish_reason) if finished else None,
            error=self._error,
        )
