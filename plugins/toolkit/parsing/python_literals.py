"""Python's literals as JSON: nothing of them is ever evaluated."""

from __future__ import annotations

import ast
import json
import re

__all__ = ["call_keywords", "literal_value"]

_LONGEST = 1 << 15  # characters: parsing them takes up to 5 us each
_DEEPEST = 50  # brackets in brackets
_BRACKET = re.compile(r"[()\[\]{}]")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = "\n\\'\"abfnrtvxuUN01234567"
_NAMES = {"true": True, "false": False, "null": None}


def call_keywords(arguments: str) -> str:
    """Return the arguments of a call, from behind its opening bracket, as JSON.

    Raises:
        SyntaxError: they are no Python.
        ValueError: they are not keywords with literal values.
        MemoryError: they are too complex.
        RecursionError: the same.
    """
    call = _expression(f"f({arguments}")
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("expected keywords")
    values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    if None in values or len(values) < len(call.keywords):
        raise ValueError("expected keywords")
    return _as_json(values)


def literal_value(text: str) -> str | None:
    """Return the JSON of a literal of Python's; None for other or very long text."""
    if len(text) > _LONGEST:
        return None
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket.group() in "([{" else -1
        if depth > _DEEPEST:
            return None
    try:
        return _as_json(_literal(_expression(text)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _expression(text: str) -> ast.expr:
    # An escape that Python does not know stands for itself, and would give a warning.
    known = _ESCAPE.sub(
        lambda match: match[0] if match[1] in _KNOWN_ESCAPES else f"\\{match[0]}", text
    )
    return ast.parse(known, mode="eval").body


def _as_json(value: object) -> str:
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    encoded.encode()  # half of a surrogate pair is not text
    return encoded


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("expected keys that are text")
            return {str(name): _literal(v) for name, v in zip(names, values, strict=True)}
    raise ValueError("expected a literal value")
