"""The answers of `/v1/responses`: whole ones, and the events of a streamed one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.dialects.chat.logprobs import TokenLogprob, choice_logprobs
from hardpoint.builtin_plugins.server.dialects.items import (
    ItemAnswer,
    Kind,
    in_order,
    whole_arguments,
)
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.routes.answers import (
    UsageCount,
    encoded_arrays,
)
from hardpoint.plugins import CompletionOutput, RequestOutput, Tokenizer
from hardpoint.plugins.server import ToolCall

from .custom_tools import OutputCustomCall
from .input import Status
from .logprobs import TextPositions
from .objects import (
    RESPONSE_PREFIX,
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputFunctionCall,
    OutputItem,
    OutputText,
    RequestedTools,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    message_item,
    reasoning_item,
    tool_call_item,
)

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


_CALLS = (OutputFunctionCall, OutputCustomCall)


def _is_complete(completion: CompletionOutput) -> bool:
    return completion.finish_reason in ("stop", "tool_calls")


def _usage(count: UsageCount) -> ResponseUsage:
    usage = count.usage()
    cached, reasoning = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(0 if cached is None else cached.cached_tokens),
        usage.completion_tokens,
        OutputDetails(0 if reasoning is None else reasoning.reasoning_tokens),
        usage.total_tokens,
    )


def _positions(
    completion: CompletionOutput, count: int | None, tokenizer: Tokenizer
) -> list[TokenLogprob]:
    if count is None:
        return []
    logprobs = choice_logprobs(completion, count, tokenizer=tokenizer)
    return [] if logprobs is None else logprobs.content


class _OpenItem:
    """An item that is being streamed, with the constant part of its deltas."""

    def __init__(
        self,
        kind: Kind,
        item_id: str,
        index: int,
        call: ToolCall | None,
        names: RequestedTools,
    ) -> None:
        self._names = names
        tool = None if call is None else names.get(call.name or "")
        self.is_custom = tool is not None and tool.is_custom
        self.kind, self.id, self.index, self.call = kind, item_id, index, call
        self.text: list[str] = []
        self.logprobs: list[bytes] = []
        self.place: dict[str, Any] = {"item_id": item_id, "output_index": index}
        if kind != "call":
            self.place["content_index"] = 0
        self.event = _CUSTOM_DELTA if self.is_custom else _DELTAS[kind]
        name = self.event
        fields = msgspec.json.encode({"type": name, **self.place})
        self.head = b"event: " + name.encode() + b"\ndata: " + fields[:-1]

    def item(self, status: Status) -> OutputItem:
        """Return the item as it is now; only a whole call is completed."""
        text = "".join(self.text)
        if self.call is not None:
            call = msgspec.structs.replace(self.call, arguments=text)
            if status == "completed" and whole_arguments(text) is None:
                status = "incomplete"
            return tool_call_item(self.id, call, self._names, status)
        if self.kind == "reasoning":
            return reasoning_item(self.id, text, status)
        # Several of the last events hold them; they were encoded for the deltas.
        logprobs: Any = msgspec.Raw(b"[" + b",".join(self.logprobs) + b"]")
        return message_item(self.id, text, logprobs, status)


_DELTAS = {
    "reasoning": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}


_CUSTOM_DELTA = "response.custom_tool_call_input.delta"


_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


_CUSTOM_PREFIX = "ctc_"


class ResponseAnswer(ItemAnswer):
    """Writes a response; the common part of the deltas of an item is encoded once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        response: ResponseObject,
        logprobs: int | None,
        keep: Callable[[ResponseObject], Awaitable[None]] | None = None,
        names: RequestedTools | None = None,
    ) -> None:
        """Prepare the answer of a request.

        Args:
            response: a response without an answer yet.
            logprobs: likeliest tokens per position of the text; None is no log-probabilities.
            keep: stores the response that has ended, before the client has all of it.
            names: tools of a namespace and custom tools.
        """
        self._names: RequestedTools = names or {}
        super().__init__(tokenizer)
        self._tokenizer, self._keep, self._kept = tokenizer, keep, False
        self._response, self._logprobs = response, logprobs
        self._number = 0
        self._items: list[OutputItem] = []
        self._item: _OpenItem | None = None
        self._positions = TextPositions()

    async def whole(self, outputs: AsyncGenerator[RequestOutput, None]) -> Any:
        """Return the response; see the base."""
        response = await super().whole(outputs)
        if self._keep is not None:
            await self._keep(response)
        return response

    async def events(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events; see the base. The response is stored before the last ones."""
        async with contextlib.aclosing(super().events(outputs)) as blocks:
            async for block in blocks:
                if self._keep is not None and not self._kept and self._is_ended:
                    self._kept = True
                    await self._keep(self._response)
                yield block

    @property
    def _is_ended(self) -> bool:
        return self._response.status in ("completed", "incomplete")

    def _whole(self, completion: CompletionOutput) -> ResponseObject:
        items = self._items
        positions = _positions(completion, self._logprobs, self._tokenizer)
        of_texts = TextPositions(positions)
        if completion.reasoning:
            of_texts.skip(completion.reasoning)
            items.append(reasoning_item(self._item_id("rs_", 0), completion.reasoning))
        for part in in_order(completion.content, completion.tool_calls or ()):
            if isinstance(part, str):
                of_part = of_texts.pop(part)
                items.append(message_item(self._item_id("msg_", len(items)), part, of_part))
                continue
            of_texts.end()
            of_texts.skip(part.arguments)
            if whole_arguments(part.arguments) is not None:
                items.append(tool_call_item(self._call_id(part, len(items)), part, self._names))
        if not items:
            items.append(message_item(self._item_id("msg_", 0), "", positions))
        if not _is_complete(completion) and not isinstance(items[-1], _CALLS):
            items[-1].status = "incomplete"
        return self._ended(completion)

    def _call_id(self, call: ToolCall, index: int) -> str:
        tool = self._names.get(call.name or "")
        is_custom = tool is not None and tool.is_custom
        return self._item_id(_CUSTOM_PREFIX if is_custom else _PREFIXES["call"], index)

    def _item_id(self, prefix: str, index: int) -> str:
        """Return the id of an item; it contains the response's, for `StoredResponses.resolved`."""
        return f"{prefix}{self._response.id.removeprefix(RESPONSE_PREFIX)}_{index}"

    def _ended(self, completion: CompletionOutput) -> ResponseObject:
        is_complete = _is_complete(completion)
        ended = msgspec.structs.replace(
            self._response,
            completed_at=int(time.time()),
            status="completed" if is_complete else "incomplete",
            output=self._items,
            usage=_usage(self._usage),
        )
        if not is_complete:
            reason = completion.finish_reason or ""
            ended.incomplete_details = IncompleteDetails(
                "max_output_tokens" if reason == "length" else reason
            )
        if completion.warning:
            ended.warning = completion.warning
        if completion.validation_error:
            ended.validation_error = completion.validation_error
        if completion.part_figures is not None:
            ended.part_figures = completion.part_figures
        if completion.part_arrays is not None:
            ended.part_arrays = encoded_arrays(completion.part_arrays)
        if completion.weight_runs is not None:
            ended.weight_runs = completion.weight_runs
        return ended

    def failed(self, error: AnswerError) -> bytes:
        """Return the last events of a stream that an error ends.

        Clients that know none of the error's own event find it in the response.
        """
        written = [*self._begin(), *self._close("incomplete")]
        detail = error.detail
        code = _ERROR_CODES.get(error.status, "server_error")
        self._response = msgspec.structs.replace(
            self._response,
            status="failed",
            output=self._items,
            error=ResponseError(code, detail.message),
            usage=_usage(self._usage) if self._usage.completion_tokens else None,
        )
        written.append(self._event("response.failed", response=self._response))
        fields = {"code": code, "message": detail.message, "param": detail.param}
        written.append(self._event("error", **fields, error=detail))
        return b"".join(written)

    def _event(self, type_: str, **fields: Any) -> bytes:
        data = {"type": type_, "sequence_number": self._number, **fields}
        self._number += 1
        return b"".join((b"event: ", type_.encode(), b"\ndata: ", self._encode(data), b"\n\n"))

    def _first(self) -> Iterator[bytes]:
        for type_ in ("response.created", "response.in_progress"):
            yield self._event(type_, response=self._response)

    def _parts(self, completion: CompletionOutput) -> Iterator[bytes]:
        self._positions.add(_positions(completion, self._logprobs, self._tokenizer))
        yield from super()._parts(completion)
        self._positions.leave_out_unknown()

    def _delta(self, text: str, logprobs: bytes = b"") -> bytes:
        assert self._item is not None
        if self._item.kind != "text":
            self._positions.skip(text)
        self._item.text.append(text)
        number = b',"sequence_number":%d,"delta":' % self._number
        self._number += 1
        return b"".join((self._item.head, logprobs, number, self._encode(text), b"}\n\n"))

    def _text_delta(self, text: str) -> bytes:
        assert self._item is not None
        if self._logprobs is None:
            return self._delta(text, b',"logprobs":[]')
        logprobs = self._encode(self._positions.pop(text))
        self._add_logprobs(self._item, logprobs)
        return self._delta(text, b',"logprobs":' + logprobs)

    def _end_text(self) -> None:
        """Add the remaining positions to the open text, if there is one."""
        if self._item is not None and self._item.kind == "text":
            self._add_logprobs(self._item, self._encode(self._positions.end()))

    def _add_logprobs(self, item: _OpenItem, logprobs: bytes) -> None:
        if len(logprobs) > 2:
            item.logprobs.append(logprobs[1:-1])

    def _called(self, calls: Iterable[ToolCall]) -> Iterator[bytes]:
        for call in calls:
            if self._call is None or self._call.index != call.index:
                yield from self._opened("call", call)
            assert self._item is not None
            if call.arguments and self._item.is_custom:
                self._positions.skip(call.arguments)
                self._item.text.append(call.arguments)  # JSON, whose text is sent at the end
            elif call.arguments:
                yield self._delta(call.arguments)

    def _opened(self, kind: Kind, call: ToolCall | None = None) -> Iterator[bytes]:
        if self._open == kind and call is None:
            return
        self._end_text()
        yield from self._close("completed")
        index = self._num_items
        item_id = (
            self._item_id(_PREFIXES[kind], index) if call is None else self._call_id(call, index)
        )
        opened = _OpenItem(kind, item_id, index, call, self._names)
        self._open, self._call, self._item = kind, call, opened
        self._num_items += 1
        item = opened.item("in_progress")
        if isinstance(item, _CALLS):
            yield self._added(opened, item)
            return
        part = item.content[0]
        yield self._added(opened, msgspec.structs.replace(item, content=[]))
        yield self._event("response.content_part.added", **opened.place, part=part)

    def _added(self, opened: _OpenItem, item: OutputItem) -> bytes:
        return self._event("response.output_item.added", output_index=opened.index, item=item)

    def _close(self, status: Status) -> Iterator[bytes]:
        """Yield the events that end the open item, if there is one.

        A broken call, whose arguments are never done, is no part of the output: where its text is
        no call, it is text.
        """
        opened = self._item
        if opened is None:
            return
        self._open = self._call = self._item = None
        if opened.call is not None and opened.call.index in self._void_calls:
            status = "incomplete"
        item = opened.item(status)
        name = opened.event.removesuffix("delta") + "done"
        if not isinstance(item, _CALLS):
            self._items.append(item)
            part = item.content[0]
            fields: dict[str, Any] = {"text": part.text}
            if isinstance(part, OutputText):
                fields["logprobs"] = part.logprobs
            yield self._event(name, **opened.place, **fields)
            yield self._event("response.content_part.done", **opened.place, part=part)
        elif item.status == "completed":
            self._items.append(item)
            if isinstance(item, OutputCustomCall):
                yield self._event(opened.event, **opened.place, delta=item.input)
                yield self._event(name, **opened.place, input=item.input)
            else:
                fields = {"name": item.name, "arguments": item.arguments}
                yield self._event(name, **opened.place, **fields)
        yield self._event("response.output_item.done", output_index=opened.index, item=item)

    def _end(self, completion: CompletionOutput) -> Iterator[bytes]:
        status: Status = "completed" if _is_complete(completion) else "incomplete"
        if self._call is not None:
            yield from self._close("completed")
        if self._open is None and not self._items:
            yield from self._opened("text")  # an answer without a text has an empty one
            assert self._item is not None
            self._add_logprobs(self._item, self._encode(self._positions.pop_rest()))
        self._end_text()
        yield from self._close(status)
        ended = self._ended(completion)
        self._response = ended
        yield self._event(f"response.{ended.status}", response=ended)
