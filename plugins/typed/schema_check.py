"""JSON schemas as users write them: their keywords and their depth are checked.

Called for schemas of answers and of tools, before anything recurses into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.errors import RequestError

from .convert import convert

__all__ = ["check_depth", "check_schema", "without_nulls"]

MAX_DEPTH = 200
"""Maximum depth of schemas and tags: deeper ones are rejected before any recursion."""

TypeName = Literal["string", "number", "integer", "boolean", "null", "object", "array"]
Size = Annotated[int, Meta(ge=0)]
UNSET = msgspec.UNSET


class _Schema(msgspec.Struct, rename={"defs": "$defs", "ref": "$ref", "not_": "not"}):
    """The keywords of a JSON schema, with types that catch slips of the pen."""

    type: TypeName | list[TypeName] | msgspec.UnsetType = UNSET
    enum: list[Any] | msgspec.UnsetType = UNSET
    properties: dict[str, _Schema | bool] | msgspec.UnsetType = UNSET
    required: list[str] | msgspec.UnsetType = UNSET
    additionalProperties: _Schema | bool | msgspec.UnsetType = UNSET  # noqa: N815
    items: _Schema | bool | list[_Schema | bool] | msgspec.UnsetType = UNSET
    prefixItems: list[_Schema | bool] | msgspec.UnsetType = UNSET  # noqa: N815
    anyOf: list[_Schema | bool] | msgspec.UnsetType = UNSET  # noqa: N815
    oneOf: list[_Schema | bool] | msgspec.UnsetType = UNSET  # noqa: N815
    allOf: list[_Schema | bool] | msgspec.UnsetType = UNSET  # noqa: N815
    not_: _Schema | bool | msgspec.UnsetType = UNSET
    defs: dict[str, _Schema | bool] | msgspec.UnsetType = UNSET
    ref: str | msgspec.UnsetType = UNSET
    pattern: str | msgspec.UnsetType = UNSET
    format: str | msgspec.UnsetType = UNSET
    minimum: float | msgspec.UnsetType = UNSET
    maximum: float | msgspec.UnsetType = UNSET
    minLength: Size | float | msgspec.UnsetType = UNSET  # noqa: N815
    maxLength: Size | float | msgspec.UnsetType = UNSET  # noqa: N815
    minItems: Size | float | msgspec.UnsetType = UNSET  # noqa: N815
    maxItems: Size | float | msgspec.UnsetType = UNSET  # noqa: N815


def check_schema(schema: Any, path: str) -> None:
    """Check the keywords of a JSON schema, at any depth.

    Raises:
        RequestError: a keyword has a wrong value; names its path.
    """
    check_depth(schema, path)
    convert(schema, _Schema | bool, path=path, error=RequestError)  # type: ignore[arg-type]


def check_depth(value: Any, path: str) -> None:
    """Reject data with too deep nesting, before any recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RequestError(f"{path}: expected at most {MAX_DEPTH} levels, got more")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
            elif isinstance(item, msgspec.Struct):
                inner += (getattr(item, name) for name in item.__struct_fields__)
        level = inner


_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)


def without_nulls(schema: Any) -> Any:
    """Return a JSON schema without the keywords that are null, at any depth.

    Clients write null for a keyword that is left out. Null as a value (`const`, `default`, an item
    of `enum`) stays. The schema is no deeper than `check_depth` allows.
    """
    if isinstance(schema, list):
        return [without_nulls(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _VALUES and (value is not None or name != "enum"):
            result[name] = value
        elif name in _BY_NAME and isinstance(value, Mapping):
            result[name] = {key: without_nulls(inner) for key, inner in value.items()}
        elif value is not None:
            result[name] = without_nulls(value)
    return result
