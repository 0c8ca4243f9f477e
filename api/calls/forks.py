"""Forks in AsyncLLM: copies of a request that go on with other outputs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from hardpoint import typed
from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.plugins import EngineCoreRequest, RequestError, RequestOutput
from hardpoint.plugins.resumed import ResumedOutputs

__all__ = ["AsyncForkCalls"]


class _Family(msgspec.Struct):
    """The open streams of one request id.

    Attributes:
        request: the one that was opened first; its forks are copies of it.
        since: when that was.
        indices: numbers of the completions to come.
        num_open: how many are open.
    """

    request: EngineCoreRequest
    since: float
    indices: Iterator[int]
    num_open: int = 0


class OpenRequests:
    """The requests whose streams are open, by the user's id; each may be forked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know none."""
        self._clock = clock
        self._open: dict[str, _Family] = {}

    @contextlib.contextmanager
    def opened(self, request_id: str, request: EngineCoreRequest) -> Iterator[None]:
        """Let a request be forked while its stream, or that of a fork, is open."""
        if (family := self._open.get(request_id)) is None:
            family = _Family(request, self._clock(), itertools.count(request.params.n))
            self._open[request_id] = family
        family.num_open += 1
        try:
            yield
        finally:
            family.num_open -= 1
            if not family.num_open:
                del self._open[request_id]

    def fork(self, request_id: str, token_ids: Sequence[int]) -> EngineCoreRequest:
        """Return a copy of an open request with an index of its own, which has these outputs.

        Raises:
            RequestError: no request of that id is open, or it pools.
        """
        if (family := self._open.get(request_id)) is None:
            raise RequestError(f"request_id: {request_id!r} is not the id of an open request")
        request = family.request
        outputs = typed.convert(token_ids, list[int], path="token_ids", error=RequestError)
        left = None
        if request.timeout is not None:
            left = max(request.timeout - (self._clock() - family.since), math.ulp(0.0))
        scored = request.params.prompt_logprobs is not None
        return msgspec.structs.replace(
            request,
            params=msgspec.structs.replace(request.params, n=1),
            child_index=next(family.indices),
            resumed=ResumedOutputs(
                outputs, num_prompt_logprobs=len(request.prompt_token_ids) if scored else 0
            ),
            timeout=left,
            arrival_time=0.0,
            kv_transfer_params=None,  # what it names was for the source alone
            external_req_id=None,
            reasoning_markers=None,
        )


class AsyncForkCalls:
    """The call for forks of a program that runs an event loop."""

    _engine: AsyncEngine

    @functools.cached_property
    def _open_requests(self) -> OpenRequests:
        return OpenRequests(self._engine.parts.clock)

    def fork(
        self, request_id: str, token_ids: Sequence[int]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on with other outputs in a copy of a request; yield the copy's outputs as they come.

        It is one more completion of the same prompt, as those of `n`: with the same parameters, a
        number of its own, `outputs[0].index`, and the same request id, by which `abort` ends all.
        Logits processors and grammars get `token_ids` as if they had been sampled; full blocks that
        the source has computed of them are shared by the prefix cache. Otherwise it is a request as
        any other, which waits for its turn. Closing its stream ends it, and nothing else.

        Args:
            request_id: as `generate` was called with. Its stream has begun and is not closed: it
                may have yielded its last output.
            token_ids: all output tokens before those to come: as a rule, some of the source, then
                another one. May be empty.

        Raises:
            RequestError: no request of that id is open; tokens are wrong, or end the request; a
                logits processor cannot go on after outputs.
            OverloadedError, EngineDeadError, EngineClosedError: as `generate`.
        """
        fork: Any = self._open_requests.fork(request_id, token_ids)
        return self._engine.generate(fork, None, request_id, opened=self._open_requests.opened)
