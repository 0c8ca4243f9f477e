"""Finished answers against their whole schema: flaws, and hostile schemas."""

from __future__ import annotations

import json
import re
import time

import pytest

from hardpoint.builtin_plugins.grammars import validation
from hardpoint.builtin_plugins.grammars.validation import validation_error

HOSTILE = [
    ({"not": {"$ref": "http://127.0.0.1:9/schema"}}, "1", "Unresolvable"),
    ({"type": "object", "not": {"$dynamicRef": "file:///etc/passwd"}}, "{}", "Unresolvable"),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "dependencies": {"a": {"$ref": "file:///etc/passwd"}},
        },
        '{"a": 1}',
        "Unresolvable",
    ),
    ({"not": {"pattern": "(?:" * 90 + "a" + "){1,9}" * 90}}, '"a"', "too many repetitions"),
    ({"not": {"pattern": "a" * 2000}}, '"a"', "too many repetitions"),
    ({"allOf": [{"pattern": "^(?:(a|a)+)+$"}] * 9}, f'"{"a" * 40}b"', "timed out"),
    ({"additionalProperties": False, "patternProperties": {"(": {}}}, '{"a": 1}', "error"),
    ({"$ref": "#"}, "1", "RecursionError"),
    (
        {"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}}
        | {"$ref": "#/$defs/a0"},
        "1",
        "takes more than 0.25 s|Unresolvable|Pointer",
    ),
]


@pytest.mark.parametrize(("schema", "answer", "reason"), HOSTILE)
def test_a_hostile_schema_cannot_be_validated(schema, answer, reason):
    start = time.perf_counter()
    flaw = validation_error(schema, answer)
    assert flaw.startswith("the answer cannot be validated: ")
    assert re.search(reason, flaw)
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize(
    ("schema", "answer", "error"),
    [
        ({"enum": [1.0, "a", {"b": [1]}]}, '{"b": [1.0]}', None),
        ({"enum": [True]}, "1", "$: '1 is none of the values of the enum'"),
        ({"uniqueItems": True}, "[1, true, 2.5, 2]", None),
        ({"uniqueItems": True}, '[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]', "has equal items"),
        ({"properties": {"a": {"minimum": 3}}}, '{"a": 2}', "$.a: '2 is less than the minimum of"),
        ({"patternProperties": {"^x": {"type": "integer"}}}, '{"x1": "s"}', "$.x1: "),
        (
            {"additionalProperties": False, "patternProperties": {"^x": True}},
            '{"x1": 2, "y": 3}',
            "the property 'y' is not allowed",
        ),
        ({"additionalProperties": {"type": "null"}}, '{"y": 3}', "$.y: "),
        ({"unevaluatedProperties": False, "properties": {"a": True}}, '{"b": 1}', "Unevaluated"),
        ({}, "{", "the answer is not JSON: "),
        ({}, "", "the answer is not JSON: "),
    ],
)
def test_answers_are_validated(schema, answer, error):
    flaw = validation_error(schema, answer)
    assert flaw is None if error is None else error in flaw


def test_many_items_are_validated_in_time(monkeypatch):
    # Comparing each with all others takes longer even on a fast machine.
    monkeypatch.setattr(validation, "_VALIDATION_SECONDS", 2.5)
    objects = json.dumps([{"a": number} for number in range(4000)])
    assert validation_error({"uniqueItems": True}, objects) is None
    numbers = list(range(20_000))
    assert validation_error({"items": {"enum": numbers}}, json.dumps(numbers[-1000:])) is None
