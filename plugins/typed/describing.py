"""Types and docstrings as data and text, for help, schemas and the reference."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect as types

__all__ = [
    "FieldDoc",
    "attribute_docs",
    "child_type",
    "first_paragraph",
    "named_child",
    "struct_fields",
    "type_at",
    "type_info",
    "type_text",
    "walk_structs",
]

_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*)$")


@dataclass(frozen=True)
class FieldDoc:
    """One field of a typed table.

    Attributes:
        type_text: its type as text, such as `a whole number >= 1`.
        default: its default; meaningless if `required`.
        doc: from the table's docstring, or from `Meta(description=...)`; may be empty.
        table: the field's own table type, where it is one.
    """

    name: str
    type_text: str
    required: bool
    default: Any
    doc: str
    table: type[msgspec.Struct] | None = None


def first_paragraph(thing: Any) -> str:
    """Return the first paragraph of an object's own docstring on one line; empty without one."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    return " ".join(text.split("\n\n", 1)[0].split())


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the entries of the `Attributes:` sections of a class and its bases, by name.

    An entry `before, after: text` counts for both names.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs.update(_attribute_entries(inspect.cleandoc(base.__doc__ or "")))
    return docs


@functools.lru_cache(maxsize=256)
def type_info(type_: Any) -> types.Type:
    """Return msgspec's description of a type."""
    # Cached: msgspec walks all types below, and a flood of malformed messages must stay cheap.
    return types.type_info(type_)


def struct_fields(struct: type[msgspec.Struct]) -> list[FieldDoc]:
    """Return the fields of a table in their order."""
    docs = attribute_docs(struct)
    info = type_info(struct)
    assert isinstance(info, types.StructType)
    return [
        FieldDoc(
            name=field.encode_name,
            type_text=type_text(field.type),
            required=field.required,
            default=_default(field),
            doc=docs.get(field.name) or _described(field.type),
            table=field.type.cls if isinstance(field.type, types.StructType) else None,
        )
        for field in info.fields
    ]


def walk_structs(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Yield a table type and every table type that it holds, each once."""
    seen: set[type] = set()
    waiting: list[Any] = [type_info(struct)]
    while waiting:
        info = waiting.pop(0)
        if isinstance(info, types.StructType) and info.cls not in seen:
            seen.add(info.cls)
            yield info.cls
            waiting.extend(field.type for field in info.fields)
        for part in ("type", "item_type", "value_type"):
            if (inner := getattr(info, part, None)) is not None:
                waiting.append(inner)
        waiting.extend(getattr(info, "types", ()))


def type_at(type_: Any, steps: Iterable[str]) -> types.Type | None:
    """Return the type at a path below a type; None if there is no such path."""
    info: types.Type | None = type_info(type_)
    for step in steps:
        info = child_type(info, step)
    return info


def child_type(info: types.Type | None, step: str) -> types.Type | None:
    """Return the type of a field, key or item (`[0]`) of a type; None if it has no such thing."""
    return named_child(info, step)[1]


def named_child(info: types.Type | None, step: str) -> tuple[str, types.Type | None]:
    """Return the name of a step and the type that it leads to, as `child_type`.

    The name differs from the step where a struct travels as an array: `[2]` is its second field.
    """
    if isinstance(info, types.Metadata):
        return named_child(info.type, step)
    if isinstance(info, types.UnionType):
        children = (named_child(option, step) for option in info.types)
        return next((child for child in children if child != (step, None)), (step, None))
    is_item = step.startswith("[")
    index = int(step[1:-1]) if is_item and step[1:-1].isdecimal() else None
    if isinstance(info, types.StructType):
        return _field(info, step, index)
    if isinstance(info, types.ListType | types.VarTupleType | types.SetType) and is_item:
        return step, info.item_type
    if isinstance(info, types.DictType):
        return step, info.value_type
    if isinstance(info, types.TupleType) and index is not None and index < len(info.item_types):
        return step, info.item_types[index]
    return step, None


def type_text(info: types.Type) -> str:
    """Return a type as text, such as `a whole number >= 1, or none`."""
    if isinstance(info, types.Metadata):
        return type_text(info.type)
    if isinstance(info, types.UnionType):
        return _union_text(info)
    text = _TYPE_TEXTS.get(type(info))
    return text(info) if text else type(info).__name__.removesuffix("Type").lower()


def _field(info: types.StructType, step: str, index: int | None) -> tuple[str, types.Type | None]:
    if not info.array_like:
        return step, next((f.type for f in info.fields if f.encode_name == step), None)
    if index is None:
        return step, None
    index -= info.tag is not None  # the tag comes first
    if 0 <= index < len(info.fields):
        return info.fields[index].name, info.fields[index].type
    return ("status" if index < 0 else step), None


def _attribute_entries(doc: str) -> dict[str, str]:
    """Return the entries of one docstring's `Attributes:` section."""
    _, heading, section = doc.partition("\nAttributes:\n")
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines() if heading else ():
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.match(line[4:])
        if entry and not line.startswith(" " * 5):
            names = entry["names"].split(", ")
            entries.update(dict.fromkeys(names, entry["text"]))
        elif line.strip():
            entries.update({name: f"{entries[name]} {line.strip()}" for name in names})
    return entries


def _described(info: types.Type) -> str:
    if isinstance(info, types.Metadata):
        return str((info.extra_json_schema or {}).get("description", ""))
    return ""


def _default(field: types.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _union_text(info: types.UnionType) -> str:
    optional = any(isinstance(option, types.NoneType) for option in info.types)
    texts = [type_text(o) for o in info.types if not isinstance(o, types.NoneType)]
    return " or ".join(texts) + (", or none" if optional else "")


def _number(noun: str) -> Callable[[Any], str]:
    def text(info: Any) -> str:
        if info.ge is not None and info.le is not None:
            return f"{noun} from {info.ge} to {info.le}"
        limits = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
        parts = [f"{sign} {limit}" for sign, limit in limits if limit is not None]
        return " ".join([noun, " and ".join(parts)]) if parts else noun

    return text


def _list_text(info: Any) -> str:
    inner = type_text(info.item_type)
    return f"{'a non-empty list' if info.min_length else 'a list'}, each {inner}"


def _dict_text(info: Any) -> str:
    if isinstance(info.value_type, types.AnyType):
        return "a table"
    return f"a table, each {type_text(info.value_type)}"


def _struct_text(info: Any) -> str:
    names = ", ".join(field.encode_name for field in info.fields)
    return f"a table of {names}" if names else "an empty table"


_TYPE_TEXTS: Mapping[type, Callable[[Any], str]] = {
    types.AnyType: lambda _: "anything",
    types.BoolType: lambda _: "true or false",
    types.NoneType: lambda _: "none",
    types.IntType: _number("a whole number"),
    types.FloatType: _number("a number"),
    types.StrType: lambda info: "a non-empty string" if info.min_length else "a string",
    types.LiteralType: lambda info: " or ".join(f'"{value}"' for value in info.values),
    types.EnumType: lambda info: " or ".join(f'"{item.value}"' for item in info.cls),
    types.ListType: _list_text,
    types.VarTupleType: _list_text,
    types.DictType: _dict_text,
    types.StructType: _struct_text,
}
