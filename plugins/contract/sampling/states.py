"""States of requests, kept for logits processors and samplers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from hardpoint import typed

from .rows import LogitsRequest


class Distribution(NamedTuple):
    """The distribution of a sampled token: its logits after all processors.

    Attributes:
        logprob: natural logarithm of the probability of the token.
        entropy: in nats.
        token_ids: the likeliest tokens, at most 10, the likeliest first.
        logprobs: theirs.
        below: total probability of the tokens with lower ids.
    """

    logprob: float
    entropy: float = 0.0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    below: float = 0.0


class RequestStates:
    """State of each request, begun by `start` and carried on by `advance` or `observe`.

    Attributes:
        State: the type of state that depends on logits: a subclass of `hardpoint.plugins.State`,
            or bytes.
        max_state_bytes: its greatest size as msgpack; a larger one is a fault of its request.
        supports_resume: whether another engine may go on with a request that uses it; without it,
            that is rejected, naming the plugin.
    """

    max_state_bytes: ClassVar[int] = 0
    supports_resume: ClassVar[bool] = True
    State: ClassVar[type[Any]] = typed.State

    def start(self, request: LogitsRequest) -> Any:  # noqa: ARG002
        """Return this request's state, from its prompt and the outputs so far.

        Called when a request enters the batch, also when it re-enters after preemption, or comes
        from another engine with outputs. With `observe`, it is called without any, when the request
        enters the first time; `observe` follows for outputs that came from another engine. A
        `Finish` ends the request without a token.
        """
        return None

    def advance(self, state: Any, token: int) -> Any:  # noqa: ARG002
        """Return the state after one more accepted output token; may modify it in place.

        Called once per accepted token, before the next `apply`, `edits` or `sample`. A `Finish`
        ends the request with this token.
        """
        return state

    def observe(self, state: Any, token: int, logprob: float) -> Any:  # noqa: ARG002
        """Return the state after one more accepted output token.

        Called once per accepted token, in order, after it was sampled and before the next `apply`,
        `edits` or `sample`. The engine keeps the state while a request is preempted or paused: it
        goes on from the state after the tokens that it then has. A token that is sampled and
        dropped leaves no trace. For state in device tensors there is no such method. A `Finish`
        ends the request with this token.

        An override with a further parameter `distribution=None` gets a `Distribution` there. It
        needs `supports_resume = False`: another engine has only the logprobs of earlier tokens.

        Args:
            state: state after the tokens before; the result of `start` for the first one.
            token: the accepted one.
            logprob: the natural logarithm of its probability under the logits that it was drawn
                from, after all processors.
        """
        return state

    def fork(self, state: Any) -> Any:
        """Return a copy of `state` to advance over draft tokens."""
        return copy.deepcopy(state)


def takes_distribution(cls: type[RequestStates]) -> bool:
    """Return whether `observe` of a class gets the distribution of each token."""
    if cls.observe is RequestStates.observe:
        return False
    return "distribution" in inspect.signature(cls.observe).parameters
