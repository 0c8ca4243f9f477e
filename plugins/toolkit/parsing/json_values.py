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
    """Return a schema, or the target of its reference within the root schema.

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
    value: Any = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(value, Mapping) or name not in value:
            return otherwise
        value = value[name]
    return value


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
    """Return the keywords of a schema that may reject a value; the others only describe it."""
    return {name for name in schema if name not in _ANNOTATIONS and not name.startswith("x-")}


def named_types(schema: object, root: Mapping[str, Any] | None = None) -> set[str]:
    """Return the types that a parameter's schema names at its top; none if it leaves them open.

    A schema without types that lists its values has theirs.

    Args:
        schema: JSON schema of the parameter.
        root: the schema that it is part of, in which references are looked up.
    """
    return _types_of(schema, root or {}, {})


def _types_of(schema: object, root: Mapping[str, Any], known: dict[int, set[str]]) -> set[str]:
    """Return the types that a schema names; `known` has the types of the enclosing schemas."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return set()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = set()  # of a schema that refers to itself
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named or ())
    parts = [_types_of(part, root, known) for part in schema.get("allOf") or ()]
    if "$ref" in schema and restrictions(schema) != {"$ref"}:
        parts.append(_types_of({"$ref": schema["$ref"]}, root, known))
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key) or ()
        parts.append(set[str]().union(*(_types_of(choice, root, known) for choice in choices)))
    for more in filter(None, parts):
        types = (_taken(types) & _taken(more)) or types | more
    if not types:
        values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
        types = {_type_of(msgspec.json.encode(value).decode()) for value in values}
    known[id(schema)] = types
    return types


def _taken(types: set[str]) -> set[str]:
    """Return types and the types that they include: a number includes integers."""
    return {*types, "integer"} if "number" in types else types


_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS_OF_TYPES = {**{word: word for word in ("true", "false", "null")}, "none": "null"}

_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def _type_of(json: str) -> str:
    return _TYPES.get(json[0], "number" if set(".eE") & set(json) else "integer")


def json_value(text: str, schema: object = None, root: Mapping[str, Any] | None = None) -> str:
    """Return the JSON of a value that a model wrote as it likes.

    It is the text itself if that is JSON of a type that the schema names, or of any type without a
    schema; `True`, `False` and `None` are Python's for it, and so are lists and dictionaries of
    literals. Else it is the text as a string. Where it cannot be one, `TRUE` is `true`.

    Args:
        text: the text of the value.
        schema: JSON schema of the value; None leaves its type open.
        root: the schema that it is part of, in which references are looked up.
    """
    types = named_types(schema, root)
    literal = text.strip()
    if "string" not in types:
        word = _WORDS_OF_TYPES.get(literal.lower()) if types else _WORDS.get(literal)
        literal = word or literal
        holds = literal[:1] in {"{", "["} and (not types or types & {"array", "object"})
        if holds and not is_json(literal):
            literal = literal_value(literal) or literal
    if types == {"string"} or not is_json(literal):
        return quoted(text)
    is_wanted = literal[0] != '"' and _type_of(literal) in _taken(types)
    return quoted(text) if "string" in types and not is_wanted else literal


def quoted(text: str) -> str:
    """Return a text as a JSON string; half of a surrogate pair becomes a question mark."""
    return msgspec.json.encode(text.encode(errors="replace").decode()).decode()
