"""Which parts of a JSON schema xgrammar does not enforce."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# Of a schema's keywords, xgrammar reads the first of these and none that would narrow it; without
# any, it reads those of the type.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OBJECT = frozenset(
    {
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
    }
)
_ARRAY = frozenset({"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"})
_BY_TYPE = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _NUMBER,
    "integer": _NUMBER,
    "object": _OBJECT,
    "array": _ARRAY,
}
_TYPED = frozenset().union(*_BY_TYPE.values())
# These are ignored, or only in part enforced.
_NEVER = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "additionalItems",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "maxContains",
        "minContains",
        "not",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
_WITH_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_WITH_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_WITH_SCHEMA = (
    "additionalProperties",
    "items",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (Mapping,),
    "array": (list,),
}


def unenforced_keywords(schema: Any) -> list[str]:
    """Return the keywords of a schema that xgrammar does not enforce, sorted.

    xgrammar reads the parts of a schema that its `$ref`s reach from the root, and ignores much of
    them without a word; of the rest it warns.
    """
    return sorted({keyword for part in _reachable(schema) for keyword in _unenforced(part)})


def spelled_out(schema: Any) -> Any:
    """Return a schema that xgrammar takes as others do.

    Of a constant that is an object or an array, it accepts the compact spelling alone; a format
    that it does not know is an annotation.
    """
    if not isinstance(schema, Mapping):
        return schema
    written = dict(schema)
    if isinstance(written.get("format"), str) and written["format"] not in _FORMATS:
        del written["format"]
    for name, parts in written.items():
        if name in _WITH_NAMES and isinstance(parts, Mapping):
            written[name] = {inner: spelled_out(part) for inner, part in parts.items()}
        elif name in _WITH_LIST and isinstance(parts, list):
            written[name] = [spelled_out(part) for part in parts]
        elif name in _WITH_SCHEMA:
            written[name] = spelled_out(parts)
    return _with_constants(written)


def _with_constants(written: dict[str, Any]) -> dict[str, Any]:
    alone = next((name for name in _ALONE if name in written), None)
    if alone == "const" and isinstance(written["const"], Mapping | list):
        return _constant(written["const"])
    values = written.get("enum")
    if alone == "enum" and isinstance(values, list):
        whole = [value for value in values if isinstance(value, Mapping | list)]
        if whole:
            rest = [value for value in values if not isinstance(value, Mapping | list)]
            return {"anyOf": [*([{"enum": rest}] if rest else []), *map(_constant, whole)]}
    return written


def _constant(value: Any) -> dict[str, Any]:
    """Return a schema for one value; its parts may be apart from each other."""
    if isinstance(value, Mapping):
        properties = {name: _constant(part) for name, part in value.items()}
        closed = {"properties": properties, "required": list(value)}
        return {"type": "object", **(closed if value else {}), "additionalProperties": False}
    if isinstance(value, list) and value:
        items = list(map(_constant, value))
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(value)}
    return {"type": "array", "maxItems": 0} if value == [] else {"const": value}


def _unenforced(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unenforced keywords of one schema, without its parts."""
    yield from _NEVER & schema.keys()
    alone = next((name for name in _ALONE if name in schema), None)
    if alone is None:
        yield from _unenforced_of_type(schema)
        return
    for name in {*_ALONE, *_TYPED} & schema.keys():
        if name != alone:
            yield f"{name} together with {alone}"
    if schema[alone] == []:
        yield f"{alone} without any schema"
    if "type" in schema and not _are_of_type(schema, alone):
        yield f"type together with {alone}"
    if alone == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        yield "allOf of several schemas"
    if alone == "$ref" and any(sign in str(schema["$ref"]) for sign in "~%"):
        yield "$ref with escapes"


def _unenforced_of_type(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unenforced keywords that describe a schema's values itself."""
    types = _types(schema)
    if not types:
        yield from (f"{name} without type" for name in _TYPED & schema.keys())
    if "object" in types:
        yield from _unenforced_names(schema)
    if "string" in types and schema.get("format") in _FORMATS and "pattern" in schema:
        yield "format together with pattern"


def _unenforced_names(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems with the names of an object's properties."""
    names = schema.get("properties")
    names = names if isinstance(names, Mapping) else {}
    required = schema.get("required")
    if isinstance(required, list) and any(str(name) not in names for name in required):
        yield "required properties without a schema in properties"
    # Another property may be called so: its name is compared as it is written.
    is_open = schema.get("additionalProperties") is not False
    if is_open and any(json.dumps(name, ensure_ascii=False)[1:-1] != name for name in names):
        yield "properties with escapes in names, without additionalProperties: false"
    if is_open and schema.get("minProperties"):  # it counts a name that comes twice as two
        yield "minProperties without additionalProperties: false"


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema has, or that xgrammar infers."""
    declared = schema.get("type")
    if declared is not None:
        return [str(name) for name in (declared if isinstance(declared, list) else [declared])]
    if schema.keys() & {"properties", "additionalProperties", "unevaluatedProperties"}:
        return ["object"]
    if schema.keys() & {"items", "prefixItems", "unevaluatedItems"}:
        return ["array"]
    return []


def _are_of_type(schema: Mapping[str, Any], alone: str) -> bool:
    """Return whether the values that a schema lists all have its type."""
    if alone not in ("const", "enum"):
        return False
    values = [schema["const"]] if alone == "const" else schema["enum"]
    types = _types(schema)
    kinds = tuple(kind for name in types for kind in _TYPES.get(name, ()))
    return isinstance(values, list) and all(
        isinstance(value, kinds) and (not isinstance(value, bool) or "boolean" in types)
        for value in values
    )


def _reachable(root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that xgrammar reads, each once."""
    pending: list[Any] = [root]
    seen: set[int] = set()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        if isinstance(reference := schema.get("$ref"), str):
            pending.append(_resolve(root, reference))
        for name in ("properties", "patternProperties"):
            if isinstance(parts := schema.get(name), Mapping):
                pending += parts.values()
        for name in _WITH_LIST:
            if isinstance(parts := schema.get(name), list):
                pending += parts
        for name in _WITH_SCHEMA:
            pending.append(schema.get(name))


def _resolve(root: Any, reference: str) -> Any:
    """Return the schema that a reference names; None if xgrammar does not find it either."""
    part = root
    for name in reference.removeprefix("#").split("/"):
        if not name:
            continue
        if not isinstance(part, Mapping) or name not in part:
            return None
        part = part[name]
    return part
