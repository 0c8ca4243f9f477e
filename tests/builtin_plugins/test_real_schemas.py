"""110 realistic schemas: each is enforced exactly, or rejected by path and keyword.

OpenAPI, pydantic, tools, workflows, clusters, documents and extraction; support/real_schemas.jsonl
has a schema with values that fit and others that do not in each line.
"""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
import pytest
from jsonschema.validators import validator_for
from support import schema_grammars
from support.schema_grammars import BACKEND, compiled, takes

LINES = Path(schema_grammars.__file__).with_name("real_schemas.jsonl").read_text().splitlines()
SCHEMAS = {case["name"]: case for case in map(json.loads, LINES)}
REFUSED = [name for name, case in SCHEMAS.items() if "refused" in case]


def test_fewer_are_refused_than_by_the_library_alone():
    tokenizer = BACKEND._tokenizer()
    alone = [
        llguidance.LLMatcher(
            tokenizer, f"start: %json {json.dumps(case['schema'])}", log_level=0
        ).is_error()
        for case in SCHEMAS.values()
    ]
    assert (len(SCHEMAS), sum(alone), len(REFUSED)) == (110, 54, 10)


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED))
def test_values_that_fit_are_taken_and_no_others(name):
    case = SCHEMAS[name]
    state = compiled(case["schema"])
    for value in case["valid"]:
        assert takes(state, json.dumps(value)), value
        assert takes(state, json.dumps(value, indent=4)), value
        assert takes(state, json.dumps(value, separators=(",", ":"), ensure_ascii=False)), value
    for value in case["invalid"]:
        assert not takes(state, json.dumps(value)), value


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_path_and_keyword_but_for_lenient_requests(name):
    schema, place = SCHEMAS[name]["schema"], SCHEMAS[name]["refused"]
    with pytest.raises(ValueError, match=f"^{place}: expected .*; with `lenient`, the grammar lea"):
        compiled(schema)
    compiled(schema, lenient=True)


# These need libraries that are not installed here: they are checked by test_schema_formats.
BY_FORMAT = ("date-time", "uri", "json-pointer", "duration", '"time"')


def test_the_values_are_right():
    for case in SCHEMAS.values():
        schema = case["schema"]
        if any(format in json.dumps(schema) for format in BY_FORMAT):
            continue
        kind = validator_for(schema)
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        assert all(map(validator.is_valid, case["valid"])), case["name"]
        assert not any(map(validator.is_valid, case["invalid"])), case["name"]
