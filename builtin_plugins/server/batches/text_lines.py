"""Lines of a file of JSON, whatever their form: read one at a time, and checked alike."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec

from hardpoint.plugins import RequestError
from hardpoint.typed import shown

MAX_LINE_BYTES = 1 << 24

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Line ends of Unicode, which are escaped, so that programs see one line."""


def line_of(value: Any) -> bytes:
    """Return a line of JSON, with its end."""
    encoded = msgspec.json.encode(value) + b"\n"
    return encoded if encoded.isascii() else encoded.decode().translate(_LINE_ENDS).encode()


def next_line(file: BinaryIO, name: str, number: int) -> bytes:
    """Return the next line of a file, with its end; empty after the last one.

    Args:
        name: name of the file, for messages.
        number: number of the line, from 1.

    Raises:
        RequestError: it is too long.
        OSError: the file cannot be read.
    """
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise RequestError(
            f"{name}:{number}: expected a line of at most {MAX_LINE_BYTES >> 20} MiB"
        )
    return line


def texts(next_of: Callable[[int], bytes], name: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, without their ends, with their numbers from 1.

    Args:
        next_of: returns the line of a number; empty after the last one.
        name: name of the file, for messages.

    Raises:
        RequestError: a line is not UTF-8.
        Exception: raised by `next_of`.
    """
    number = 0
    while line := next_of(number + 1):
        number += 1
        text = text_of(line, name, number)
        if text.strip():
            yield number, text.rstrip("\r\n")


def text_of(line: bytes, name: str, number: int) -> str:
    """Return the text of a line; the first line may begin with a byte order mark.

    Raises:
        RequestError: it is not UTF-8.
    """
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}:{number}: expected UTF-8, got the byte 0x{line[error.start]:02x} "
            f"at position {error.start}"
        ) from None


def decoded(text: str, type_: Any = Any) -> Any:
    """Return the JSON of a line.

    Raises:
        msgspec.ValidationError: it is of another type.
        RequestError: it is no JSON.
    """
    try:
        return msgspec.json.decode(text, type=type_)
    except (msgspec.DecodeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError) and type_ is not Any:
            raise  # of anything, it is a number that is too large
        raise RequestError(f"expected a line of JSON, got {shown(text[:60])}: {error}") from None


class LineIds:
    """The unique ids of the lines of one file."""

    def __init__(self, name: str, field: str) -> None:
        """Begin without ids; `name` and `field` of the file and the id are for messages."""
        self._name, self._field = name, field
        self._lines: dict[str | int, int] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, number: int, id_: str | int) -> None:
        """Add the id of a line.

        Raises:
            RequestError: an earlier line has it.
        """
        if (line := self._lines.setdefault(id_, number)) != number:
            raise RequestError(
                f"{self._name}:{number}: {self._field}: expected a new one, got {shown(id_)}, "
                f"which line {line} has"
            )
