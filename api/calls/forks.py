"""Forks in AsyncLLM: copies of a request that go on with other outputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.plugins import RequestOutput

__all__ = ["AsyncForkCalls"]


class AsyncForkCalls:
    """The call for forks of a program that runs an event loop."""

    _engine: AsyncEngine

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
        return self._engine.fork(request_id, token_ids)
