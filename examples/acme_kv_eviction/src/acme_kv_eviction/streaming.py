"""StreamingLLM (arXiv:2309.17453): attention to the first tokens and to a recent window."""

from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import Meta, Request, SchedulerOutput, StepPart
from hardpoint.plugins.step_part import (
    AdmissionGate,
    EngineHalfContext,
    PlanData,
    RequestLifecycle,
)


class StreamingLLM(StepPart):
    """Releases the KV blocks between the first tokens of a request and its last ones."""

    contract = 1
    named_only = releases_blocks = True

    class Arguments(plugins.Arguments):
        """The tokens that a request attends to.

        Attributes:
            sinks: first tokens that all tokens attend to.
            window: least number of tokens before a token that it attends to.
            stride: tokens between two releases. A step computes no more tokens of the request.
        """

        sinks: Annotated[int, Meta(ge=0)] = 4
        window: Annotated[int, Meta(ge=1)] = 1024
        stride: Annotated[int, Meta(ge=1)] = 256

    def engine_half(self, context: EngineHalfContext) -> "Windows":
        """Return the half that releases blocks."""
        return Windows(context, f"step_parts/{self.name}")


class Windows(AdmissionGate, PlanData, RequestLifecycle):
    """Releases the blocks of each request one stride ahead of its tokens."""

    def __init__(self, context: EngineHalfContext, key: str) -> None:
        self._context, self._key = context, key
        self._live: dict[str, Request] = {}
        self._last: dict[str, int] = {}  # position of the last release

    def gate(self, request: Request) -> None:
        """Add the first release of a request before its first step."""
        arguments = request.source.plugin_args[self._key]
        self._live[request.request_id] = request
        self._last[request.request_id] = arguments["sinks"] + arguments["window"]
        self._release(request)

    def begin(self, plan: SchedulerOutput) -> None:
        """Add the next release of requests that have reached the last one."""
        for request_id in plan.num_scheduled_tokens:
            request = self._live.get(request_id)
            while request and self._last[request_id] <= request.num_computed_tokens:
                self._release(request)

    def _release(self, request: Request) -> None:
        arguments = request.source.plugin_args[self._key]
        self._last[request.request_id] += arguments["stride"]
        at = self._last[request.request_id]
        span = range(arguments["sinks"], at - arguments["window"])
        self._context.release_blocks(request, span, at)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._live.pop(request_id, None)
        self._last.pop(request_id, None)
