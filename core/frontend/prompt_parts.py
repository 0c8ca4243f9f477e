"""Prompts that come in parts; the engine completes each part before the next one begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hardpoint.plugins import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestError

_ENDS_OF_PARTS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


@dataclass(frozen=True)
class PromptPart:
    """A further part of a prompt.

    Attributes:
        text: of the part, if it was given as text.
        last: whether it is the last part.
    """

    token_ids: list[int]
    text: str | None
    last: bool


class PromptParts:
    """The running part of a prompt and the parts that wait for its end.

    Attributes:
        complete: whether the last part has come.
    """

    def __init__(self, begin: Callable[[PromptPart], None]) -> None:
        """Start with the first of several parts; `begin` is called with each later one."""
        self.complete = False
        self._begin = begin
        self._waiting: deque[PromptPart] = deque()
        self._last = self._idle = self._cut = False

    def add(self, request: EngineCoreRequest, text: str | None) -> None:
        """Add a part; it begins when those before it have ended.

        Raises:
            RequestError: the last part was added already.
        """
        if self.complete:
            raise RequestError(
                f"request_id: the prompt of {request.request_id!r} is complete, nothing may follow"
            )
        self.complete = not request.resumable
        self._waiting.append(PromptPart(request.prompt_token_ids, text, self.complete))
        if self._idle:
            self._next()

    def skips(self, output: EngineCoreOutput) -> bool:
        """Return whether an output belongs to a part that a stop string has ended already."""
        if not self._cut or (output.finished and output.finish_reason not in _ENDS_OF_PARTS):
            return False
        if output.finished:
            self._next()
        return True

    def ends_one(self, reason: FinishReason | None) -> bool:
        """Return whether an end with this reason is that of a part, not of the whole request."""
        return not self._last and reason in _ENDS_OF_PARTS

    def finish(self, *, in_engine: bool) -> None:
        """Mark the part finished; after a stop in the frontend, wait for the engine's end."""
        if in_engine:
            self._next()
        else:
            self._cut = True

    def _next(self) -> None:
        self._cut = False
        self._idle = not self._waiting
        if self._waiting:
            part = self._waiting.popleft()
            self._last = part.last
            self._begin(part)
