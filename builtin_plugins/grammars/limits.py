"""Limits of descriptions, for which compiling or masks cost far more than their size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from hardpoint.errors import shown
from hardpoint.plugins.structured import (
    ConstStringFormat,
    GrammarFormat,
    JsonSchemaFormat,
    RegexFormat,
    StructuredOutputs,
    walk_formats,
)

_MAX_TEXT = 32_768
"""Characters of one text or regular expression; each token of the output costs a copy of it."""

_MAX_REPETITIONS = 5_000
"""Of all expressions together; memory and time are quadratic in it."""

_MAX_MULTIPLE = 100_000
"""Of `multipleOf` without its decimal point; a lexer has as many states."""

_MAX_PATTERNS = 128
"""Of names of one object; compiling compares each with each, and is cubic in their number."""

_MAX_GBNF = 65_536
"""Characters of all grammars in GBNF together, which are converted to Lark in Python."""

_MAX_GBNF_RULES = 1_000

_MAX_GBNF_WORK = 8_000_000
"""Of characters times rules: each pass over the rules may find one that has only texts."""

_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)

# Also those without an end, and without going back: grammars may be hostile.
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)*+/?')


def check_limits(structured: StructuredOutputs) -> None:
    """Refuse descriptions that would use too much memory or time, or that backends misread.

    Raises:
        ValueError: it names the limit, or the regular expression.
    """
    texts, expressions, grammars, schemas = _parts(structured)
    _check_gbnf(grammars)
    for schema in schemas:
        _check_multiples(schema)
        _check_patterns(schema)
        for name, value in _walk(schema):
            texts.append(name)
            if isinstance(value, str):
                (expressions if name == "pattern" else texts).append(value)
            elif name == "patternProperties" and isinstance(value, Mapping):
                expressions += value
    texts += (match.group() for grammar in grammars for match in _LITERAL.finditer(grammar))
    longest = max(map(len, (*texts, *expressions)), default=0)
    if longest > _MAX_TEXT:
        raise ValueError(
            f"expected texts and regular expressions of at most {_MAX_TEXT} characters, "
            f"got {longest}"
        )
    for expression in expressions:
        if (len(expression) - len(expression.rstrip("\\"))) % 2:
            raise ValueError(
                f"expected a regular expression, got {shown(expression)}, which ends with a "
                "backslash that escapes nothing"
            )
    repetitions = sum(len(re.findall(r"[?*+{]", text)) for text in (*expressions, *grammars))
    if repetitions > _MAX_REPETITIONS:
        raise ValueError(
            f"expected at most {_MAX_REPETITIONS} repetitions (? * + {{}}), got {repetitions}"
        )


def is_lark(grammar: str) -> bool:
    """Return whether a grammar has the syntax of Lark; otherwise it has to be GBNF."""
    # As llguidance finds it, whose own pattern is quadratic in the number of empty lines.
    return _LARK.search(grammar) is not None


def _check_gbnf(grammars: Iterable[str]) -> None:
    gbnf = [grammar for grammar in grammars if not is_lark(grammar)]
    size, rules = sum(map(len, gbnf)), sum(grammar.count("::=") for grammar in gbnf)
    if size > _MAX_GBNF or rules > _MAX_GBNF_RULES or size * rules > _MAX_GBNF_WORK:
        raise ValueError(
            f"expected GBNF of at most {_MAX_GBNF} characters and {_MAX_GBNF_RULES} rules, and "
            f"{_MAX_GBNF_WORK} as their product, got {size} characters and {rules} rules; a "
            "grammar in the syntax of Lark may be larger"
        )


def _parts(
    structured: StructuredOutputs,
) -> tuple[list[str], list[str], list[str], list[dict[str, Any] | bool | None]]:
    texts = list(structured.choice or ())
    expressions, grammars = [structured.regex or ""], [structured.grammar or ""]
    schemas = [structured.json]
    tag = structured.structural_tag
    for part in () if tag is None else walk_formats(tag.format):
        match part:
            case ConstStringFormat(value=text):
                texts.append(text)
            case RegexFormat(pattern=pattern):
                expressions.append(pattern)
            case GrammarFormat(grammar=grammar):
                grammars.append(grammar)
            case JsonSchemaFormat(json_schema=schema):
                schemas.append(schema)
    return texts, expressions, grammars, schemas


def _walk(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values in a schema, at any depth; items of lists have no key."""
    pending: list[Any] = [schema] if isinstance(schema, Mapping) else []
    while pending:
        part = pending.pop()
        pairs = part.items() if isinstance(part, Mapping) else (("", item) for item in part)
        for name, value in pairs:
            if name == "description":
                continue
            yield name, value
            if isinstance(value, Mapping | list):
                pending.append(value)


def _check_multiples(schema: Any) -> None:
    divisors = {
        abs(value)
        for name, value in _walk(schema)
        if name == "multipleOf" and isinstance(value, int | float)
    }
    whole = {_whole(value) for value in divisors if value and math.isfinite(value)}
    joined = any(name in ("allOf", "$ref") for name, _ in _walk(schema))
    largest = max(whole, default=0)
    for value in whole if joined else ():
        if largest > _MAX_MULTIPLE:
            break
        largest = math.lcm(largest, value)
    if largest > _MAX_MULTIPLE:
        raise ValueError(
            f"multipleOf: expected at most {_MAX_MULTIPLE} without the decimal point, and as the "
            f"common multiple of several, got {largest} or more"
        )


def _check_patterns(schema: Any) -> None:
    pattern_lists = [
        list(value)
        for name, value in _walk(schema)
        if name == "patternProperties" and isinstance(value, Mapping)
    ]
    if any(name in ("allOf", "$ref") for name, _ in _walk(schema)):  # which may join them
        pattern_lists = [list({pattern for patterns in pattern_lists for pattern in patterns})]
    count = math.isqrt(sum(len(patterns) ** 2 for patterns in pattern_lists))
    if count > _MAX_PATTERNS:
        raise ValueError(
            f"patternProperties: expected at most {_MAX_PATTERNS} for one object, or as the root "
            f"of the sum of their squares for several, got {count}"
        )


def _whole(value: float) -> int:
    """Return a number without its decimal point."""
    digits = Decimal(repr(value)).normalize().as_tuple()
    exponent = max(int(digits.exponent), 0)
    whole: int = 10 ** min(exponent, 20)
    return whole * int("".join(map(str, digits.digits)))
