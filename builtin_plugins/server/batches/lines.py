"""Lines of OpenAI's batch files: requests with the path that each is for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hardpoint.plugins import RequestError
from hardpoint.typed import shown, suggest

from .text_lines import LineIds, decoded

if TYPE_CHECKING:
    from starlette.responses import Response

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Paths that the lines of a file may name, one per file."""

_FIELDS = ("custom_id", "method", "url", "body")
_LONGEST_NAME = 60


class LineError(msgspec.Struct, frozen=True):
    """Why a line is not a request, in the form of OpenAI's batch errors.

    Attributes:
        code: "invalid_json_line", "missing_required_parameter" or "invalid_value".
        message: names the file, the line, the field, its value and what would be right.
        param: name of the field; None if the line has no fields.
        line: number of the line, from 1.
    """

    code: str
    message: str
    param: str | None
    line: int


@dataclass(frozen=True)
class BatchLine:
    """One line of a batch file.

    Attributes:
        line: its number, from 1.
        id: its `custom_id`; None if it has no valid one.
        url: path that answers it; empty if the line is wrong.
        body: JSON of its body.
        digest: 64 bits of a hash of all of it, and of the model's name.
        problem: what is wrong with the line; None if nothing is.
    """

    line: int
    id: str | None
    url: str
    body: bytes
    digest: int
    problem: LineError | None = None


class _WrongFieldError(Exception):
    """A line is wrong: code, field and message."""

    def __init__(self, code: str, param: str | None, message: str) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class _Body(msgspec.Struct):
    stream: Any = None


def is_batch_line(text: str) -> bool:
    """Return whether a line is meant for OpenAI's batch service, by its fields."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return "custom_id" in fields or {"method", "url", "body"} <= fields.keys()


class BatchReader:
    """Reads the lines of one file; each has a unique `custom_id`."""

    def __init__(self, name: str, model: str) -> None:
        """Begin a file.

        Args:
            name: name of the file, for messages.
            model: name of the model that answers, for the digests.
        """
        self._name, self._model = name, model
        self._ids = LineIds(name, "custom_id")
        self._url: tuple[str, int] | None = None

    def read(self, number: int, text: str) -> BatchLine:
        """Return a line; a wrong line has a `problem`.

        Raises:
            RequestError: an earlier line, wrong or not, has the same `custom_id`, or another `url`.
        """
        fields: Mapping[str, msgspec.Raw] = {}
        try:
            fields = _decoded(text)
            custom_id, url, body = _checked(fields)
        except _WrongFieldError as wrong:
            message = f"{self._name}:{number}: {wrong}"
            problem = LineError(wrong.code, message, wrong.param, number)
            digest, named = _digest(text, self._model), _custom_id(fields)
            if named is not None:
                self._ids.add(number, named)
            return BatchLine(number, named, "", b"", digest, problem)
        self._check_file(number, custom_id, url)
        digest = _digest(custom_id, url, body, self._model)
        return BatchLine(number, custom_id, url, body, digest)

    def _check_file(self, number: int, custom_id: str, url: str) -> None:
        self._ids.add(number, custom_id)
        if self._url is None:
            self._url = url, number
        first, line = self._url
        if url != first:
            raise RequestError(
                f"{self._name}:{number}: url: expected {shown(first)}, as line {line} has, for a "
                f"file has one url, got {shown(url)}"
            )


def _decoded(text: str) -> dict[str, msgspec.Raw]:
    try:
        fields: dict[str, msgspec.Raw] = decoded(text, dict[str, msgspec.Raw])
        return fields
    except msgspec.ValidationError:
        wanted = f"expected an object with {', '.join(_FIELDS)}"
        message = f"{wanted}, got {shown(text[:60])}"
    except RequestError as error:
        message = str(error)
    raise _WrongFieldError("invalid_json_line", None, message)


def _checked(fields: Mapping[str, msgspec.Raw]) -> tuple[str, str, bytes]:
    for name in fields:
        if name not in _FIELDS:
            near, name = suggest(name, [*_FIELDS]), _short(name)
            raise _WrongFieldError(
                "invalid_value", name, f"{name}: unknown field{near}; known: {', '.join(_FIELDS)}"
            )
    for name in _FIELDS:
        if name not in fields:
            raise _WrongFieldError(
                "missing_required_parameter", name, f"{name}: expected a value, got none"
            )
    if (custom_id := _custom_id(fields)) is None:
        raise _wrong("custom_id", "a text that is not empty", fields)
    if _text(fields, "method") != "POST":
        raise _wrong("method", "'POST'", fields)
    url = _text(fields, "url")
    if url not in URLS:
        raise _wrong("url", " or ".join(map(repr, URLS)), fields)
    try:
        body = msgspec.json.decode(fields["body"], type=_Body)
    except (msgspec.ValidationError, RecursionError):
        raise _wrong("body", "an object, which is not too deep", fields) from None
    if body.stream not in (None, False):
        raise _WrongFieldError(
            "invalid_value", "body.stream", f"body.stream: expected false, got {shown(body.stream)}"
        )
    return custom_id, url, bytes(fields["body"])


def _short(name: str) -> str:
    """Return a name as errors quote it, which are kept."""
    return name if len(name) <= _LONGEST_NAME and name.isprintable() else shown(name, _LONGEST_NAME)


def _wrong(name: str, wanted: str, fields: Mapping[str, msgspec.Raw]) -> _WrongFieldError:
    got = bytes(fields[name])[:60].decode(errors="replace")
    return _WrongFieldError("invalid_value", name, f"{name}: expected {wanted}, got {got}")


def _custom_id(fields: Mapping[str, msgspec.Raw]) -> str | None:
    return _text(fields, "custom_id") or None


def _text(fields: Mapping[str, msgspec.Raw], name: str) -> str:
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (KeyError, msgspec.DecodeError, RecursionError):
        return ""


def _digest(*parts: str | bytes) -> int:
    hashed = msgspec.msgpack.encode(parts)
    return int.from_bytes(hashlib.blake2b(hashed, digest_size=8).digest(), "big")


class BatchResponse(msgspec.Struct, frozen=True):
    """The answer of a route: its status, the id of the HTTP request, and its JSON."""

    status_code: int
    request_id: str
    body: Any


class BatchAnswer(msgspec.Struct, frozen=True):
    """A line of an answer file, as OpenAI's batch service writes it.

    Attributes:
        id: "batch_req_" and the digest of the line that it answers.
        custom_id: `custom_id` of the line; None if it has none.
        response: answer of the route; None if the line is no request.
        error: problem of the line; None if it is a request.
    """

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: LineError | None = None

    @property
    def problem(self) -> str | None:
        """Why there is no result; None if there is one."""
        if self.error is not None:
            return self.error.message
        assert self.response is not None
        if self.response.status_code == _OK:
            return None
        body = self.response.body
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return str(message or f"status {self.response.status_code}")

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated, or of the prompt where none are."""
        body = None if self.response is None else self.response.body
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            return 0
        count = usage.get("completion_tokens", usage.get("prompt_tokens"))
        return count if isinstance(count, int) else 0


class _Error(msgspec.Struct):
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


def refusal_code(answer: Response) -> str | None:
    """Return the code of the error that a route answered with, if it has one."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer.body, type=_Refusal).error.code
    return None


_OK = 200
ID_PREFIX: Literal["batch_req_"] = "batch_req_"


def answer_to(
    line: BatchLine, answer: Response | None = None, problem: LineError | None = None
) -> BatchAnswer:
    """Return the answer to a line: the answer of the route, or the reason why there is none."""
    response = None
    if answer is not None:
        body = msgspec.json.decode(answer.body)
        response = BatchResponse(answer.status_code, answer.headers["x-request-id"], body)
    return BatchAnswer(f"{ID_PREFIX}{line.digest:016x}", line.id, response, problem or line.problem)
