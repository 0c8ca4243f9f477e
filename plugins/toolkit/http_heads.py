"""Heads of answers: which of them HTTP can carry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_STATUSES = range(200, 600)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")

__all__ = ["fault_of_head", "fault_of_refusal"]


def fault_of_head(status: object, headers: Sequence[object]) -> str | None:
    """Return the problem with the start of an answer; None if there is none.

    Args:
        headers: should be pairs of bytes.
    """
    if not isinstance(status, int) or status not in _STATUSES:
        return f"it answered with the status {status!r:.40}, expected 200 to 599"
    for header in headers:
        match header:
            case (bytes(name), bytes(value)):
                if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
                    return f"it answered with a header that HTTP cannot carry, {name!r:.80}"
                if name.lower() == b"content-length" and not _LENGTH.fullmatch(value):
                    return "it answered with a content-length that is no number"
            case _:
                return "it answered with headers that are no pairs of bytes"
    return None


def fault_of_refusal(
    status: object, headers: Mapping[Any, Any] | None, detail: object
) -> str | None:
    """Return the problem with a refusal as an exception; None if there is none.

    Args:
        headers: should be texts.
        detail: the message.
    """
    try:
        pairs = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in (headers or {}).items()]
    except (AttributeError, UnicodeEncodeError):
        return "it refused with headers that are no texts of Latin-1"
    try:
        str(detail).encode()
    except UnicodeEncodeError:
        return "it refused with a message that is no Unicode"
    return fault_of_head(status, pairs)
