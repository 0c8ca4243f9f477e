"""Errors as answers, with a status, the path of the bad field and a remedy.

They have OpenAI's shape; those of `/v1/messages`, Anthropic's.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hardpoint.errors import (
    EngineClosedError,
    EngineDeadError,
    EnginePausedError,
    EngineTimeoutError,
    PluginFaultError,
    PromptTooLongError,
    QueueFullError,
    RequestEndedError,
)
from hardpoint.plugins import OverloadedError, RequestError
from hardpoint.typed import suggest

from .field_names import grammar_error

_PATH = re.compile(r"[A-Za-z_][\w.\-/]*(?:\[\d+\][\w.\-/]*)*(?=: )")
_RETRY_SECONDS = 5
# How Hardpoint quotes exceptions that are not its own: "its prepare failed: OSError: ...".
_QUOTED = re.compile(
    r"((?:\bfailed: [A-Za-z_][\w.]*)|(?:: [A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt))): .*",
    re.DOTALL,
)
# Where the configuration names a plugin, and in which file, if it names one in parentheses, which
# may have others that do not match.
_ORIGIN = re.compile(
    r", asked for by [^\s:;,]+"
    r"(?: \((?:(?:[^()]|\([^()]*\))*\)|.*?\))(?=[:;,\s]|$)|(?=: |; |, |$))"
)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_SOURCE = re.compile(r"(?:/[\w.+@-]+)+\.(?:py|pyx|rs|cc?|cpp|cu|h|hpp|so)\b(?::\d+)*")

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "overloaded_error",
}


class ErrorDetail(msgspec.Struct):
    """The description of an error.

    Attributes:
        message: the reason, and what would be right.
        type: class of the error, such as "invalid_request_error".
        param: path of the field, where one is wrong.
        code: for programs; None where the type is enough.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of an answer that is an error."""

    error: ErrorDetail


MESSAGES_PATH = "/v1/messages"

_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesErrorDetail(msgspec.Struct):
    """The description of an error, for clients of Anthropic's API."""

    type: str
    message: str


class MessagesErrorBody(msgspec.Struct):
    """The body of an answer that is an error, in Anthropic's shape."""

    error: MessagesErrorDetail
    type: str = "error"


class AnswerError(Exception):
    """An error with the status that it is answered with.

    Attributes:
        status: HTTP status.
        detail: the body.
        headers: further headers, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Choose the type by the status, unless `kind` is it."""
        super().__init__(message)
        self.status = status
        by_status = "server_error" if status >= 500 else "invalid_request_error"
        self.detail = ErrorDetail(
            message, kind or _KINDS.get(status, by_status), param=param, code=code
        )
        self.headers = dict(headers or {})


def unavailable(
    message: str, retry_after: float = _RETRY_SECONDS, code: str | None = None
) -> AnswerError:
    """Return the error 503 of a server that cannot answer now."""
    headers = {"retry-after": str(max(1, round(retry_after)))}
    return AnswerError(503, message, kind="unavailable_error", code=code, headers=headers)


def answer_error(error: BaseException, retry_after: float = _RETRY_SECONDS) -> AnswerError:
    """Return the answer to a request that failed with an error.

    Args:
        error: any; the answer has no details of one that is not Hardpoint's, nor of how an engine
            ended.
        retry_after: seconds after which an overloaded server has room.
    """
    match error:
        case AnswerError():
            return error
        case HTTPException():
            headers = dict(error.headers or {})
            return AnswerError(error.status_code, str(error.detail), headers=headers)
        case QueueFullError():
            return unavailable(for_clients(str(error)), error.retry_after, code="overloaded")
        case OverloadedError():
            headers = {"retry-after": str(max(1, round(retry_after)))}
            return AnswerError(429, for_clients(str(error)), code="overloaded", headers=headers)
        case RequestError():
            message = for_clients(grammar_error(str(error)))
            match = _PATH.match(message)
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            return AnswerError(400, message, param=match[0] if match else None, code=code)
        case RequestEndedError(finish_reason=reason):
            status = 408 if reason == "timeout" else 503
            return AnswerError(status, for_clients(str(error)), code=reason or None)
        case EngineDeadError():
            return unavailable("the engine has ended; send the request again later")
        case EngineClosedError() | EnginePausedError() | EngineTimeoutError():
            return unavailable(for_clients(str(error)))
        case PluginFaultError():
            return plugin_fault(str(error))
    return AnswerError(500, "the server failed; its log says why")


def no_route(path: str, known: Collection[str]) -> AnswerError:
    """Return the answer to a request for an unknown path, with the nearest known path.

    Args:
        known: paths of the routes.
    """
    bare = path.rstrip("/").removeprefix("/v1")
    near = [meant for meant in (path.rstrip("/"), f"/v1{bare}", bare) if meant in known]
    hint = f" (did you mean {near[0]!r}?)" if near else suggest(path[:200], list(known))
    return AnswerError(404, f"path: there is no route {path[:200]!r}{hint}", code="not_found")


def plugin_fault(message: str) -> AnswerError:
    """Return the answer to a request that a plugin ended; clients are not to send it again."""
    headers = {"x-should-retry": "false"}
    return AnswerError(500, for_clients(message), kind="plugin_error", headers=headers)


def for_clients(message: str) -> str:
    """Return a message without the texts of libraries and plugins that it quotes.

    They may hold paths, addresses and data of others; the class of the exception stays. Nor has it
    the origin of a plugin in the configuration. The log has all of it.
    """
    message = _ORIGIN.sub("", message)
    message = _QUOTED.sub(r"\1", message)
    return _SOURCE.sub("(a file)", _ADDRESS.sub("(an address)", message))


def quotes_a_library(message: str) -> bool:
    """Return whether a message quotes an exception that is not Hardpoint's.

    What comes after a value of the request may be the client's own text.
    """
    ours = message.partition(", got ")[0]
    return _QUOTED.search(ours) is not None or _SOURCE.search(ours) is not None


def for_log(text: str) -> str:
    """Return a text without parts that look like lines of the log."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def trace_for_log(error: BaseException) -> str:
    """Return an error's trace, each line of it indented; texts in it may be a client's."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(f"    {for_log(line)}" for line in lines)


def error_body(error: AnswerError, path: str) -> bytes:
    """Return an error as JSON, in the shape of the family that a path belongs to."""
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        by_status = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = _MESSAGES_KINDS.get(error.status, by_status)
        return msgspec.json.encode(
            MessagesErrorBody(MessagesErrorDetail(kind, error.detail.message))
        )
    return msgspec.json.encode(ErrorBody(error.detail))


def error_response(error: AnswerError, path: str) -> Response:
    """Return the response of an error to a request for a path."""
    body = error_body(error, path)
    return Response(body, error.status, error.headers, media_type="application/json")
