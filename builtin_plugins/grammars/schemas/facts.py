"""Facts about the values of JSON schemas, and proofs that two schemas have none in common.

A keyword that is not understood is left out of the facts: more values fit these, and a proof holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .formats import FORMATS
from .patterns import start_of
from .values import canonical
from .views import Made, Schema, View, Views

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})

_MAX_STEPS = 400_000
"""Schemas and values that are read for one document; a second or two of time."""

_MAX_DEPTH = 16
_CHOICE_DEPTH = 7  # as of so many levels: each branch is compared with all of the other side


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def common_types(first: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Return the types of both sets; "number" has the integers in it."""
    both = first & other
    if (
        "integer" in first | other
        and {"integer", "number"} & first
        and {"integer", "number"} & other
    ):
        return (both - {"number"}) | {"integer"}
    return both


def _plain_types(types: frozenset[str]) -> frozenset[str]:
    return types - {"integer"} if "number" in types else types


class Facts:
    """Facts about the values that several schemas describe together.

    Attributes:
        never: whether there is no such value.
        types: the types that they may have.
        values: the values there may be, by their canonical texts; None is any.
        required: names of properties that an object has.
        parts: the views of the schemas, and of the schemas that they refer to.
        choices: lists of schemas; a value fits one schema of each list.
    """

    def __init__(
        self, schemas: Sequence[Schema], views: Views, spend: Callable[[int], None]
    ) -> None:
        """`spend`: counts the parts read."""
        self.never = False
        self.types = TYPES
        self.values: dict[str, Any] | None = None
        self.required: set[str] = set()
        self.parts: list[View] = []
        self.choices: list[tuple[View, str]] = []
        pending, seen = deque(schemas), set()
        while pending:
            schema = pending.popleft()
            if isinstance(schema, bool):
                self.never |= not schema
            elif id(schema) not in seen:
                seen.add(id(schema))
                view = views(schema)
                spend(1 + len(view.get("enum", ())))
                self._add(view)
                pending += view.get("allOf", ())
                if "$ref" in view:
                    pending.append(views.target(schema))
        if not self.types or self.values == {}:
            self.never = True

    def _add(self, view: View) -> None:
        self.parts.append(view)
        if (type_names := view.get("type")) is not None:
            names = frozenset([type_names] if isinstance(type_names, str) else type_names)
            self.types = common_types(self.types, _plain_types(names))
        if "const" in view or "enum" in view:
            listed = [view["const"]] if "const" in view else view["enum"]
            values = {canonical(value): value for value in listed}
            if "const" in view and "enum" in view:
                allowed = {canonical(value) for value in view["enum"]}
                values = {text: value for text, value in values.items() if text in allowed}
            if self.values is not None:
                values = {text: value for text, value in values.items() if text in self.values}
            self.values = values
            kinds = _plain_types(frozenset(map(type_of, values.values())))
            self.types = common_types(self.types, kinds)
        self.required.update(view.get("required", ()))
        for name in ("anyOf", "oneOf"):
            if name in view:
                self.choices.append((view, name))

    def property(self, name: str) -> list[Schema]:
        """Return schemas that the value of a property fits, if there is one."""
        schemas: list[Schema] = []
        for part in self.parts:
            if name in (listed := part.get("properties", {})):
                schemas.append(listed[name])
            elif "patternProperties" not in part and "additionalProperties" in part:
                schemas.append(part["additionalProperties"])
        return schemas

    def names(self) -> set[str] | None:
        """Return the names that properties may have; None is any."""
        closed = [
            set(part.get("properties", ()))
            for part in self.parts
            if part.get("additionalProperties") is False and "patternProperties" not in part
        ]
        return set.intersection(*closed) if closed else None

    def item(self, index: int) -> list[Schema]:
        """Return schemas that an item of an array fits, if there is one there."""
        schemas: list[Schema] = []
        for part in self.parts:
            if index < len(first := part.get("prefixItems", ())):
                schemas.append(first[index])
            elif "items" in part:
                schemas.append(part["items"])
        return schemas

    def low(self, name: str) -> float:
        """Return the largest of a lower limit, such as `minItems`."""
        return max((part[name] for part in self.parts if _is_number(part.get(name))), default=0)

    def high(self, name: str) -> float:
        """Return the smallest of an upper limit."""
        limits = (part[name] for part in self.parts if _is_number(part.get(name)))
        return min(limits, default=float("inf"))

    def lower_limit(self) -> tuple[float, bool]:
        """Return the lower limit of numbers, and whether it is excluded."""
        limits = [
            (part["minimum"], False) for part in self.parts if _is_number(part.get("minimum"))
        ]
        name = "exclusiveMinimum"
        limits += [(part[name], True) for part in self.parts if _is_number(part.get(name))]
        return max(limits, default=(float("-inf"), False))

    def upper_limit(self) -> tuple[float, bool]:
        """Return the upper limit of numbers, and whether it is excluded."""
        limits = [
            (part["maximum"], False) for part in self.parts if _is_number(part.get("maximum"))
        ]
        name = "exclusiveMaximum"
        limits += [(part[name], True) for part in self.parts if _is_number(part.get(name))]
        return min(
            limits, key=lambda limit: (limit[0], not limit[1]), default=(float("inf"), False)
        )

    def values_of(self, kind: str) -> list[Any] | None:
        """Return the values of a type; None is any."""
        if self.values is None:
            every: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
            return every.get(kind)
        kinds = ("integer", "number") if kind in ("integer", "number") else (kind,)
        return [value for value in self.values.values() if type_of(value) in kinds]


class Proofs:
    """Proves that schemas have no value in common.

    Attributes:
        views: views of the document's schemas.
    """

    def __init__(self, views: Views) -> None:
        self.views = views
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], bool] = {}
        self._facts: dict[tuple[int, ...], Facts] = {}
        self._kept: list[Sequence[Schema]] = []  # lest an id is another one's later
        self._steps = 0

    def facts(self, schemas: Sequence[Schema]) -> Facts:
        """Return the facts about the values that fit all of some schemas."""
        self.spend(len(schemas))
        return Facts(schemas, self.views, self.spend)

    def spend(self, steps: int) -> None:
        """Count the parts read: a small document may have any number of alternatives.

        Raises:
            ValueError: it is too much.
        """
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise ValueError("expected fewer alternatives: to compare them takes too long")

    def are_apart(self, first: Sequence[Schema], other: Sequence[Schema], depth: int = 0) -> bool:
        """Return whether it is certain that no value fits all schemas of both."""
        if depth > _MAX_DEPTH:
            return False
        self.spend(len(first) + len(other))
        key = tuple(map(id, first)), tuple(map(id, other))
        if (known := self._known.get(key)) is not None:
            return known
        self._kept += (first, other)
        self._known[key] = False  # while it is being found: schemas refer to themselves
        for ids, schemas in zip(key, (first, other), strict=True):
            if ids not in self._facts:
                self._facts[ids] = self.facts(schemas)
        are_apart = self._compare(self._facts[key[0]], self._facts[key[1]], depth)
        self._known[key] = are_apart
        return are_apart

    def are_all_apart(self, schemas: Sequence[Schema], context: Sequence[Schema]) -> bool:
        """Return whether it is certain that no value of a context fits two of the schemas."""
        return not next(self.overlaps(schemas, context), None)

    def overlaps(
        self, schemas: Sequence[Schema], context: Sequence[Schema]
    ) -> Iterator[tuple[int, int]]:
        """Yield the indices of two schemas that a value of the context may fit both."""
        if self._has_discriminator(schemas, context):
            return
        for last, schema in enumerate(schemas):
            for first in range(last):
                if not self.are_apart([*context, schemas[first]], [*context, schema]):
                    yield first, last

    def _has_discriminator(self, schemas: Sequence[Schema], context: Sequence[Schema]) -> bool:
        every = [self.facts([*context, schema]) for schema in schemas]
        if not every or any(facts.types != {"object"} for facts in every):
            return False
        for name in set.intersection(*(facts.required for facts in every)):
            listed = [self.facts(facts.property(name)).values for facts in every]
            texts = [text for values in listed for text in values or ()]
            if None not in listed and len(set(texts)) == len(texts):
                return True
        return False

    def _compare(self, first: Facts, other: Facts, depth: int) -> bool:
        self.spend(sum(len(facts.parts) + len(facts.values or ()) for facts in (first, other)))
        if first.never or other.never:
            return True
        types = common_types(first.types, other.types)
        if all(self._are_apart_as(kind, first, other, depth) for kind in types):
            return True
        for mine, its in ((first, other), (other, first)):
            for view, name in mine.choices if depth + _CHOICE_DEPTH <= _MAX_DEPTH else ():
                rest = [_without(part, view, name) for part in mine.parts]
                parts = ([*rest, part] for part in view[name])
                if all(
                    self.are_apart(option, its.parts, depth + _CHOICE_DEPTH) for option in parts
                ):
                    return True
        return False

    def _are_apart_as(self, kind: str, first: Facts, other: Facts, depth: int) -> bool:
        for mine, its in ((first, other), (other, first)):
            listed = mine.values_of(kind)
            if listed is not None and all(_is_refused(value, kind, its) for value in listed):
                return True
        match kind:
            case "integer" | "number":
                return _is_below(first, other) or _is_below(other, first)
            case "string":
                return _are_texts_apart(first, other)
            case "array":
                return self._are_arrays_apart(first, other, depth)
            case "object":
                return self._are_objects_apart(first, other, depth)
        return False

    def _are_arrays_apart(self, first: Facts, other: Facts, depth: int) -> bool:
        low = max(first.low("minItems"), other.low("minItems"))
        if low > min(first.high("maxItems"), other.high("maxItems")):
            return True
        return any(
            self.are_apart(first.item(index), other.item(index), depth + 1)
            for index in range(min(int(low), _MAX_DEPTH))
        )

    def _are_objects_apart(self, first: Facts, other: Facts, depth: int) -> bool:
        def is_constant(name: str) -> bool:
            return self._has_values(first.property(name)) and self._has_values(other.property(name))

        names = sorted(first.required | other.required)
        for name in sorted(names, key=lambda name: not is_constant(name)):
            if self.are_apart(first.property(name), other.property(name), depth + 1):
                return True
        return False

    def _has_values(self, schemas: Sequence[Schema]) -> bool:
        views = (self.views(schema) for schema in schemas if isinstance(schema, Mapping))
        return any("const" in view or "enum" in view for view in views)


def _without(part: View, view: View, name: str) -> View:
    return (
        Made((key, value) for key, value in part.items() if key != name) if part is view else part
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_refused(value: Any, kind: str, facts: Facts) -> bool:
    """Return whether it is certain that a value does not fit; its type does."""
    if facts.values is not None and canonical(value) not in facts.values:
        return True
    if kind in ("integer", "number"):
        (least, above), (upper, below) = facts.lower_limit(), facts.upper_limit()
        return bool(
            value < least
            or value > upper
            or (above and value == least)
            or (below and value == upper)
        )
    if kind == "string":
        long = not facts.low("minLength") <= len(value) <= facts.high("maxLength")
        return long or any(not value.startswith(start) for start in _starts(facts))
    return False


def _is_below(first: Facts, other: Facts) -> bool:
    (upper, below), (least, above) = first.upper_limit(), other.lower_limit()
    return upper < least or (upper == least and (below or above))


def _are_texts_apart(first: Facts, other: Facts) -> bool:
    if max(first.low("minLength"), other.low("minLength")) > min(
        first.high("maxLength"), other.high("maxLength")
    ):
        return True
    pairs = ((mine, its) for mine in _starts(first) for its in _starts(other))
    if any(not mine.startswith(its) and not its.startswith(mine) for mine, its in pairs):
        return True
    formats = [
        [FORMATS[part["format"]] for part in facts.parts if "format" in part]
        for facts in (first, other)
    ]
    if any(mine.is_apart(its) for mine in formats[0] for its in formats[1]):
        return True
    return any(
        format.shortest > its.high("maxLength")
        or (format.longest is not None and format.longest < its.low("minLength"))
        for listed, its in ((formats[0], other), (formats[1], first))
        for format in listed
    )


def _starts(facts: Facts) -> Iterator[str]:
    for part in facts.parts:
        if "pattern" in part and (start := start_of(part["pattern"])):
            yield start
