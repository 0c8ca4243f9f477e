"""Forks: copies of open requests that go on with other outputs."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from hardpoint import typed
from hardpoint.plugins import EngineCoreRequest, RequestError
from hardpoint.plugins.resumed import ResumedOutputs


class OpenRequests:
    """The requests whose streams are open, by the user's id; each may be forked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know none."""
        self._clock = clock
        self._open: dict[str, tuple[EngineCoreRequest, float, Iterator[int]]] = {}

    @contextlib.contextmanager
    def opened(self, request_id: str, request: EngineCoreRequest) -> Iterator[None]:
        """Let a request be forked meanwhile; of several of one id, the first one is."""
        own = request, self._clock(), itertools.count(request.params.n)
        known = self._open.setdefault(request_id, own)
        try:
            yield
        finally:
            if known is own:
                del self._open[request_id]

    def fork(self, request_id: str, token_ids: Sequence[int]) -> EngineCoreRequest:
        """Return a copy of an open request with an index of its own, which has these outputs.

        Raises:
            RequestError: no request of that id is open, or it pools.
        """
        if (opened := self._open.get(request_id)) is None:
            raise RequestError(f"request_id: {request_id!r} is not the id of an open request")
        request, since, indices = opened
        outputs = typed.convert(token_ids, list[int], path="token_ids", error=RequestError)
        left = None
        if request.timeout is not None:
            left = max(request.timeout - (self._clock() - since), math.ulp(0.0))
        scored = request.params.prompt_logprobs is not None
        return msgspec.structs.replace(
            request,
            params=msgspec.structs.replace(request.params, n=1),
            child_index=next(indices),
            resumed=ResumedOutputs(
                outputs, num_prompt_logprobs=len(request.prompt_token_ids) if scored else 0
            ),
            timeout=left,
            arrival_time=0.0,
            kv_transfer_params=None,  # what it names was for the source alone
            external_req_id=None,
            reasoning_markers=None,
        )
