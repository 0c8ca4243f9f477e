"""JSON schemas as draft 2020-12 has them, whatever draft they are written in.

A view of a schema has its restricting keywords: no annotations, no keywords unknown to its draft,
no redundant ones, and one form of each keyword that has several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from .formats import FORMATS

Schema = Mapping[str, Any] | bool

SIZES = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "dependentSchemas")
SCHEMAS = (
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_PLAIN = (
    "type",
    "enum",
    "const",
    "required",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "uniqueItems",
    "dependentRequired",
    "dependencies",
    "additionalItems",
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
)
_KNOWN = frozenset((*SIZES, *LISTS, *MAPS, *SCHEMAS, *_PLAIN))

_ITEMS_ELSEWHERE = frozenset(
    {"allOf", "anyOf", "oneOf", "if", "$ref", "contains", "dependentSchemas"}
)
"""Keywords that may describe items, so that such items do not count as the remaining ones."""

_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "maxContains": 2019,
    "minContains": 2019,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "prefixItems": 2020,
}
"""The drafts that brought keywords; before, they are annotations."""

_NEWEST = 2020

_DEFINITIONS = ("$defs", "definitions")


class Made(dict[str, Any]):
    """A schema that no user wrote: it is of the newest draft."""


View = Made


class Views:
    """Views of a document's schemas, and targets of its references."""

    def __init__(self, root: Schema) -> None:
        """`root`: its outermost schema."""
        self._root = root
        self._draft = _draft(root)
        self._views: dict[int, tuple[Schema, View]] = {}  # the schema is kept, and so its id
        self._targets: dict[str, Schema] = {}
        self._bases: dict[int, str] = {}  # of schemas with a reference
        if _has_names(root):
            self._collect(root)

    def __call__(self, schema: Schema) -> View:
        """Return the view of a schema that is not a bool."""
        entry = self._views.get(id(schema))
        if entry is None:
            entry = self._views[id(schema)] = schema, self._make(schema)
        return entry[1]

    def target(self, schema: Schema) -> Schema:
        """Return the schema that another one's `$ref` refers to.

        Raises:
            ValueError: there is none in the document.
        """
        assert isinstance(schema, Mapping)
        reference = str(schema["$ref"])
        base = self._bases.get(id(schema), "")
        address, fragment = urldefrag(urljoin(base, reference) if base else reference)
        within = self._targets.get(address) if address else self._root
        if fragment and not fragment.startswith("/"):
            within, fragment = self._targets.get(f"{address}#{fragment}"), ""
        target = None if within is None else _pointed(within, fragment)
        if target is None:
            raise ValueError(
                "$ref: expected a reference to a schema in this document, such as "
                f"'#/$defs/name', got {reference!r}, which is not there"
            )
        return target

    def _make(self, schema: Schema) -> View:
        assert isinstance(schema, Mapping)
        draft = _NEWEST if isinstance(schema, Made) else self._draft
        view = Made(
            (name, value)
            for name, value in schema.items()
            if name in _KNOWN and draft >= _SINCE.get(name, 0)
        )
        for name in SIZES:
            if isinstance(size := view.get(name), float) and size.is_integer():
                view[name] = int(size)
        base = self._bases.get(id(schema))
        if base and "$ref" in view:  # the base of a view, and of schemas made from it, is unknown
            view["$ref"] = urljoin(base, str(view["$ref"]))
        _with_items(view, draft)
        for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(view.get(name), bool):  # as draft 4 has it
                is_excluded = view.pop(name)
                if is_excluded and bound in view:
                    view[name] = view.pop(bound)
        _split_dependencies(view)
        _drop_idle(view)
        return view

    def _collect(self, root: Schema) -> None:
        pending = [(root, "")]
        while pending:
            schema, base = pending.pop()
            if not isinstance(schema, Mapping) or id(schema) in self._bases:
                continue
            schema_id = schema.get("$id")
            if isinstance(schema_id, str):
                address, anchor = urldefrag(urljoin(base, schema_id))
                if anchor:
                    self._targets.setdefault(f"{address}#{anchor}", schema)
                else:
                    base = address
                    self._targets.setdefault(base, schema)
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(name), str):
                    self._targets.setdefault(f"{base}#{schema[name]}", schema)
            self._bases[id(schema)] = base
            pending += ((part, base) for _, part in parts_of(schema))


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly in a schema as it is written, definitions too, with paths."""
    for name, value in schema.items():
        if name in (*MAPS, *_DEFINITIONS, "dependencies") and isinstance(value, Mapping):
            for inner, part in value.items():
                if isinstance(part, Mapping | bool):
                    yield f"{name}.{inner}", part
        elif name in (*SCHEMAS, "additionalItems") and isinstance(value, Mapping | bool):
            yield name, value
        elif name in (*LISTS, "items") and isinstance(value, list):
            for index, part in enumerate(value):
                if isinstance(part, Mapping | bool):
                    yield f"{name}[{index}]", part


def _with_items(view: View, draft: int) -> None:
    rest = view.pop("additionalItems", None)
    if isinstance(first := view.get("items"), list):
        view["prefixItems"] = first
        del view["items"]
        if rest is not None:
            view["items"] = rest
    elif draft < _SINCE["prefixItems"]:
        view.pop("prefixItems", None)


def _split_dependencies(view: View) -> None:
    if isinstance(dependencies := view.pop("dependencies", None), Mapping):
        lists = {
            name: dependency
            for name, dependency in dependencies.items()
            if isinstance(dependency, list)
        }
        others = {
            name: dependency for name, dependency in dependencies.items() if name not in lists
        }
        view["dependentRequired"] = {**view.get("dependentRequired", {}), **lists}
        view["dependentSchemas"] = {**view.get("dependentSchemas", {}), **others}


def _drop_idle(view: View) -> None:
    idle: list[str] = []
    if "if" not in view or not view.keys() & {"then", "else"}:
        idle += ("if", "then", "else")
    if view.get("format") not in FORMATS:  # an annotation
        idle.append("format")
    if not view.get("uniqueItems"):
        idle.append("uniqueItems")
    if "contains" not in view or (view.get("minContains") == 0 and "maxContains" not in view):
        idle += ("contains", "minContains", "maxContains")
    for name in idle:
        view.pop(name, None)
    if "unevaluatedItems" in view and not view.keys() & _ITEMS_ELSEWHERE:
        rest = view.pop("unevaluatedItems")
        view.setdefault("items", rest)


def _draft(root: Schema) -> int:
    name = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
    for sign, draft in (("draft-03", 3), ("draft-04", 4), ("draft-06", 6), ("draft-07", 7)):
        if sign in name:
            return draft
    return 2019 if "2019-09" in name else _NEWEST


def _has_names(root: Schema) -> bool:
    pending: list[Any] = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            if part.keys() & {"$id", "$anchor", "$dynamicAnchor"}:
                return True
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return False


def _pointed(within: Any, pointer: str) -> Schema | None:
    part = within
    for name in unquote(pointer).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part if isinstance(part, Mapping | bool) else None
