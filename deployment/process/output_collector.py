"""Buffer of one request's outputs until their consumer takes them: merged, never queued."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from hardpoint.core.frontend.outputs.request_state import AnyOutput, rejection
from hardpoint.host.boundary.errors import RefusedInCallError
from hardpoint.plugins import CompletionOutput, RequestOutput, RequestOutputKind
from hardpoint.plugins.requests import ToolCall


class RequestOutputCollector:
    """Holds at most one output of a request, however slow its consumer is.

    Deltas that were not taken yet become one; of other kinds, the newest of each completion is
    kept, and of pooled outputs the newest. For the thread of one event loop, and one consumer.

    Attributes:
        kind: kind of the request's outputs; set before the first one is put.
    """

    def __init__(self, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> None:
        self.kind = kind
        self._held: AnyOutput | Exception | None = None
        self._has_item = asyncio.Event()

    def put(self, item: AnyOutput | Exception) -> None:
        """Add an output, or the error that ends the request; nothing comes after an error."""
        held = self._held
        if isinstance(held, Exception):
            return
        if isinstance(held, RequestOutput) and isinstance(item, RequestOutput):
            self._merge(held, item)
        else:
            self._held = item
            self._has_item.set()

    async def get(self) -> AnyOutput:
        """Wait for the next output.

        Raises:
            Exception: the error that ended the request.
        """
        await self._has_item.wait()
        output = self.get_nowait()
        assert output is not None  # `put` sets the event, and only after it has put something
        return output

    def get_nowait(self) -> AnyOutput | None:
        """Return the next output, None if there is none yet.

        Raises:
            Exception: the error that ended the request.
        """
        held, self._held = self._held, None
        self._has_item.clear()
        if isinstance(held, Exception):
            raise held
        return held

    def _merge(self, held: RequestOutput, new: RequestOutput) -> None:
        delta = self.kind is RequestOutputKind.DELTA
        current = {completion.index: completion for completion in held.outputs}
        for completion in new.outputs:
            if delta and completion.index in current:
                _append(current[completion.index], completion)
            else:
                current[completion.index] = completion
        held.outputs = [current[index] for index in sorted(current)]
        held.finished = new.finished
        if not delta or held.prompt_logprobs is None:
            held.prompt_logprobs = new.prompt_logprobs
        elif new.prompt_logprobs is not None:
            held.prompt_logprobs += new.prompt_logprobs
        held.num_cached_tokens = new.num_cached_tokens
        held.kv_transfer_params = new.kv_transfer_params


def _append(held: CompletionOutput, new: CompletionOutput) -> None:
    held.text += new.text
    held.token_ids += new.token_ids
    held.reasoning = _joined(held.reasoning, new.reasoning)
    before = len(held.content or "")
    held.content = _joined(held.content, new.content)
    for call in new.tool_calls or ():
        _append_call(held, call, before)
    held.void_calls = new.void_calls
    held.warning, held.validation_error = new.warning, new.validation_error
    if held.logprobs is None:
        held.logprobs = new.logprobs
    elif new.logprobs is not None:
        held.logprobs += new.logprobs
    held.cumulative_logprob = new.cumulative_logprob
    held.finish_reason, held.stop_reason = new.finish_reason, new.stop_reason
    held.error, held.error_kind = new.error, new.error_kind
    held.metrics = new.metrics
    held.part_figures, held.weight_runs = new.part_figures, new.weight_runs
    held.num_resumes, held.part_arrays = new.num_resumes, new.part_arrays
    held.routed_experts = new.routed_experts


def _joined(held: str | None, new: str | None) -> str | None:
    return new if held is None else held + (new or "")


def _append_call(held: CompletionOutput, new: ToolCall, before: int) -> None:
    """Append a part of a tool call to the part before it, or as the first one of a call.

    Args:
        before: characters of content before the part's own output.
    """
    calls = held.tool_calls = held.tool_calls or []
    if calls and calls[-1].index == new.index:
        calls[-1].arguments += new.arguments
    else:
        new.content_before += before
        calls.append(new)


class CallCollector:
    """The last outputs of the requests of one call. For the thread of one event loop."""

    def __init__(self, count: int) -> None:
        self._outputs: list[AnyOutput | None] = [None] * count
        self._missing = count
        self._error: Exception | None = None
        self._has_ended = asyncio.Event()

    def sink(self, index: int) -> Callable[[AnyOutput | Exception], None]:
        """Return the sink of the request with an index."""
        return functools.partial(self._put, index)

    async def outputs(self) -> list[AnyOutput]:
        """Wait until all requests have ended; return their last outputs, in order.

        Raises:
            RefusedInCallError: the engine refused one.
            Exception: the error that ended one.
        """
        await self._has_ended.wait()
        if self._error is not None:
            raise self._error
        return [output for output in self._outputs if output is not None]

    def _put(self, index: int, item: AnyOutput | Exception) -> None:
        if self._has_ended.is_set():
            return
        if isinstance(item, Exception):
            self._error = item
        elif (rejected := rejection(item)) is not None:
            self._error = RefusedInCallError(index, rejected)
        elif item.finished:
            self._outputs[index] = item
            self._missing -= 1
        if self._error is not None or not self._missing:
            self._has_ended.set()
