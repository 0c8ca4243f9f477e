"""Values of JSON from text that is not JSON, by the schema that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from .json_scanner import MAX_DEPTH, is_json
from .python_literals import literal_value

__all__ = [
    "json_value",
    "named_types",
    "quoted",
    "resolved",
    "restrictions",
]


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema, or what it refers to in the schema that it is part of.

    A reference to something else is returned as it is; so is one with other keywords.
    """
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return schema
        others = restrictions(schema)
        if others == {"$ref"} and str(schema["$ref"]).startswith("#"):
            schema = _at(root, str(schema["$ref"]), schema)
        elif others == {"allOf"} and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        else:
            return schema
    return schema


def _at(root: Mapping[str, Any], pointer: str, otherwise: Any) -> Any:
    """Return the value that a JSON pointer (RFC 6901) with a leading # refers to."""
    found: Any = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return otherwise
        found = found[name]
    return found


_ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)


def restrictions(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that may refuse a value; the others only describe it."""
    return {name for name in schema if name not in _ANNOTATIONS and not name.startswith("x-")}


def named_types(schema: object) -> set[str]:
    """Return the types that a parameter's schema names at its top; none if it leaves them open."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named or ())
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            types |= named_types(choice)
    return types


_WORDS = {"True": "true", "False": "false", "None": "null"}

_TYPES = {"{": "object", "[": "array", '"': "text", "t": "boolean", "f": "boolean", "n": "null"}


def json_value(text: str, schema: object = None) -> str:
    """Return the JSON of a value that a model wrote as it likes.

    It is the text itself if that is JSON of a type that the schema names, or of any type without a
    schema; `True`, `False` and `None` are Python's for it, and so are lists and dictionaries of
    literals. Else it is the text as a string.

    Args:
        text: the text of the value.
        schema: JSON schema of the value; None leaves its type open.
    """
    types = named_types(schema)
    found = text.strip()
    if "string" not in types:
        found = _WORDS.get(found, found)
        holds = found[:1] in {"{", "["} and (not types or types & {"array", "object"})
        if holds and not is_json(found):
            found = literal_value(found) or found
    if (types and types <= {"string"}) or not is_json(found):
        return quoted(text)
    kind = _TYPES.get(found[0], "number" if set(".eE") & set(found) else "integer")
    wanted = {*types, "integer"} if "number" in types else types
    return quoted(text) if "string" in types and kind not in wanted else found


def quoted(text: str) -> str:
    """Return a text as a JSON string; half of a surrogate pair becomes a question mark."""
    return msgspec.json.encode(text.encode(errors="replace").decode()).decode()
