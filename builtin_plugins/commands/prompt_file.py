"""The prompts of `hardpoint generate --file`: JSON lines or text, read one at a time."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from hardpoint.builtin_plugins.server.batches.text_lines import (
    LineIds,
    decoded,
    next_line,
    text_of,
    texts,
)
from hardpoint.plugins import RequestError, RequestOutputKind, SamplingParams
from hardpoint.typed import shown, suggest

_OWN = ("id", "prompt", "messages")
_DIGITS = 20  # more than any token id has
_NOT_DATA = ("output_kind", "logits_processors", "routed_experts")
_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name not in _NOT_DATA)


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file.

    Attributes:
        line: its number, from 1.
        id: id of the answer.
        fields: `prompt` or `messages`, as the line has it.
        messages: the conversation, if the chat template is to be used.
        params: sampling parameters of the options, overridden by the line.
        digest: 64 bits of a hash of everything but line and id.
    """

    line: int
    id: str | int
    fields: dict[str, Any]
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    digest: int


class LineFile:
    """A file of lines, read line by line.

    Attributes:
        name: its path, for messages.
        stat: status of the file; None if it is unknown.
        is_regular: whether it can be read again.
    """

    def __init__(self, path: str) -> None:
        """Open the file; "-" is standard input.

        Raises:
            RequestError: it cannot be opened.
        """
        self.name = "standard input" if path == "-" else path
        self._peeked: list[bytes] = []
        try:
            self._file: BinaryIO = _standard_input() if path == "-" else open(path, "rb")  # noqa: SIM115
            self._owns_file = path != "-"
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RequestError(f"--file: {self.name!r} cannot be read: {reason}") from None
        self.stat: os.stat_result | None = None
        with contextlib.suppress(io.UnsupportedOperation):  # a stand-in for standard input
            self.stat = os.fstat(self._file.fileno())
        self.is_regular = self.stat is not None and stat.S_ISREG(self.stat.st_mode)
        self._start = self._file.tell() if self.is_regular else 0

    def close(self) -> None:
        """Close the file; standard input stays open. A thread may still wait for a line."""
        if self._owns_file:
            raw = getattr(self._file, "raw", self._file)  # has no lock that the thread may hold
            raw.close()

    def peek(self) -> str:
        """Return the first line that is not blank; empty if there is none. `texts` has it, too.

        Raises:
            RequestError: the file cannot be read, or a line is too long or not UTF-8.
        """
        lines: list[bytes] = []
        while line := self._next_line(len(lines) + 1):
            lines.append(line)
            if line.removeprefix(codecs.BOM_UTF8).strip():
                break
        self._peeked = lines
        return text_of(lines[-1], self.name, len(lines)) if lines else ""

    def texts(self) -> Iterator[tuple[int, str]]:
        """Yield the lines that are not blank, with their numbers, from 1.

        A regular file is read from its beginning each time.

        Raises:
            RequestError: the file cannot be read, or a line is too long or not UTF-8.
        """
        if self.is_regular:
            self._file.seek(self._start)
            self._peeked = []
        yield from texts(self._next_line, self.name)

    def _next_line(self, number: int) -> bytes:
        if self._peeked:
            return self._peeked.pop(0)
        try:
            return next_line(self._file, self.name, number)
        except OSError as error:  # a folder, for one
            raise RequestError(f"--file: {self.name!r} cannot be read: {error.strerror}") from None


def _standard_input() -> BinaryIO:
    """Return standard input as a file of its own.

    The interpreter closes `sys.stdin` at its end, and fails if a thread waits for a line of it.
    """
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:  # a stand-in for standard input
        return sys.stdin.buffer


class PromptFile:
    """A file of prompts.

    Only one line is in memory at a time, and the ids, so that none comes twice.
    """

    def __init__(
        self, file: LineFile, params: SamplingParams, *, is_text: bool, chat: bool
    ) -> None:
        """Read the prompts of a file.

        Args:
            params: parameters of lines without their own.
            is_text: whether each line is a prompt, instead of JSON.
            chat: whether prompts go through the chat template.
        """
        self._file = file
        self._params = msgspec.structs.replace(params, output_kind=RequestOutputKind.CUMULATIVE)
        self._is_text, self._chat = is_text, chat

    def requests(self) -> Iterator[PromptLine]:
        """Yield the requests; a regular file is read from its beginning each time.

        Raises:
            RequestError: a line is wrong, with its number; or there is none.
        """
        name = self._file.name
        ids = LineIds(name, "id")
        for number, text in self._file.texts():
            try:
                request = self._read(number, text)
            except RequestError as error:
                raise RequestError(f"{name}:{number}: {error}") from None
            ids.add(number, request.id)
            yield request
        if not ids:
            raise RequestError(f"{name}: expected a prompt per line, got none")

    def _read(self, number: int, text: str) -> PromptLine:
        value = text if self._is_text else decoded(text)
        fields = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(fields, dict):
            raise RequestError(
                f"expected a text, or an object with prompt or messages, got {shown(value)}"
            )
        _check_names(fields)
        prompt = {name: fields[name] for name in _OWN[1:] if name in fields}
        messages = self._messages(prompt)
        params = self._own_params({k: v for k, v in fields.items() if k not in _OWN})
        plain = msgspec.to_builtins(params, str_keys=True)
        hashed = msgspec.json.encode([prompt, messages is not None, plain], order="sorted")
        digest = int.from_bytes(hashlib.blake2b(hashed, digest_size=8).digest(), "big")
        return PromptLine(
            number, _checked_id(fields.get("id", number)), prompt, messages, params, digest
        )

    def _messages(self, fields: dict[str, Any]) -> list[dict[str, Any]] | None:
        if len(fields) != 1:
            raise RequestError("expected either prompt or messages")
        if "messages" in fields:
            messages: list[dict[str, Any]] = fields["messages"]
            if not isinstance(messages, list) or not messages:
                raise RequestError(f"messages: expected a list of messages, got {shown(messages)}")
            for index, message in enumerate(messages):
                if not isinstance(message, dict) or "role" not in message:
                    raise RequestError(
                        f"messages[{index}]: expected an object with role and content, "
                        f"got {shown(message)}"
                    )
            return messages
        prompt = fields["prompt"]
        is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise RequestError(
                f"prompt: expected a text or a list of token ids, got {shown(prompt)}"
            )
        if not self._chat:
            return None
        if is_ids:
            raise RequestError("prompt: expected a text, for --chat, got token ids")
        return [{"role": "user", "content": prompt}]

    def _own_params(self, fields: dict[str, Any]) -> SamplingParams:
        if not fields:
            return self._params
        if isinstance(bias := fields.get("logit_bias"), dict):  # the keys of JSON are texts
            fields["logit_bias"] = {
                int(key) if key.isdecimal() and len(key) < _DIGITS else key: value
                for key, value in bias.items()
            }
        return msgspec.structs.replace(self._params, **fields).checked()


def _check_names(fields: dict[str, Any]) -> None:
    known = [*_OWN, *_FIELDS]
    for name in fields:
        if name == "custom_id":
            raise RequestError(
                "custom_id: this is a line for OpenAI's batch service, unlike the first line; "
                'expected such as {"id": "a", "messages": [...], "max_tokens": 9}'
            )
        if name not in known:
            raise RequestError(
                f"{name}: unknown field{suggest(name, known)}; known: {', '.join(known)}"
            )


def _checked_id(value: Any) -> str | int:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    raise RequestError(f"id: expected a text or a whole number, got {shown(value)}")
