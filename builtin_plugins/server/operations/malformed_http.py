"""The answer to bytes of a client that are no HTTP."""

from __future__ import annotations

import httptools

from hardpoint.builtin_plugins.server.errors import AnswerError

_TLS = b"\x16\x03"
_PROBLEMS = {
    "CONNECT": "CONNECT is not supported",
    "Content-Length overflow": "its Content-Length is too large",
    "Duplicate Content-Length": "it has two Content-Length headers",
    "Expected CRLF after version": "its lines do not end in CR LF",
    "Expected HTTP/, RTSP/ or ICE/": "its target is not followed by `HTTP/1.1`",
    "Expected LF after chunk data": "a chunk is longer than its size",
    "Invalid HTTP version": "its version is another one",
    "Invalid character in Content-Length": "its Content-Length is no number",
    "Invalid character in chunk size": "the size of a chunk is no hexadecimal number",
    "Invalid header token": "the name of a header has a character that is not allowed",
    "Invalid header value char": "the value of a header has a control character",
    "Missing expected CR after header value": "its lines do not end in CR LF",
    "Missing expected LF after header value": "its lines do not end in CR LF",
    "Pause on PRI/Upgrade": "it is HTTP/2",
    "Request has invalid `Transfer-Encoding`": "its Transfer-Encoding is not chunked",
    "Transfer-Encoding can't be present with Content-Length": (
        "it has both a Content-Length and a Transfer-Encoding"
    ),
    "Unexpected space after start line": "its first header begins with a space",
}
"""Problems of requests by the parser's texts."""


def malformed(error: BaseException, data: bytes) -> AnswerError:
    """Return the answer to a request that is no HTTP.

    Args:
        error: the parser's.
        data: in which it was found.
    """
    if isinstance(error, httptools.HttpParserCallbackError) and error.__context__ is not None:
        error = error.__context__
    if isinstance(error, httptools.HttpParserInvalidURLError):
        problem: str | None = "its target is no path or URL"
    elif isinstance(error, httptools.HttpParserInvalidMethodError):
        problem = "its first word is no method"
        if data.startswith(_TLS):
            problem = "it is TLS, which this address does not speak"
    else:
        problem = _PROBLEMS.get(str(error))
    message = "request: expected HTTP/1.1" + (f"; {problem}" if problem else "")
    return AnswerError(400, message, code="malformed_http")
