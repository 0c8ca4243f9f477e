"""Keywords of JSON schemas that grammars lack, as alternatives: a value has to fit a case.

`oneOf`, `not`, `if`, dependencies, `contains` and `uniqueItems` restrict a value in ways for which
a grammar has no rules of its own. Where they come down to a few cases of keywords that it has,
these are exact; otherwise a keyword is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from math import comb
from typing import Any, NamedTuple

from .facts import Proofs
from .negation import InexpressibleError, Negations
from .values import canonical
from .views import Made, Schema, View

_MAX_CASES = 256
"""Of one schema."""

_MAX_ITEMS = 1500
"""Items of all arrays that have each value once."""

_MAX_POSITIONS = 32
"""Of the item that an array contains."""


class Case(NamedTuple):
    """One way in which a value may fit.

    Attributes:
        schemas: it fits all of these.
        evaluated: the schemas among them with evaluated properties.
    """

    schemas: tuple[Schema, ...] = ()
    evaluated: tuple[Schema, ...] = ()


class Cases:
    """Makes the cases of keywords."""

    def __init__(self, proofs: Proofs) -> None:
        self._proofs = proofs
        self._others = Negations(proofs).others
        self._by_keyword = {
            "oneOf": self._one_of,
            "anyOf": self._any_of,
            "not": self._negated,
            "if": self._conditional,
            "dependentRequired": self._dependent_required,
            "dependentSchemas": self._dependent_schemas,
            "contains": self._contains,
            "uniqueItems": self._unique_items,
            "minProperties": self._min_properties,
            "maxProperties": self._max_properties,
        }

    def of(self, keyword: str, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        """Yield lists of cases; a value that fits the keyword fits a case of each list.

        Args:
            keyword: the keyword.
            view: the schema that has it.
            base: schemas that the values fit anyway.

        Raises:
            ValueError: there are none that a grammar can enforce; the message ends a sentence that
                begins with the keyword.
        """
        try:
            yield from self._by_keyword[keyword](view, base)
        except InexpressibleError as cause:
            raise ValueError(f"{_EXPECTED[keyword]}, not {cause}") from cause

    def product(self, lists: Sequence[Sequence[Case]], base: Sequence[Schema]) -> list[Case]:
        """Return the combined cases of several lists, without cases that no value fits.

        Raises:
            ValueError: there are too many.
        """
        products = [Case()]
        for cases in sorted(lists, key=len):
            products = [
                Case((*product.schemas, *case.schemas), (*product.evaluated, *case.evaluated))
                for product in products
                for case in cases
                if not self._proofs.are_apart([*base, *product.schemas], case.schemas)
            ]
            if len(products) > _MAX_CASES:
                raise ValueError(f"expected at most {_MAX_CASES} cases together, got more")
        return [Case(self._merged(case.schemas, base), case.evaluated) for case in products]

    def _merged(self, schemas: tuple[Schema, ...], base: Sequence[Schema]) -> tuple[Schema, ...]:
        lists = [name for schema in schemas if (name := _listed(schema)) is not None]
        if len(lists) < 2:
            return schemas
        facts = self._proofs.facts([*base, *schemas])
        merged: list[Schema] = [
            schema for schema in schemas if _listed(schema) is None and schema is not True
        ]
        for name in dict.fromkeys(lists):
            values = self._proofs.facts(facts.property(name)).values or {}
            allowed = Made(enum=list(values.values()))
            merged.append(Made(type="object", required=[name], properties={name: allowed}))
        return tuple(merged)

    def _one_of(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        branches: list[Schema] = view["oneOf"]
        both: dict[int, list[int]] = {}
        for first, last in self._proofs.overlaps(branches, base):
            both.setdefault(first, []).append(last)
            both.setdefault(last, []).append(first)
        cases: list[Case] = []
        for index, branch in enumerate(branches):
            lists = [[Case((branch,), (branch,))]]
            for other in both.get(index, ()):
                outside = self._others(branches[other], [*base, branch])
                lists.append([Case((other,)) for other in outside])
            cases += self.product(lists, base)
        yield cases

    def _any_of(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        if not self._proofs.are_all_apart(view["anyOf"], base):
            raise ValueError(_EXPECTED["anyOf"])
        yield [Case((branch,), (branch,)) for branch in view["anyOf"]]

    def _negated(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        yield [Case((other,)) for other in self._others(view["not"], base)]

    def _conditional(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        condition, then, other = view["if"], view.get("then", True), view.get("else", True)
        for name in self._doubtful(condition, base):
            yield [Case((Made(properties={name: False}),)), Case((Made(required=[name]),))]
        fits = (condition, then)
        outside = self._others(condition, base)
        yield [Case(fits, fits), *(Case((negation, other), (other,)) for negation in outside)]

    def _doubtful(self, condition: Schema, base: Sequence[Schema]) -> Iterator[str]:
        if isinstance(condition, Mapping):
            view, facts = self._proofs.views(condition), self._proofs.facts(base)
            for name in view.get("properties", ()):
                if name not in view.get("required", ()) and name not in facts.required:
                    yield name

    def _dependent_required(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:  # noqa: ARG002
        for name, others in view["dependentRequired"].items():
            if others:
                required = Made(required=[name, *others])
                yield [Case((Made(properties={name: False}),)), Case((required,))]

    def _dependent_schemas(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:  # noqa: ARG002
        for name, schema in view["dependentSchemas"].items():
            fits = Case((Made(required=[name]), schema), (schema,))
            yield [Case((Made(properties={name: False}),)), fits]

    def _contains(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        facts = self._proofs.facts(base)
        if "array" not in facts.types:
            return
        part = view["contains"]
        least, limit = view.get("minContains", 1), view.get("maxContains")
        plain = [Made(type=sorted(facts.types - {"array"}))] if facts.types != {"array"} else []
        others: list[Case] = [Case((schema,)) for schema in plain]
        if limit is not None and least > limit:
            yield others
            return
        if part is True or part == {}:
            limits = Made(type="array", minItems=least)
            if limit is not None:
                limits["maxItems"] = limit
            yield [Case((limits,)), *others]
            return
        if limit == 0:
            first = any("prefixItems" in part for part in facts.parts)
            outside = self._others(part, [] if first else facts.item(0))
            items = Made(anyOf=outside) if outside else False
            yield [Case((Made(type="array", items=items),)), *others]
            return
        longest = facts.high("maxItems")
        if limit is not None or least != 1 or longest > _MAX_POSITIONS:
            raise ValueError(_EXPECTED["contains"])
        yield [
            *(
                Case((Made(type="array", prefixItems=[True] * index + [part], minItems=index + 1),))
                for index in range(int(longest))
            ),
            *others,
        ]

    def _unique_items(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:  # noqa: ARG002
        facts = self._proofs.facts(base)
        if "array" not in facts.types or facts.high("maxItems") <= 1:
            return
        if any("prefixItems" in part for part in facts.parts):
            raise ValueError(_EXPECTED["uniqueItems"])
        item = self._proofs.facts(facts.item(0))
        values = item.values
        if values is None and item.types <= {"boolean", "null"}:
            listed = [value for kind in sorted(item.types) for value in item.values_of(kind) or ()]
            values = {canonical(value): value for value in listed}
        if values is None:
            raise ValueError(_EXPECTED["uniqueItems"])
        low, high = int(facts.low("minItems")), min(facts.high("maxItems"), len(values))
        cases = [Case((array,)) for array in _arrays(list(values.values()), low, int(high))]
        if rest := sorted(facts.types - {"array"}):
            cases.append(Case((Made(type=rest),)))
        yield cases

    def _min_properties(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        yield from self._counted(view["minProperties"], base, "minProperties")

    def _max_properties(self, view: View, base: Sequence[Schema]) -> Iterator[list[Case]]:
        yield from self._counted(view["maxProperties"], base, "maxProperties")

    def _counted(self, count: int, base: Sequence[Schema], keyword: str) -> Iterator[list[Case]]:
        facts = self._proofs.facts(base)
        names = facts.names()
        if names is None:
            raise ValueError(_EXPECTED[keyword])
        optional = sorted(names - facts.required)
        left = count - len(facts.required)
        if 0 <= left <= len(optional) and comb(len(optional), left) > _MAX_CASES:
            raise ValueError(_EXPECTED[keyword])
        if keyword == "minProperties":
            groups = list(combinations(optional, left)) if left > 0 else []
            cases = [Case((Made(type="object", required=list(group)),)) for group in groups]
            impossible = left > len(optional)
        else:
            groups = list(combinations(optional, max(len(optional) - left, 0)))
            cases = [
                Case((Made(type="object", properties=dict.fromkeys(group, False)),))
                for group in groups
                if group
            ]
            impossible = left < 0
        if impossible or cases:
            rest = sorted(facts.types - {"object"})
            yield [*cases, *([Case((Made(type=rest),))] if rest else [])]


def _listed(schema: Schema) -> str | None:
    if not isinstance(schema, Made) or schema.keys() != {"type", "required", "properties"}:
        return None
    ((name, inner), *more) = schema["properties"].items()
    is_list = isinstance(inner, Made) and inner.keys() == {"enum"}
    return name if is_list and not more and schema["required"] == [name] else None


def _arrays(values: Sequence[Any], low: int, high: int) -> list[Made]:
    arrays = [Made(type="array", maxItems=0)] if low == 0 else []
    count = 0
    # Two lengths at a time; the last item may be missing.
    for length in range(max(low, 1), high + 1, 2):
        longer = min(length + 1, high)
        for first in permutations(values, longer - 1):
            rest = [
                value
                for value in values
                if not any(value is value_before for value_before in first)
            ]
            count += longer - 1 + len(rest)
            if count > _MAX_ITEMS:
                raise ValueError(_EXPECTED["uniqueItems"])
            arrays.append(
                Made(
                    type="array",
                    prefixItems=[*(Made(const=constant) for constant in first), Made(enum=rest)],
                    minItems=length,
                    maxItems=longer,
                )
            )
    return arrays


_EXPECTED = {
    "anyOf": (
        "expected branches that a constant, a type or a required property distinguishes, since "
        "unevaluatedProperties depends on them"
    ),
    "contains": (
        f"expected maxItems of at most {_MAX_POSITIONS}, and no minContains or maxContains, or a "
        "maxContains of 0"
    ),
    "dependentRequired": "expected lists of names",
    "dependentSchemas": "expected schemas",
    "if": "expected a condition of constants, types, limits and required properties",
    "maxProperties": (
        "expected required properties only, or additionalProperties that is false and few others"
    ),
    "minProperties": (
        "expected 1 more than there are required properties at most, or additionalProperties that "
        "is false and few others; a property of an open object may be written twice"
    ),
    "not": "expected a schema of constants, types, limits and required properties",
    "oneOf": (
        "expected branches that a constant, a type or a required property distinguishes, or anyOf"
    ),
    "uniqueItems": (
        "expected items of an enum, with few values or a small maxItems, and no prefixItems"
    ),
}
