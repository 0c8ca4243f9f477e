"""Calls of an LLM that are open side by side: a `generate` inside a loop over `stream`."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hardpoint.core.frontend.input_processor import RequestExtras
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.plugins import RequestOutput
from hardpoint.plugins.errors import EnginePausedError

from .llm_inputs import accepted

__all__ = ["OpenCalls", "OutputStream"]


class OpenCalls:
    """Adds requests to an engine, steps it, and keeps outputs for the calls that wait for them."""

    def __init__(self, engine: LLMEngine) -> None:
        """The caller closes the engine."""
        self._engine = engine
        self._count = 0
        self._inboxes: dict[str, collections.deque[RequestOutput]] = {}

    def __len__(self) -> int:
        """Return the number of requests that a call waits for."""
        return len(self._inboxes)

    def add(self, requests: Iterable[tuple[Any, Any, RequestExtras]]) -> list[str]:
        """Add prompts with their parameters; if one is refused, none runs.

        Returns:
            Their ids.

        Raises:
            RequestError: one is wrong.
        """
        ids: list[str] = []
        try:
            for prompt, params, extras in requests:
                request_id = str(self._count)
                self._count += 1
                ids.append(request_id)  # first, so that an interrupt leaves none behind
                self._inboxes[request_id] = collections.deque()
                self._engine.add_request(request_id, prompt, params, extras)
        except BaseException:
            self.drop(ids)
            raise
        return ids

    def drop(self, ids: Sequence[str]) -> None:
        """Forget requests; abort what is left of them."""
        self._engine.abort_requests(ids)
        for request_id in ids:
            self._inboxes.pop(request_id, None)

    def outputs(self, ids: Sequence[str]) -> Iterator[RequestOutput]:
        """Yield outputs of some requests, stepping the engine when none is there; never ends.

        Raises:
            EnginePausedError: none will come before the engine is resumed.
            EngineDeadError: the engine is gone.
            HardpointError: the engine has refused one, with the words that it gave.
        """
        mine, touched = set(ids), ids
        while True:
            for request_id in touched:
                inbox = self._inboxes[request_id]
                while inbox:
                    yield accepted(inbox.popleft())
            touched = [each for each in self._advance() if each in mine]

    def _advance(self) -> list[str]:
        """Step the engine; return the requests that got something."""
        outputs = self._engine.step()
        for output in outputs:
            assert isinstance(output, RequestOutput)  # nothing that pools was added
            if (inbox := self._inboxes.get(output.request_id)) is not None:
                inbox.append(output)
        if not outputs and self._engine.is_paused:
            raise EnginePausedError(
                "the engine is paused, so this would wait for ever; call resume() first, or "
                "wake_up() if it sleeps"
            )
        return [output.request_id for output in outputs]


class OutputStream(Iterator[RequestOutput]):
    """The outputs of one request as they come.

    It aborts its request when it is closed, collected, or fails; not when the engine is paused,
    after which it goes on.
    """

    def __init__(self, calls: OpenCalls, request_id: str) -> None:
        """Take over a request that was added."""
        self._calls, self._id = calls, request_id
        self._outputs = calls.outputs([request_id])
        self._open = True

    def __next__(self) -> RequestOutput:
        """Return the next output.

        Raises:
            EnginePausedError: there is none before the engine is resumed; ask again then.
            HardpointError: the request was refused, or the engine is gone.
        """
        if not self._open:
            raise StopIteration
        try:
            output = next(self._outputs)
        except EnginePausedError:
            self._outputs = self._calls.outputs([self._id])
            raise
        except BaseException:
            self.close()
            raise
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """End the request, if it has not ended. Closing twice does nothing."""
        if self._open:
            self._open = False
            self._calls.drop([self._id])

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody is there to be told
            self.close()
