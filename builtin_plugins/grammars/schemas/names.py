"""Which names the properties of objects may have, as keywords that llguidance enforces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .facts import Proofs
from .formats import FORMATS
from .patterns import none_of, quotable
from .views import Made, Schema, View, Views

_LISTED = frozenset({"$ref", "allOf", "const", "enum", "type"})
_MAX_LETTERS = 1_000
"""Of listed names next to which others have a schema of their own: about 50 ms."""

_HIDING = frozenset({"anyOf", "oneOf", "if", "dependentSchemas"})


def named(result: dict[str, Any], view: View, proofs: Proofs) -> list[Any]:
    """Restrict the properties of a written schema to its `propertyNames`.

    Args:
        result: the written schema, which is changed.
        view: the schema.
        proofs: proofs about the document's schemas.

    Returns: written schemas that the values have to fit as well.

    Raises:
        ValueError: they cannot be restricted so.
    """
    names = view.get("propertyNames", True)
    if names is True or names == {}:
        return []
    if names is False:
        return [{"maxProperties": 0}]
    facts = proofs.facts([names])
    rest, listed = result.get("additionalProperties", True), result.get("properties", {})
    if "patternProperties" in view:
        raise ValueError("expected no patternProperties next to it")
    if facts.values is not None and all(part.keys() <= _LISTED for part in facts.parts):
        allowed = facts.values_of("string") or []
        known = {name: value if name in allowed else False for name, value in listed.items()}
        result["properties"] = known | {name: rest for name in allowed if name not in listed}
        result["additionalProperties"] = False
        return []
    pattern = _pattern_of(facts.parts)
    if pattern is None or (listed and rest is not True):
        raise ValueError(
            "expected an enum, or one pattern, format or limit of length, and no properties next "
            "to additionalProperties"
        )
    if not pattern:
        return []
    pattern = quotable(pattern)
    if listed:
        return [{"patternProperties": {pattern: True}, "additionalProperties": False}]
    result["patternProperties"] = {pattern: rest}
    result["additionalProperties"] = False
    return []


def without_escapes(result: dict[str, Any]) -> None:
    """Spell the other names of a written schema's properties without needless escapes.

    llguidance lets other names escape any letter, so that they could spell a listed one and bring
    values which that may not have. Names that fit a pattern have no such escapes.

    Args:
        result: the written schema, which is changed. One with patterns of names is left as it is,
            since no expression has the names that fit none of them; and so is one with a schema for
            other names next to long listed ones, because their expression would compile slowly.
    """
    rest, listed = result.get("additionalProperties", True), result.get("properties")
    if not listed or rest is False or "patternProperties" in result:
        return
    if rest is not True and sum(map(len, listed)) > _MAX_LETTERS:
        return
    result["patternProperties"] = {"" if rest is True else quotable(none_of(listed)): rest}
    result["additionalProperties"] = False


def unevaluated(view: View, evaluated: Sequence[Schema], rest: Schema, views: Views) -> Schema:
    """Return a schema for the properties that no other schema in the same place describes.

    Args:
        view: the schema that has `unevaluatedProperties`.
        evaluated: the branches that a value fits.
        rest: the schema that these properties fit.
        views: views of the document's schemas.

    Raises:
        ValueError: it depends on the value which these are.
    """
    names: dict[str, Schema] = dict.fromkeys(view.get("properties", ()), True)
    pending: list[Schema] = [*evaluated, *view.get("allOf", ())]
    if "$ref" in view:
        pending.append(views.target(view))
    if "patternProperties" in view:
        pending.append(Made(patternProperties=view["patternProperties"]))
    seen: set[int] = set()
    while pending:
        schema = pending.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        seen.add(id(schema))
        part = views(schema)
        if part.keys() & _HIDING or "patternProperties" in part:
            raise ValueError(
                "expected the properties that other keywords describe to be certain, or "
                "additionalProperties"
            )
        if "additionalProperties" in part or part.get("unevaluatedProperties", False) is not False:
            return True
        names |= dict.fromkeys(part.get("properties", ()), True)
        pending += part.get("allOf", ())
        if "$ref" in part:
            pending.append(views.target(schema))
    return Made(properties=names, additionalProperties=rest)


def _pattern_of(parts: Sequence[View]) -> str | None:
    patterns: list[str] = []
    for part in parts:
        for name, value in part.items():
            if name == "pattern":
                patterns.append(value)
            elif name == "format":
                patterns += (f"^(?:{expression})$" for expression in FORMATS[value].expressions)
            elif name in ("minLength", "maxLength"):
                if name == "minLength" and "maxLength" in part:
                    continue
                low, high = part.get("minLength", 0), part.get("maxLength", "")
                patterns.append(f"^(?s:.{{{low},{high}}})$")
            elif name not in ("type", "allOf", "$ref"):
                return None
    if len(patterns) > 1:
        return None
    return patterns[0] if patterns else ""
