"""JSON Schemas of types, with their docstrings as descriptions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .describing import attribute_docs, first_paragraph, walk_structs

__all__ = ["json_schema", "schema_components"]


def json_schema(type_: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of an Options, Arguments or configuration type.

    Docstrings become the descriptions of tables and fields.
    """
    schema = msgspec.json.schema(type_)
    _describe_schemas(schema.get("$defs", {}), [type_])
    return schema


def schema_components(
    types: Sequence[type[msgspec.Struct]], place: str
) -> tuple[dict[type[msgspec.Struct], str], dict[str, dict[str, Any]]]:
    """Return the JSON Schemas of types for one document, as `json_schema` describes them.

    Args:
        place: where the schemas are in the document, such as "#/components/schemas/".

    Returns:
        The names of the schemas of all types, also of nested ones; and the schemas by name.
            If two types have one name, the names begin with the name of the module.
    """
    _, whole = msgspec.json.schema_components(types, ref_template=place + "{name}")
    names = _describe_schemas(whole, types)
    short = {name: _short_name(name) for name in whole}
    schemas = {short[name]: _renamed(schema, place, short) for name, schema in whole.items()}
    return {type_: short[name] for type_, name in names.items()}, schemas


def _describe_schemas(
    schemas: Mapping[str, dict[str, Any]], types: Sequence[type[msgspec.Struct]]
) -> dict[type[msgspec.Struct], str]:
    """Add docstrings to schemas; return the names of the types' schemas."""
    names: dict[type[msgspec.Struct], str] = {}
    for table in (table for type_ in types for table in walk_structs(type_)):
        whole = f"{table.__module__}.{table.__qualname__}"
        names[table] = name = whole if whole in schemas else table.__name__
        if (schema := schemas.get(name)) is None:
            continue
        schema["description"] = first_paragraph(table)
        docs = attribute_docs(table)
        for field, content in schema.get("properties", {}).items():
            if field in docs:
                content["description"] = docs[field]
    return names


def _short_name(name: str) -> str:
    *modules, last = re.sub(r"[^\w.]", "_", name).split(".")
    return "_".join([*modules[-1:], last])


def _renamed(value: Any, place: str, names: Mapping[str, str]) -> Any:
    """Return a schema with its references renamed."""
    if isinstance(value, dict):
        return {key: _renamed(item, place, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, place, names) for item in value]
    if isinstance(value, str) and value.startswith(place):
        return place + names.get(value.removeprefix(place), value.removeprefix(place))
    return value
