"""A prompt that comes in parts, each of which the engine answers before the next one begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hardpoint.plugins import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestError

_ENDS_OF_PARTS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


@dataclass(frozen=True)
class PromptPart:
    """More of a prompt.

    Attributes:
        text: of it, if it was given as text.
        last: nothing follows it.
    """

    token_ids: list[int]
    text: str | None
    last: bool


class PromptParts:
    """Which part of a prompt runs, and which ones wait for its end.

    Attributes:
        complete: whether the last part has come.
    """

    def __init__(self, begin: Callable[[PromptPart], None]) -> None:
        """The first part runs, and is not the last; `begin` is told of each one after it."""
        self.complete = False
        self._begin = begin
        self._waiting: deque[PromptPart] = deque()
        self._last = self._idle = self._cut = False

    def add(self, request: EngineCoreRequest, text: str | None) -> None:
        """Take a further part; it begins when those before it have ended.

        Raises:
            RequestError: the last part has come already.
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
        """Whether an output is of a part that a stop string has ended here already."""
        if not self._cut or (output.finished and output.finish_reason not in _ENDS_OF_PARTS):
            return False
        if output.finished:
            self._next()
        return True

    def ends_one(self, reason: FinishReason | None) -> bool:
        """Whether such an end is that of a part, after which others come, rather than of all."""
        return not self._last and reason in _ENDS_OF_PARTS

    def over(self, *, in_engine: bool) -> None:
        """Take it that the part has ended; where it has only here, the engine's end is awaited."""
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
