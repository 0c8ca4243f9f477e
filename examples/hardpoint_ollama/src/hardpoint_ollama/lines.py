"""Answers of the routes that generate: lines of JSON, made of the server's own events."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .forwarding import Forwarding, error_answer, error_text, json_answer

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from hardpoint.plugins.server import ServerContext

_REASONS = {"tool_calls": "stop", None: "stop"}


def now() -> str:
    """Return the time in the format of RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class AnswerLines:
    """Makes the objects of one answer from the events of a stream.

    Attributes:
        error: message of the error that ended the stream; None without one.
    """

    def __init__(self, model: str, *, is_chat: bool) -> None:
        """Begin an answer.

        Args:
            model: its name in the request.
            is_chat: whether objects hold a message instead of a response.
        """
        self._model, self._is_chat = model, is_chat
        self._begin = time.perf_counter_ns()
        self._first: int | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}
        self.error: str | None = None

    def head(self) -> dict[str, Any]:
        """Return the fields of every object."""
        return {"model": self._model, "created_at": now()}

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the objects of an event."""
        if (error := event.get("error")) is not None:
            self.error = str(error.get("message", error))
            return [{"error": self.error}]
        self._usage = event.get("usage") or self._usage
        objects: list[dict[str, Any]] = []
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = delta.get("content") or choice.get("text") or ""
            thinking, logprobs = delta.get("reasoning") or "", choice.get("logprobs")
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
            if text or thinking or delta.get("tool_calls"):
                self._first = self._first or time.perf_counter_ns()
            if text or thinking:
                objects.append(self._part(text, thinking, logprobs))
            self._reason = choice.get("finish_reason") or self._reason
        return objects

    def end(self) -> list[dict[str, Any]]:
        """Return the last objects: the tool calls, and the figures of the answer."""
        if self.error is not None:
            return []
        calls = [self._part("", "", None, calls=self._whole_calls())] if self._calls else []
        done = time.perf_counter_ns()
        first = self._first or done
        figures = {
            "done": True,
            "done_reason": _REASONS.get(self._reason, self._reason),
            "total_duration": done - self._begin,
            "load_duration": 0,
            "prompt_eval_count": self._usage.get("prompt_tokens", 0),
            "prompt_eval_duration": first - self._begin,
            "eval_count": self._usage.get("completion_tokens", 0),
            "eval_duration": done - first,
        }
        return [*calls, {**self._part("", "", None), **figures}]

    def _add_call(self, delta: dict[str, Any]) -> None:
        call = self._calls.setdefault(delta["index"], {"id": None, "name": "", "arguments": ""})
        function = delta.get("function") or {}
        call["id"] = delta.get("id") or call["id"]
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""

    def _whole_calls(self) -> list[dict[str, Any]]:
        calls = []
        for index, call in self._calls.items():
            try:
                arguments = msgspec.json.decode(call["arguments"] or "{}")
            except msgspec.DecodeError:  # cut by the maximum length
                continue
            function = {"index": index, "name": call["name"], "arguments": arguments}
            calls.append({"id": call["id"], "function": function})
        return calls

    def _part(
        self, text: str, thinking: str, logprobs: Any, calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        thoughts = {"thinking": thinking} if thinking else {}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, **thoughts}
            if calls:
                message["tool_calls"] = calls
            part: dict[str, Any] = {"message": message}
        else:
            part = {"response": text, **thoughts}
        if logprobs and (content := logprobs.get("content")):
            part["logprobs"] = content
        return {**self.head(), **part, "done": False}


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the objects of a stream as one."""
    result = dict(parts[-1])
    logprobs = [item for part in parts for item in part.get("logprobs", ())]
    if logprobs:
        result["logprobs"] = logprobs
    if "message" not in result:
        result["response"] = "".join(part["response"] for part in parts)
        if thinking := "".join(part.get("thinking", "") for part in parts):
            result["thinking"] = thinking
        return result
    messages = [part["message"] for part in parts]
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(item["content"] for item in messages)
    if thinking := "".join(item.get("thinking", "") for item in messages):
        message["thinking"] = thinking
    if calls := [call for item in messages for call in item.get("tool_calls", ())]:
        message["tool_calls"] = calls
    result["message"] = message
    return result


class TextAnswer(Response):
    """An answer of a route that generates, sent as lines or as one object."""

    def __init__(
        self,
        server: ServerContext,
        forwarding: Forwarding,
        path: str,
        body: dict[str, Any],
        lines: AnswerLines,
        *,
        is_stream: bool,
    ) -> None:
        """Prepare an answer.

        Args:
            path: route of the server that generates.
            body: body of the request to it.
        """
        super().__init__()
        self._server, self._forwarding = server, forwarding
        self._path, self._body = path, body
        self._lines, self._is_stream = lines, is_stream
        self._status = 0
        self._retry_after: list[tuple[bytes, bytes]] = []
        self._rest = b""
        self._objects: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate the answer and send it."""
        request = Request(scope, receive)

        async def translate(message: Message) -> None:
            await self._translate(message, scope, receive, send)

        work = self._forwarding.forward(request, self._path, self._body, translate)
        await self._server.while_connected(request, work)

    async def _translate(
        self, message: Message, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status == 200 and self._is_stream:
                headers = [(b"content-type", b"application/x-ndjson")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._retry_after = [h for h in message.get("headers", ()) if h[0] == b"retry-after"]
            return
        self._rest += message.get("body", b"")
        has_more = message.get("more_body", False)
        if self._status != 200:
            if not has_more:
                answer = error_answer(self._status, error_text(self._rest))
                answer.raw_headers.extend(self._retry_after)
                await answer(scope, receive, send)
            return
        objects = self._read_events()
        if not has_more:
            objects += self._lines.end()
        if self._is_stream:
            body = b"".join(msgspec.json.encode(item) + b"\n" for item in objects)
            await send({"type": "http.response.body", "body": body, "more_body": has_more})
            return
        self._objects += objects
        if not has_more:
            error = self._lines.error
            whole = (
                json_answer(joined(self._objects)) if error is None else error_answer(500, error)
            )
            await whole(scope, receive, send)

    def _read_events(self) -> list[dict[str, Any]]:
        *blocks, self._rest = self._rest.split(b"\n\n")
        objects: list[dict[str, Any]] = []
        for block in blocks:
            for line in block.split(b"\n"):
                data = line.removeprefix(b"data: ")
                if data.startswith(b"{") and data is not line:
                    objects += self._lines.read(msgspec.json.decode(data))
        return objects
