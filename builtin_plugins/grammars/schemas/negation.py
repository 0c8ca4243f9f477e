"""Schemas for the values that another schema does not describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from .facts import Facts, Proofs, type_of
from .patterns import literal_of, none_of, not_starting
from .values import canonical
from .views import Made, Schema, View

_MAX_DEPTH = 12
_MAX_ALTERNATIVES = 200


_NUMBERS = frozenset({"integer", "number"})
_TYPES_OF = {
    **dict.fromkeys(("maxLength", "minLength", "pattern", "format"), frozenset({"string"})),
    **dict.fromkeys(
        ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum", "multipleOf"), _NUMBERS
    ),
    **dict.fromkeys(
        (
            "contains",
            "items",
            "maxContains",
            "maxItems",
            "minContains",
            "minItems",
            "prefixItems",
            "unevaluatedItems",
            "uniqueItems",
        ),
        frozenset({"array"}),
    ),
    **dict.fromkeys(
        (
            "additionalProperties",
            "dependentRequired",
            "dependentSchemas",
            "maxProperties",
            "minProperties",
            "patternProperties",
            "properties",
            "propertyNames",
            "required",
            "unevaluatedProperties",
        ),
        frozenset({"object"}),
    ),
}
"""The types of the values that a keyword restricts; the others it lets through."""


class InexpressibleError(ValueError):
    """No schema without `not` describes the other values; the message names the keyword."""


class Negations:
    """Makes schemas for the values that others do not describe, in the keywords of grammars."""

    def __init__(self, proofs: Proofs) -> None:
        self._proofs = proofs

    def others(self, schema: Schema, context: Sequence[Schema], depth: int = 0) -> list[Schema]:
        """Return alternatives: a value fits one or more of them just if it does not fit a schema.

        Args:
            schema: the given one.
            context: schemas that the values fit anyway.
            depth: levels of schemas around it.

        Raises:
            InexpressibleError: there are none in the keywords that a grammar can enforce.
        """
        self._proofs.spend(10)
        if isinstance(schema, bool):
            return [] if schema else [True]
        if depth > _MAX_DEPTH:
            raise InexpressibleError("a schema that nests deeply, or refers to itself")
        view = self._proofs.views(schema)
        facts = self._proofs.facts(context)
        alternatives: list[Schema] = []
        for keyword in view:
            others = self._others_of(keyword, schema, view, facts, depth)
            self._proofs.spend(sum(map(_size, others)))
            alternatives += others
            if len(alternatives) > _MAX_ALTERNATIVES:
                raise InexpressibleError(f"a schema with more than {_MAX_ALTERNATIVES} other cases")
        known = facts.parts
        return [
            alternative
            for alternative in alternatives
            if not self._proofs.are_apart([alternative], known)
        ]

    def _others_of(
        self, keyword: str, schema: Schema, view: View, facts: Facts, depth: int
    ) -> list[Schema]:
        if not facts.types & _TYPES_OF.get(keyword, facts.types):
            return []
        if keyword in ("allOf", "anyOf", "oneOf", "$ref", "not", "if", "then", "else"):
            return self._others_of_logic(keyword, schema, view, facts.parts, depth)
        if keyword == "properties":
            return [
                Made(type="object", required=[name], properties={name: other})
                for name, inner in view["properties"].items()
                for other in self.others(inner, facts.property(name), depth + 1)
            ]
        if keyword == "additionalProperties":
            return self._others_of_rest(view, facts, depth)
        simple = self._SIMPLE.get(keyword)
        if simple is None:
            raise InexpressibleError(f"the keyword {keyword}")
        return simple(view[keyword], facts)

    def _others_of_logic(
        self, keyword: str, schema: Schema, view: View, context: Sequence[Schema], depth: int
    ) -> list[Schema]:
        match keyword:
            case "allOf":
                return [
                    other
                    for part in view["allOf"]
                    for other in self.others(part, context, depth + 1)
                ]
            case "anyOf" | "oneOf":
                if keyword == "oneOf" and not self._proofs.are_all_apart(view["oneOf"], context):
                    raise InexpressibleError("a oneOf with branches that may overlap")
                parts = [self.others(part, context, depth + 1) for part in view[keyword]]
                return [Made(allOf=[Made(anyOf=part) for part in parts])] if all(parts) else []
            case "$ref":
                return self.others(self._proofs.views.target(schema), context, depth + 1)
            case "not":
                return [view["not"]]
            case "if":
                condition = view["if"]
                alternatives: list[Schema] = []
                for other in self.others(view.get("then", True), context, depth + 1):
                    alternatives.append(Made(allOf=[condition, other]))
                if others := self.others(view.get("else", True), context, depth + 1):
                    outside = self.others(condition, context, depth + 1)
                    alternatives += (
                        Made(allOf=[negation, other]) for negation in outside for other in others
                    )
                return alternatives
        return []

    def _others_of_rest(self, view: View, facts: Facts, depth: int) -> list[Schema]:
        rest = view["additionalProperties"]
        names = facts.names()
        if rest is True or rest == {}:
            return []
        if names is None or "patternProperties" in view:
            raise InexpressibleError("additionalProperties, where any other property may come")
        return [
            Made(type="object", required=[name], properties={name: other})
            for name in sorted(names - set(view.get("properties", ())))
            for other in self.others(rest, facts.property(name), depth + 1)
        ]

    @staticmethod
    def _type(types: Any, facts: Facts) -> list[Schema]:
        names = {types} if isinstance(types, str) else set(types)
        left = set(facts.types)
        if "number" in names:
            left -= {"integer", "number"}
        elif "integer" in names:
            left.discard("integer")
            if "number" in left:
                raise InexpressibleError("the type integer, where other numbers may come")
        left -= names
        return [Made(type=sorted(left))] if left else []

    @staticmethod
    def _values(constants: Sequence[Any], facts: Facts) -> list[Schema]:
        listed = {canonical(value): value for value in constants}
        if facts.values is not None:
            left = [value for text, value in facts.values.items() if text not in listed]
            return [Made(enum=left)] if left else []
        kinds = {type_of(value) for value in listed.values()}
        if kinds & {"integer", "number"}:
            kinds |= {"integer", "number"}
        alternatives: list[Schema] = []
        if plain := sorted(facts.types - kinds):
            alternatives.append(Made(type=plain))
        by_kind: dict[str, list[Any]] = {}
        for value in listed.values():
            kind = type_of(value)
            by_kind.setdefault("number" if kind == "integer" else kind, []).append(value)
        for kind, values in by_kind.items():
            numbers = facts.types & {"integer", "number"}
            if kind == "number" and numbers:
                alternatives += _between(sorted(values), min(numbers))
            elif kind not in facts.types or kind == "null":
                continue
            elif kind == "boolean":
                alternatives += (
                    Made(const=boolean) for boolean in (False, True) if boolean not in values
                )
            elif kind == "string":
                alternatives.append(Made(type="string", pattern=_inexpressible_if(none_of, values)))
            else:
                raise InexpressibleError(f"a constant of the type {kind}")
        return alternatives

    @staticmethod
    def _pattern(expression: str, _: Facts) -> list[Schema]:
        literal = literal_of(expression)
        if literal is None or not literal.starts:
            raise InexpressibleError(f"the pattern {expression!r}")
        if literal.ends:
            pattern = _inexpressible_if(none_of, [literal.text])
        elif literal.text:
            pattern = _inexpressible_if(not_starting, literal.text)
        else:
            return []
        return [Made(type="string", pattern=pattern)]

    @staticmethod
    def _required(required: Sequence[str], facts: Facts) -> list[Schema]:
        names = [name for name in required if name not in facts.required]
        return [Made(type="object", properties={name: False}) for name in names]

    _SIMPLE: ClassVar[Mapping[str, Callable[[Any, Facts], list[Schema]]]] = {
        "const": lambda value, facts: Negations._values([value], facts),
        "enum": lambda values, facts: Negations._values(values, facts),
        "dependentRequired": lambda required, _: [
            Made(type="object", required=[name], properties={other: False})
            for name, others in required.items()
            for other in others
        ],
        "pattern": _pattern,
        "required": _required,
        "type": _type,
        "exclusiveMaximum": lambda limit, _: [Made(type="number", minimum=limit)],
        "exclusiveMinimum": lambda limit, _: [Made(type="number", maximum=limit)],
        "maximum": lambda limit, _: [Made(type="number", exclusiveMinimum=limit)],
        "minimum": lambda limit, _: [Made(type="number", exclusiveMaximum=limit)],
        "maxItems": lambda count, _: [Made(type="array", minItems=count + 1)],
        "minItems": lambda count, _: _fewer("array", "maxItems", count),
        "maxLength": lambda count, _: [Made(type="string", minLength=count + 1)],
        "minLength": lambda count, _: _fewer("string", "maxLength", count),
        "maxProperties": lambda count, _: [Made(type="object", minProperties=count + 1)],
        "minProperties": lambda count, _: _fewer("object", "maxProperties", count),
    }


def _size(schema: Schema) -> int:
    return len(schema.get("pattern", "")) // 16 if isinstance(schema, Made) else 0


def _fewer(kind: str, name: str, count: int) -> list[Schema]:
    return [Made({"type": kind, name: count - 1})] if count > 0 else []


def _between(values: Sequence[float], kind: str) -> list[Schema]:
    inner = [
        Made(type=kind, exclusiveMinimum=lower, exclusiveMaximum=other)
        for lower, other in pairwise(values)
        if kind == "number" or other > lower + 1
    ]
    below = Made(type=kind, exclusiveMaximum=values[0])
    return [below, *inner, Made(type=kind, exclusiveMinimum=values[-1])]


def _inexpressible_if(make: Callable[[Any], str], value: Any) -> str:
    try:
        return make(value)
    except ValueError as cause:
        raise InexpressibleError(f"a constant, since {cause}") from cause
