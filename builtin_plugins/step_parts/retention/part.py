"""Retention as a step part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from hardpoint import plugins
from hardpoint.plugins import EngineConfig, FrontendHalf, Meta, StepPart
from hardpoint.plugins.step_part import EngineHalfContext, FrontendHalfContext

from .sessions import RetainedSessions, RetainingRequests


class PrefixRetention(StepPart):
    """Requests with `retain_seconds`: eviction policies keep their blocks, if possible.

    Retention is not guaranteed. A fault loses retention, and ends no request.
    """

    contract = 1
    fault_scope = "step"

    class Options(plugins.Options):
        """Options.

        Attributes:
            max_seconds: maximum of `retain_seconds`; longer times are reduced to it.
            share: maximum share of the KV cache that the requests of one cache salt, such as a
                client's key, may retain; the first blocks of each request are retained first.
            max_sessions: maximum number of sessions; further sessions retain nothing.
        """

        max_seconds: Annotated[float, Meta(gt=0)] = 3600.0
        share: Annotated[float, Meta(ge=0, le=1)] = 0.25
        max_sessions: Annotated[int, Meta(ge=1)] = 100_000

    options: Options

    @classmethod
    def request_fields(cls, config: EngineConfig) -> Collection[str]:  # noqa: ARG003
        """Return the request fields of retention."""
        return ("retention",)

    @classmethod
    def merge_answers(cls, method: str, answers: Sequence[Any]) -> Any:
        """Return "accepted" if one of several engines had the session."""
        if method == "release" and "accepted" in answers:
            return "accepted"
        return super().merge_answers(method, answers)

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf:  # noqa: ARG002
        """Return the half that includes the outcome of a wish in the output."""
        return RetainingRequests(self.name)

    def engine_half(self, context: EngineHalfContext) -> RetainedSessions:
        """Return the half that knows the sessions."""
        options, caching = self.options, self.context.config.kv_cache.prefix_caching
        share = options.share if caching else 0.0
        return RetainedSessions(context, options.max_seconds, share, options.max_sessions)
