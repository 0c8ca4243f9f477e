"""The group `debug` of LLM and AsyncLLM: traces of tokens, profiles, reasons for waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from hardpoint.core.engine.utility_calls import ControlCalls
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.errors import shown
from hardpoint.host.system.control_calls import AsyncCaller, SyncCaller
from hardpoint.plugins import RequestError, RequestOutputKind, SamplingParams, WaitReason
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.requests import Prompt
from hardpoint.requests import check_generates, takes_options, with_output_kind
from hardpoint.toolkit.trace import Trace, asking_for_trace, trace_of

from .running import AsyncRequests, SyncRequests

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

__all__ = ["AsyncDebugGroup", "DebugGroup"]


class DebugGroup(SyncCaller):
    """Traces and profiles of an LLM: `llm.debug`."""

    def __init__(self, engine: LLMEngine, requests: SyncRequests) -> None:
        self._engine, self._requests = engine, requests

    @takes_options
    def trace(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Trace:
        """Complete one prompt; return how each token of its completions was chosen.

        It takes the arguments of `generate`, and gives the same tokens.

        Args:
            prompt, sampling_params: as for `generate`.
            options: `RequestOptions`.

        Raises:
            RequestError, OverloadedError: prompt or parameters are wrong, or too many wait.
            HardpointError: a completion was ended before a step had it, by a timeout for example.
        """
        params = _params(self._engine, sampling_params)
        (output,) = self._requests.complete([prompt], params, options)
        return trace_of(output, self._engine.parts.tokenizer.decode)

    start_profile = ControlCalls.start_profile
    stop_profile = ControlCalls.stop_profile

    def _call_utility(self, method: str, *args: Any) -> Any:
        return self._engine.call_utility(method, *args)


class AsyncDebugGroup(AsyncCaller):
    """Traces and profiles of an AsyncLLM: `llm.debug`."""

    def __init__(self, engine: AsyncEngine, requests: AsyncRequests) -> None:
        self._engine, self._requests = engine, requests

    @takes_options
    async def trace(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Trace:
        """Complete one prompt and trace its tokens, as `LLM.debug.trace` does."""
        params = _params(self._engine, sampling_params)
        outputs = self._requests.outputs(prompt, params, None, options)
        *_, last = [output async for output in outputs]
        return trace_of(last, self._engine.parts.tokenizer.decode)

    start_profile = ControlCalls.start_profile
    stop_profile = ControlCalls.stop_profile

    async def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        None stands for completions that got some; finished completions are left out.

        Raises:
            RequestError: no live request has that id.
        """
        return await self._engine.why_waiting(request_id)

    async def _call_utility(self, method: str, *args: Any) -> Any:
        return await self._engine.call_utility(method, *args)


def _params(
    engine: LLMEngine | AsyncEngine, sampling_params: SamplingParams | None
) -> SamplingParams:
    params = engine.default_sampling_params() if sampling_params is None else sampling_params
    check_generates(params)
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params: expected SamplingParams, got {shown(params)}")
    asking: SamplingParams = with_output_kind(
        asking_for_trace(params), RequestOutputKind.FINAL_ONLY
    )
    return asking
