"""Chat templates: the messages are checked, then rendered in a process with limits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.plugins import HardpointError, RequestError

from . import chat_process

_START_SECONDS = 60.0
_MAX_BYTES = 512 << 20
_MAX_ESCAPED = 12  # characters of JSON per character of text


class ChatRenderer:
    """Renders chat templates in a process of its own, which starts with the first conversation.

    Usable from several threads, which wait for each other.
    """

    def __init__(self, seconds: float, max_characters: int) -> None:
        """Start nothing.

        Args:
            seconds: time limit for rendering a conversation.
            max_characters: maximum length of a conversation's text.
        """
        self._seconds = seconds
        self._max_characters = max_characters
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it; a fork of it starts another one

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: mappings with `role` and `content`.
            template: Jinja source; it runs in a sandbox.
            add_generation_prompt: whether the text ends with the beginning of the assistant's
                message.
            variables: further variables of the template, such as `bos_token` and `tools`.

        Raises:
            RequestError: the messages are malformed, the template rejects them, or it takes too
                long.
            HardpointError: no process can be started.
        """
        request = {
            **variables,
            "messages": _check(messages),
            "template": template,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps(request, default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as cause:
            raise RequestError(f"messages: expected plain data: {cause}") from cause
        with self._lock:
            reply = self._ask(line)
        if (text := reply.get("text")) is None:
            raise RequestError(f"messages: the chat template refuses them: {reply['error']}")
        return text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> dict[str, str]:
        if self._owner != os.getpid():
            self._process = None
        if self._process is None or self._process.poll() is not None:
            self._start()
        reply = self._exchange(line, self._seconds)
        if reply is not None:
            return reply
        return {
            "error": f"it takes more than {self._seconds:g} s (the option template_seconds of the "
            f"tokenizer) or too much memory"
        }

    def _start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            HardpointError: it cannot be started.
        """
        if not sys.executable:
            raise HardpointError(
                "sys.executable: expected the path of a Python interpreter to render chat "
                "templates with, got none"
            )
        settings = {
            "path": sys.path,
            "seconds": self._seconds,
            "max_characters": self._max_characters,
            "max_bytes": _MAX_BYTES,
        }
        command = [sys.executable, "-I", str(chat_process.__file__), json.dumps(settings)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            )
        except (OSError, ValueError) as cause:
            raise HardpointError(f"chat templates: {command[0]} did not start: {cause}") from cause
        self._owner = os.getpid()
        if self._exchange(b"", _START_SECONDS) is None:
            raise HardpointError(
                f"chat templates: {command[0]} cannot render them; is jinja2 there?"
            )

    def _exchange(self, line: bytes, seconds: float) -> dict[str, str] | None:
        """Send a line and return the answer; None, and the process is ended, if none came."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        answer = b""
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(_MAX_ESCAPED * self._max_characters + 10_000)
        except OSError:  # it has ended
            return None
        finally:
            timer.cancel()
            if not (complete := answer.endswith(b"\n")):  # an interrupt leaves half an answer, too
                self._end()
        return json.loads(answer) if complete else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):  # what it did not read is lost
                process.communicate()


def _plain(value: Any) -> Any:
    """Return a value of another type as plain data; of what has none, the name of its type."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name in ("model_dump", "item"):  # pydantic models; scalars of numpy and torch
        if callable(method := getattr(value, name, None)):
            with contextlib.suppress(Exception):
                return method()
    return f"<{type(value).__name__}>"


def _check(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages: expected a list of {{"role": ..., "content": ...}}, got {messages!r}'
        )
    if not messages:
        raise RequestError("messages: expected at least one message, got an empty list")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f'{where}: expected {{"role": ..., "content": ...}}, got {message!r}'
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"{where}.role: expected a string such as 'user', got {message.get('role')!r}"
            )
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise RequestError(f"{where}.content: expected a string, got {content!r}")
    return [dict(message) for message in messages]
