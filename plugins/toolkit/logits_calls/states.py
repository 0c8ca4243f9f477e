"""States of requests that logits processors keep, in the worker that samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from hardpoint.plugins import Executor, Finish, LogitsRequest
from hardpoint.plugins.requests import FinishedError
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.typed import ReadOnlyList, prepared

NUM_VERSIONS = Executor.MAX_CONCURRENT_BATCHES + 1
"""States kept per request. Results may come as many steps late as a pipeline has batches, and the
last one may be lost, so that a request may go on from a state that is some steps old."""

_encode = msgspec.msgpack.Encoder().encode


class _Version(NamedTuple):
    """A state as msgpack, and the number of output tokens after which it is that."""

    num_tokens: int
    state: bytes


class ObservedStates:
    """States that depend on logits, which outlive a preemption: the newest ones, by request."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, deque[_Version]]] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def start(
        self, processor: LogitsPlugin, request: LogitsRequest, observed: Sequence[float] = ()
    ) -> Any:
        """Return the state of a request that enters the batch: a new one, or that of its tokens.

        Args:
            processor: whose state it is.
            request: with its output tokens.
            observed: logprobs of the tokens that another engine has sampled.

        Raises:
            LookupError: the request has other output tokens, and no state after them is kept.
            TypeError, ValueError: the state that `start` returned is not as declared.
        """
        by_name = self._versions.setdefault(request.request_id, {})
        num_tokens = len(request.output_token_ids)
        if not num_tokens or (processor.name not in by_name and len(observed) == num_tokens):
            state = _observed(processor, request, observed if num_tokens else ())
            by_name[processor.name] = deque(maxlen=NUM_VERSIONS)
            self.record(processor, request, state)
            return state
        versions = by_name.get(processor.name, ())
        kept = [version for version in versions if version.num_tokens <= num_tokens]
        if not kept or kept[-1].num_tokens != num_tokens:
            raise LookupError(f"no state after {num_tokens} output tokens is kept")
        by_name[processor.name] = deque(kept, NUM_VERSIONS)  # later tokens were dropped
        return msgspec.msgpack.decode(kept[-1].state, type=prepared(processor.State))

    def record(self, processor: LogitsPlugin, request: LogitsRequest, state: Any) -> None:
        """Keep the state of a request after its output tokens.

        Raises:
            FinishedError: the processor ends the request.
            TypeError: it is not of the declared type.
            ValueError: it is larger than declared.
        """
        if type(state) is Finish:
            raise FinishedError(state)
        if not isinstance(state, processor.State):
            raise TypeError(
                f"expected a state of type {processor.State.__name__}, got {type(state).__name__}"
            )
        encoded = _encode(state)
        if len(encoded) > processor.max_state_bytes:
            raise ValueError(
                f"expected a state of at most max_state_bytes ({processor.max_state_bytes}), "
                f"got {len(encoded)} bytes"
            )
        version = _Version(len(request.output_token_ids), encoded)
        self._versions[request.request_id][processor.name].append(version)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended; unknown ids are ignored."""
        if self._versions:
            for request_id in request_ids:
                self._versions.pop(request_id, None)


def _observed(processor: LogitsPlugin, request: LogitsRequest, logprobs: Sequence[float]) -> Any:
    """Return the state after tokens with these logprobs, as if each had been sampled here."""
    if not logprobs:
        return processor.start(request)
    state = processor.start(replace(request, output_token_ids=ReadOnlyList()))
    for token, logprob in zip(request.output_token_ids, logprobs, strict=True):
        state = processor.observe(processor.advance(state, token), token, logprob)
    return state


def set_state(states: Any, name: str, state: Any) -> None:
    """Set the state of a processor among those of a request.

    Raises:
        FinishedError: the processor ends the request.
    """
    if type(state) is Finish:
        raise FinishedError(state)
    dict.__setitem__(states, name, state)  # of a ReadOnlyDict, too
