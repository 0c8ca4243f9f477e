"""Checks of requests that go on at another engine, of the states that plugins keep."""

from __future__ import annotations

import math

from hardpoint.plugins import EngineCoreRequest, RequestError, Wrapper
from hardpoint.plugins.sampling import RequestStates

SAMPLER = ""
"""The name of the sampler among logits processors; every request uses it."""

_LOGPROBS = "resumed.observed_logprobs"


def check_states(plugin: str, cls: type[RequestStates], request: EngineCoreRequest) -> None:
    """Check that a request may go on here with the states that a plugin keeps.

    Args:
        plugin: kind and name of the plugin.
        cls: its class.

    Raises:
        RequestError: it may not.
    """
    if not cls.supports_resume:
        raise RequestError(f"resumed: expected none: {plugin} does not declare supports_resume")
    resumed = request.resumed
    if resumed is None or cls.observe is RequestStates.observe or issubclass(cls, Wrapper):
        return  # the worker finds out whether a wrapped component observes
    if resumed.output_token_ids and resumed.observed_logprobs is None:
        raise RequestError(f"{_LOGPROBS}: expected one per output token, for {plugin}, got none")


def check_logprobs(logprobs: list[float] | None, num_tokens: int) -> None:
    """Check the logprobs of the tokens that another engine has sampled.

    Raises:
        RequestError: they are of another number, or not finite.
    """
    if logprobs is None:
        return
    if len(logprobs) != num_tokens:
        raise RequestError(
            f"{_LOGPROBS}: expected one for each of the {num_tokens} tokens, got {len(logprobs)}"
        )
    for index, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise RequestError(f"{_LOGPROBS}[{index}]: expected a finite number, got {logprob}")
