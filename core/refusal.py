"""The answer to a request that is not taken."""

from __future__ import annotations

from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, FinishReason

from .errors import kind_of

__all__ = ["refusal"]


def refusal(request_id: str, error: BaseException) -> EngineCoreOutputs:
    """Return the only output of a request that an error keeps from running."""
    output = EngineCoreOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind=kind_of(error),
    )
    return EngineCoreOutputs(outputs=[output], finished_requests={request_id})
