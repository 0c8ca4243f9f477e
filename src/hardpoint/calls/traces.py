"""Traces in LLM and AsyncLLM: how the tokens of a prompt were chosen."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol, Unpack

from hardpoint.core.frontend.requests.prompts import Prompt
from hardpoint.errors import shown
from hardpoint.plugins import RequestError, RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.text.tokenizer import Tokenizer
from hardpoint.requests import check_generates, takes_options, with_output_kind
from hardpoint.toolkit.trace import Trace, asking_for_trace, trace_of

__all__ = ["AsyncTraceCalls", "SyncTraceCalls"]


class _Model(Protocol):
    @property
    def tokenizer(self) -> Tokenizer: ...

    def default_sampling_params(self) -> SamplingParams: ...


class _SyncModel(_Model, Protocol):
    def generate(
        self, prompts: Any, sampling_params: Any, **options: Any
    ) -> list[RequestOutput]: ...


class _AsyncModel(_Model, Protocol):
    def generate(
        self, prompt: Any, sampling_params: Any, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...


class SyncTraceCalls:
    """The call for traces of a program that waits for it."""

    @takes_options
    def trace(
        self: _SyncModel,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Trace:
        """Complete one prompt; return how each token of its completions was chosen.

        The tokens are those of `generate`, which takes the same arguments.

        Args:
            prompt, sampling_params: as for `generate`.
            options: `RequestOptions`.

        Raises:
            RequestError, OverloadedError: prompt or parameters are wrong, or too many wait.
            HardpointError: a completion was ended before a step had it, by a timeout for example.
        """
        params = _params(self, sampling_params)
        (output,) = self.generate([prompt], params, **options)
        return trace_of(output, self.tokenizer.decode)


class AsyncTraceCalls:
    """The call for traces of a program that runs an event loop."""

    @takes_options
    async def trace(
        self: _AsyncModel,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Trace:
        """Do what `LLM.trace` does."""
        params = _params(self, sampling_params)
        outputs = [output async for output in self.generate(prompt, params, **options)]
        return trace_of(outputs[-1], self.tokenizer.decode)


def _params(model: _Model, given: SamplingParams | None) -> SamplingParams:
    """Return parameters that ask for a trace, with one output at the end."""
    params = model.default_sampling_params() if given is None else given
    check_generates(params)
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params: expected SamplingParams, got {shown(params)}")
    asking: SamplingParams = with_output_kind(
        asking_for_trace(params), RequestOutputKind.FINAL_ONLY
    )
    return asking
