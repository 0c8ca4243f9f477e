"""Where one request's outputs wait for their consumer: merged, never queued."""

from __future__ import annotations

import asyncio

from hardpoint.plugins import CompletionOutput, RequestOutput, RequestOutputKind

from .request_state import AnyOutput


class RequestOutputCollector:
    """Holds at most one output of a request, however slow its consumer is.

    Deltas that nobody has taken yet become one; of other kinds, the newest of each completion
    stands, and of pooled outputs the newest. For the thread of one event loop, and one consumer.

    Attributes:
        kind: of the request's outputs; to be set before the first of them comes.
    """

    def __init__(self, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> None:
        """Hold nothing."""
        self.kind = kind
        self._held: AnyOutput | Exception | None = None
        self._there = asyncio.Event()

    def put(self, item: AnyOutput | Exception) -> None:
        """Take an output, or the error that ends the request; nothing comes after an error."""
        held = self._held
        if isinstance(held, Exception):
            return
        if isinstance(held, RequestOutput) and isinstance(item, RequestOutput):
            self._merge(held, item)
        else:
            self._held = item
            self._there.set()

    async def get(self) -> AnyOutput:
        """Wait for what is new.

        Raises:
            Exception: the error that ended the request.
        """
        await self._there.wait()
        output = self.get_nowait()
        assert output is not None  # `put` sets the event, and only after it has put something
        return output

    def get_nowait(self) -> AnyOutput | None:
        """Return what is new, None if nothing is.

        Raises:
            Exception: the error that ended the request.
        """
        held, self._held = self._held, None
        self._there.clear()
        if isinstance(held, Exception):
            raise held
        return held

    def _merge(self, held: RequestOutput, new: RequestOutput) -> None:
        """Make one output of the one that is held and a new one."""
        delta = self.kind is RequestOutputKind.DELTA
        there = {completion.index: completion for completion in held.outputs}
        for completion in new.outputs:
            if delta and completion.index in there:
                _append(there[completion.index], completion)
            else:
                there[completion.index] = completion
        held.outputs = [there[index] for index in sorted(there)]
        held.finished = new.finished
        if not delta or held.prompt_logprobs is None:
            held.prompt_logprobs = new.prompt_logprobs
        elif new.prompt_logprobs is not None:
            held.prompt_logprobs += new.prompt_logprobs
        held.num_cached_tokens = new.num_cached_tokens
        held.kv_transfer_params = new.kv_transfer_params


def _append(held: CompletionOutput, new: CompletionOutput) -> None:
    """Lay a delta behind another one of the same completion."""
    held.text += new.text
    held.token_ids += new.token_ids
    if held.logprobs is None:
        held.logprobs = new.logprobs
    elif new.logprobs is not None:
        held.logprobs += new.logprobs
    held.cumulative_logprob = new.cumulative_logprob
    held.finish_reason, held.stop_reason = new.finish_reason, new.stop_reason
    held.error, held.error_kind = new.error, new.error_kind
    held.metrics = new.metrics
