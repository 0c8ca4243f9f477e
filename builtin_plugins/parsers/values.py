"""Grammars of arguments that are not JSON: texts, and literals that fit a JSON schema."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from hardpoint.plugins.structured import Format, GrammarFormat, RegexFormat
from hardpoint.toolkit.parsing.json_text import named_types, resolved, restrictions

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_DEEPEST = 5  # levels of lists and objects in a value with an open schema
_LARGEST = 10**15  # number with open bounds in the schema: in Python, 1e999 is infinite


class Parameter(NamedTuple):
    """A parameter of a tool, or a member of an object."""

    name: str
    schema: Any
    is_required: bool


def text_without(
    pattern: str, markers: Iterable[str], end: str = "", *, patterns: Iterable[str] = ()
) -> Format:
    """Return the grammar of text that matches a pattern, whole, and has none of the markers.

    Args:
        pattern: a regular expression.
        markers: texts.
        end: a text behind it, which may be one of the markers.
        patterns: regular expressions without a match in it.
    """
    escaped = [re.escape(marker).replace("\\\n", r"\n") for marker in markers]
    excluded = [expression.replace("/", r"\/") for expression in (*escaped, *patterns)]
    if not excluded:
        return RegexFormat(pattern=f"(?:{pattern}){re.escape(end)}")
    source = f"/{pattern}/ & ~/(?s:.*)(?:{'|'.join(excluded)})(?s:.*)/"
    return GrammarFormat(grammar=f"start: TEXT\nTEXT: ({source}) {in_lark(end)}\n")


def in_lark(text: str) -> str:
    """Return a text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


def length_pattern(schema: Mapping[str, Any]) -> str:
    """Return the regular expression of any text of the length that a schema of strings allows."""
    lowest, highest = schema.get("minLength", 0), schema.get("maxLength", "")
    return rf"(?s:.{{{lowest},{highest}}})" if lowest or highest != "" else "(?s:.*)"


def unsupported(tool: str, keyword: str) -> ValueError:
    """Return the error for a schema with a keyword that a format's calls do not support."""
    return ValueError(
        f"the tool {tool!r}: the format of the model's calls does not support the keyword "
        f"{keyword!r} of its schema"
    )


def check_keywords(tool: str, schema: Mapping[str, Any], supported: Iterable[str]) -> None:
    """Check that a schema has no other keywords, except annotations.

    Raises:
        ValueError: naming one.
    """
    for keyword in sorted(restrictions(schema) - {*supported}):
        raise unsupported(tool, keyword)


def parameters_of(tool: str, schema: Mapping[str, Any]) -> list[Parameter]:
    """Return the members that a schema of an object names, in its order.

    Raises:
        ValueError: the schema is of something else, or has keywords that are not supported.
    """
    check_keywords(tool, schema, {"type", *_KEYWORDS["object"]})
    if "object" not in (named_types(schema) or {"object"}):
        raise ValueError(
            f"the tool {tool!r}: expected a schema of an object, got type {schema['type']!r}"
        )
    properties = dict(schema.get("properties") or {})
    required = schema.get("required") or ()
    others = schema.get("additionalProperties", True)
    for name in required:
        properties.setdefault(name, others)
    return [Parameter(name, inner, name in required) for name, inner in properties.items()]


class LiteralGrammar(ABC):
    """Writes a grammar in Lark of the literals that fit a tool's schema.

    Objects have the members that their schema names, in its order. A schema that names none, and
    no type, is of any value with a few levels at most.

    Attributes:
        comma: text between two members or items, in Lark.
        literals: the literals `true`, `false` and `null`, in Lark.
    """

    comma: ClassVar[str] = '","'
    literals: ClassVar[Mapping[str, str]]

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        self.tool = tool
        self._root = schema
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, int], str] = {}  # of rules, by schema and level

    @abstractmethod
    def string(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of strings that fit a schema."""

    @abstractmethod
    def constant(self, text: str) -> str:
        """Return the expression of one string."""

    @abstractmethod
    def key(self, name: str) -> str:
        """Return the expression of a member's name and its separator."""

    @abstractmethod
    def any_key(self) -> str:
        """Return the expression of any member's name and its separator."""

    def rule(self, body: str) -> str:
        """Add a rule, and return its name."""
        name = f"v{len(self._rules)}"
        self._rules[name] = body
        return name

    def grammar(self, start: str) -> GrammarFormat:
        """Return the grammar with all rules."""
        rules = [f"{name}: {body}" for name, body in {"start": start, **self._rules}.items()]
        return GrammarFormat(grammar="\n".join([*rules, ""]))

    def members(self, parameters: Sequence[Parameter], keys: Sequence[str]) -> str:
        """Return the expression of members with commas between, some of them optional."""
        first, more = '""', '""'
        for parameter, key in reversed(list(zip(parameters, keys, strict=True))):
            member = self.rule(f"{key} {self.value(parameter.schema)}")
            if parameter.is_required:
                first = self.rule(f"{member} {more}")
                more = self.rule(f"{self.comma} {member} {more}")
            else:
                first = self.rule(f"{member} {more} | {first}")
                more = self.rule(f"({self.comma} {member})? {more}")
        return first

    def value(self, schema: Any, level: int = 0) -> str:
        """Return the name of the rule of values that fit a schema.

        Raises:
            ValueError: it has a keyword that is not supported.
        """
        schema = resolved(schema, self._root)
        known = json.dumps(schema, sort_keys=True), level
        if known not in self._names:
            self._names[known] = name = self.rule("")  # a schema may refer to itself
            self._rules[name] = self._body(schema, level)
        return self._names[known]

    def _body(self, schema: Any, level: int) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise unsupported(self.tool, "false" if schema is False else repr(schema))
        for keyword in ("enum", "const"):
            if keyword in schema:
                return self._one_of(keyword, schema)
        if "anyOf" in schema:
            check_keywords(self.tool, schema, ["anyOf"])
            return " | ".join(self.value(choice, level) for choice in schema["anyOf"])
        types = named_types(schema) or {
            kind for kind in ("object", "array") if schema.keys() & _KEYWORDS[kind]
        }
        kinds = ["number" if kind == "integer" else kind for kind in types or _TYPES]
        keywords = {word for kind in kinds for word in _KEYWORDS.get(kind, ())}
        check_keywords(self.tool, schema, {"type", *keywords} if types else ())
        if not types and level >= _DEEPEST:
            types = set(_TYPES) - {"array", "object"}
        ordered = [kind for kind in _TYPES if kind in (types or _TYPES)]
        if unknown := types - {*_TYPES}:
            raise unsupported(self.tool, f"type: {sorted(unknown)[0]}")
        return " | ".join(self._of_type(kind, schema, level + (not types)) for kind in ordered)

    def _of_type(self, kind: str, schema: Mapping[str, Any], level: int) -> str:
        match kind:
            case "string":
                return self.string(schema)
            case "integer" | "number":
                limits = {key: schema[key] for key in _KEYWORDS["number"] if key in schema}
                if not {"minimum", "exclusiveMinimum"} & limits.keys():
                    limits["minimum"] = -_LARGEST
                if not {"maximum", "exclusiveMaximum"} & limits.keys():
                    limits["maximum"] = _LARGEST
                return self.json({"type": kind, **limits})
            case "boolean":
                return f"{self.literals['true']} | {self.literals['false']}"
            case "null":
                return self.literals["null"]
            case "array":
                return self._array(schema, level)
            case _:
                return self._object(schema, level)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of JSON that fits a schema of a number or string."""
        return self.rule(f"%json {json.dumps(schema)}")

    def _array(self, schema: Mapping[str, Any], level: int) -> str:
        if schema.get("uniqueItems"):
            raise unsupported(self.tool, "uniqueItems")
        lowest, highest = schema.get("minItems", 0), schema.get("maxItems")
        if highest == 0:
            return '"[" "]"'
        item = self.value(schema.get("items", True), level)
        upper = "" if highest is None else highest - 1
        items = f"{item} ({self.comma} {item}){{{max(lowest - 1, 0)},{upper}}}"
        return f'"[" {items} "]"' if lowest else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any], level: int) -> str:
        parameters = parameters_of(self.tool, {**schema, "type": "object"})
        others = schema.get("additionalProperties", True)
        if parameters or others is False:
            keys = [self.key(parameter.name) for parameter in parameters]
            return f'"{{" {self.members(parameters, keys)} "}}"'
        member = self.rule(f"{self.any_key()} {self.value(others, level)}")
        return f'"{{" ({member} ({self.comma} {member})*)? "}}"'

    def _one_of(self, keyword: str, schema: Mapping[str, Any]) -> str:
        check_keywords(self.tool, schema, [keyword, "type"])
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        return " | ".join(map(self._constant, values))

    def _constant(self, value: Any) -> str:
        match value:
            case str():
                return self.constant(value)
            case bool() | None:
                return self.literals[json.dumps(value)]
            case int() | float():
                return in_lark(json.dumps(value))
            case list():
                items = f" {self.comma} ".join(map(self._constant, value))
                return f'"[" {items} "]"'
            case _:
                members = (f"{self.key(key)} {self._constant(value[key])}" for key in value)
                return f'"{{" {f" {self.comma} ".join(members)} "}}"'
