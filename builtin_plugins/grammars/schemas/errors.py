"""Locate an error of llguidance in a JSON schema, and suggest a correction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .views import Schema, parts_of
from .writer import LENIENT, SchemaWriter

_MAX_PARTS = 300
_MAX_SECONDS = 1.0
"""For the parts of a schema, which are compiled one by one to find an error."""

_NO_VALUE = "Unsatisfiable"

_EXPECTED = {
    "are not disjoint": "expected patternProperties without a name that matches two",
    "circular references": "expected references to a schema that refers to itself to stand alone",
    "min/maxProperties only": "expected required properties only, next to such a limit",
    "regex is empty": "expected a simpler pattern, or no length next to it",
}


def located(
    message: str, root: Mapping[str, Any], error_of: Callable[[dict[str, Any]], str]
) -> str:
    """Return an error with the path of the schema that it is in.

    Args:
        message: the error of the whole schema.
        root: the schema.
        error_of: compiles a schema that a `SchemaWriter` wrote; returns the error or an empty text.
    """
    end = time.monotonic() + _MAX_SECONDS
    for path, schema in reversed(list(_parts(root))):
        try:
            error = error_of(SchemaWriter(root, is_inline=True).document(schema))
        except ValueError as cause:
            error = str(cause)
        if error and _NO_VALUE not in error:
            message = f"{path}: {error}" if path else error
            break
        if time.monotonic() > end:
            break
    for sign, expected in _EXPECTED.items():
        if sign in message:
            return f"{message}; {expected}{LENIENT}"
    return message


def _parts(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the first parts of a schema and their paths, outer parts before inner ones."""
    level: list[tuple[str, Schema]] = [("", root)]
    count = 0
    while level:
        inner: list[tuple[str, Schema]] = []
        for path, schema in level:
            count += 1
            if count > _MAX_PARTS:
                return
            yield path, schema
            if isinstance(schema, Mapping):
                inner += ((f"{path}.{name}".lstrip("."), part) for name, part in parts_of(schema))
        level = inner
