"""Schemas that are small, and would take any time or memory to rewrite, are refused soon."""

from __future__ import annotations

import itertools
import time

import pytest
from support.schema_grammars import compiled


def tree(keyword, leaf, *, levels="abcde"):
    """Return definitions, each with twenty references to the next one."""
    pairs = itertools.pairwise([*levels, "leaf"])
    return {
        "leaf": leaf,
        **{name: {keyword: [{"$ref": f"#/$defs/{other}"}] * 20} for name, other in pairs},
    }


HOSTILE = {
    "not of allOf": {"not": {"$ref": "#/$defs/a"}, "$defs": tree("allOf", {})},
    "not of anyOf": {"not": {"$ref": "#/$defs/a"}, "$defs": tree("anyOf", {"type": "string"})},
    "not of a long constant": {"type": "string", "not": {"const": "a" * 4900}},
    "many schemas in one place": {
        "allOf": [{} for _ in range(30_000)],
        "oneOf": [{"minLength": size} for size in range(60)],
    },
    "enums with a common value": {
        "oneOf": [{"enum": ["k", *(f"{b}_{i}" for i in range(1000))]} for b in range(80)]
    },
    "constants in each case": {
        "type": "object",
        "required": [f"p{i}" for i in range(8)],
        "allOf": [
            {"if": {"properties": {f"p{i}": {"const": "b" * 250}}}, "then": {}} for i in range(8)
        ],
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_they_are_refused_soon(name):
    begin = time.thread_time()
    with pytest.raises(ValueError, match="takes too long|too long|more than|at most 256"):
        compiled(HOSTILE[name])
    assert time.thread_time() - begin < 60  # without a limit, minutes or hours


def test_references_from_one_to_the_next_do_not_overflow_the_stack():
    inner = "arrays"
    for how in ("alone", inner):
        parts = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)]
        if how is inner:
            parts = [{"type": "array", "items": {"items": part}} for part in parts]
        named = {f"d{i}": part for i, part in enumerate(parts)}
        with pytest.raises(ValueError, match="nest too deeply, through the references"):
            compiled({"$ref": "#/$defs/d0", "$defs": {**named, "d3000": {}}})
