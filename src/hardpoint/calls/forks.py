"""Forks: copies of a request that go on with other outputs."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS
from hardpoint.plugins import EngineCoreRequest, RequestError, RequestOutput
from hardpoint.requests import OpenCalls

from .streams import OutputStream, RequestForks, open_stream

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine, Opened

__all__ = ["AsyncForkCalls", "SyncForkCalls"]


class OpenRequests:
    """The requests whose streams are open, by the user's id; each may be forked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know none."""
        self._clock = clock
        self._families: dict[str, RequestForks] = {}
        self._num_open = collections.Counter[str]()

    def opener(self, params: object) -> Callable[[str, EngineCoreRequest], Opened]:
        """Return `opened` of a request with these parameters."""
        return functools.partial(self.opened, params)

    @contextlib.contextmanager
    def opened(self, params: object, request_id: str, request: EngineCoreRequest) -> Iterator[None]:
        """Let a request be forked while its stream, or that of a fork, is open.

        Args:
            params: its parameters as they were given.
            request_id: the user's.
            request: as it was sent.
        """
        if request_id not in self._families:
            self._families[request_id] = RequestForks(request, params, self._clock)
        self._num_open[request_id] += 1
        try:
            yield
        finally:
            self._num_open[request_id] -= 1
            if not self._num_open[request_id]:
                del self._num_open[request_id]
                self._families.pop(request_id, None)

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Let requests have no further forks."""
        for request_id in request_ids:
            self._families.pop(request_id, None)

    def fork(self, request_id: str, token_ids: Sequence[int]) -> EngineCoreRequest:
        """Return a copy of an open request with an index of its own, which has these outputs.

        Raises:
            RequestError: no request of that id is open, or the tokens are no list of numbers.
        """
        if (family := self._families.get(request_id)) is None:
            raise RequestError(f"request_id: {request_id!r} is not the id of an open request")
        return family.fork(token_ids)


class SyncForkCalls:
    """The call for forks of a program without an event loop."""

    _calls: OpenCalls

    def fork(self, stream: OutputStream, token_ids: Sequence[int]) -> OutputStream:
        """Go on with other outputs in a copy of a request of `stream`; iterate over the copy's.

        It is one more completion of the same prompt, as those of `n`: with the same parameters and
        a number of its own, `outputs[0].index`. Logits processors and grammars get `token_ids` as
        if they had been sampled; full blocks that the source has computed of them are shared by the
        prefix cache. Closing either stream ends its own request alone.

        Args:
            stream: outputs of `stream`, `stream_chat` or `fork`; it may have ended.
            token_ids: all output tokens before those to come. May be empty.

        Raises:
            RequestError: the stream is of something else; tokens are wrong, or end the request; a
                logits processor cannot go on after outputs.
            OverloadedError, EngineDeadError, EngineClosedError: as `stream`.
        """
        if not isinstance(stream, OutputStream):
            raise RequestError(f"stream: expected that of `stream`, got {type(stream).__name__}")
        return open_stream(
            self._calls, (stream.family.fork(token_ids), None, NO_EXTRAS), stream.family
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
        number of its own, `outputs[0].index`, and the same request id, by which `abort` ends all;
        there are no forks after it. Logits processors and grammars get `token_ids` as if they had
        been sampled; full blocks that the source has computed of them are shared by the prefix
        cache. Otherwise it is a request as any other, which waits for its turn. Closing its stream
        ends it, and nothing else.

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
        return self._engine.generate(
            fork, None, request_id, opened=self._open_requests.opener(None)
        )
