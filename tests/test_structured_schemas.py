"""Random JSON schemas on the demo model: every answer that ended is valid, and others run as ever.

Other requests are the prompts of tests/test_equality_real.py, whose tokens are known.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from decimal import Decimal

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from support.demo_reference import GREEDY, NEW_TOKENS

from hardpoint import LLM, RequestOutputKind, SamplingParams

NAMES = [
    "name",
    "é",
    "日本",
    "a b",
    'say "hi"',
    "back\\slash",
    "line\nbreak",
    "🙂",
    "x'y",
    "$ref",
    "_",
]
TEXTS = ["red", "", "blue\n", 'a "b"', "naïve", "東京", "\\d", "🙂🙂", "0", "true"]
FORMATS = ["date", "uuid", "ipv4", "ipv6", "email"]
PATTERNS = [
    "^[a-z]{2,5}$",
    "^(foo|bar)+$",
    r"^\d{3}-\d{2}$",
    "^[A-Z][a-zé]*$",
    "ab",
    "^x",
    "[0-9]$",
]
CASES = {
    "uniqueItems": {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
    "contains": {"type": "array", "contains": {"type": "integer"}, "maxItems": 2},
    "not": {"type": ["integer", "null"], "not": {"enum": [0, None]}},
    "propertyNames": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "integer"},
    },
    "if": {"type": ["string", "null"], "if": {"type": "string"}, "then": {"maxLength": 3}},
    "dependentRequired": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
        "dependentRequired": {"a": ["b"]},
        "additionalProperties": False,
    },
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
}
"""Keywords that llguidance does not have, in what its own can express."""
UNSUPPORTED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "not": {"not": {"type": "string", "pattern": "a.*b"}},
    "propertyNames": {"propertyNames": {"anyOf": [{"maxLength": 3}, {"pattern": "a"}]}},
    "if": {"if": {"items": {"type": "string"}}, "then": {"maxItems": 3}},
    "minProperties": {"type": "object", "minProperties": 2},
    "unevaluatedProperties": {
        "anyOf": [{"properties": {"a": True}}, {"properties": {"b": True}}],
        "unevaluatedProperties": False,
    },
}
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]


class Schemas:
    """Makes random schemas.

    Attributes:
        definitions: definitions of the schema that is being made, by name.
        unsupported: keywords in it that no grammar can express.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.definitions = {}
        self.unsupported = set()

    def schema(self):
        """Return a whole schema, an object most times."""
        kind = self.rng.choice([self.object] * 5 + [self.array, self.any])
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **kind(3)}
        if self.definitions:
            schema["$defs"] = self.definitions
        return schema

    def any(self, depth):
        leaves = [
            self.string,
            self.string,
            self.number,
            self.number,
            self.enum,
            self.constant,
            lambda depth: {"type": self.rng.choice(["boolean", "null"])},
            lambda depth: {"type": self.rng.sample(TYPES[:5], 2)},
        ]
        nodes = [self.object, self.object, self.array, self.any_of, self.one_of, self.tuple]
        nodes += [self.definition, self.recursive]
        if depth > 0 and self.rng.random() < 0.1:
            return self.rng.choice(list(CASES.values()))
        if depth > 0 and self.rng.random() < 0.015:
            keyword = self.rng.choice(list(UNSUPPORTED))
            self.unsupported.add(keyword)
            return UNSUPPORTED[keyword]
        return self.rng.choice(leaves if depth <= 0 else leaves + nodes)(depth)

    def some(self, **keywords):
        return {key: value for key, value in keywords.items() if self.rng.random() < 0.5}

    def string(self, depth):
        kind = self.rng.randrange(4)
        if kind == 0:
            return {"type": "string", "format": self.rng.choice(FORMATS)}
        if kind == 1:
            return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
        least = self.rng.randrange(4)
        longest = least + self.rng.randrange(9)
        return {"type": "string", **self.some(minLength=least), "maxLength": longest}

    def number(self, depth):
        least = self.rng.choice([-100, -1, 0, 1, 7, 999])
        most = least + self.rng.choice([2, 10, 5000])
        if self.rng.random() < 0.5:
            low = self.rng.choice(["minimum", "exclusiveMinimum"])
            high = self.rng.choice(["maximum", "exclusiveMaximum"])
            bounds = self.some(**{low: least, high: most})
            return {"type": "integer", **bounds, **self.some(multipleOf=self.rng.choice([1, 2]))}
        return {"type": "number", **self.some(minimum=least - 0.25, exclusiveMaximum=most + 0.5)}

    def enum(self, depth):
        values = [*TEXTS, 0, -5, 12, 1.5, True, False, None, ["a"], {"é": 1}]
        return {"enum": self.rng.sample(values, self.rng.randint(1, 5))}

    def constant(self, depth):
        return {"const": self.rng.choice([*TEXTS, 3, None, True, [], {"a": ["b"]}])}

    def array(self, depth):
        least = self.rng.randrange(3)
        bounds = self.some(minItems=least) | {"maxItems": least + self.rng.randrange(3)}
        return {"type": "array", "items": self.any(depth - 1), **bounds}

    def tuple(self, depth):
        items = [self.any(depth - 2) for _ in range(self.rng.randint(1, 3))]
        rest = self.rng.choice([{"items": False}, {"minItems": len(items), "maxItems": len(items)}])
        return {"type": "array", "prefixItems": items, **rest}

    def object(self, depth):
        names = self.rng.sample(NAMES, self.rng.randint(0, 4))
        required = [name for name in names if self.rng.random() < 0.6]
        schema = {
            "type": "object",
            "properties": {name: self.any(depth - 1) for name in names},
            **self.some(required=required),
        }
        more = self.rng.choice([None, False, False, False, {"type": "integer"}])
        return schema if more is None else {**schema, "additionalProperties": more}

    def any_of(self, depth):
        return {"anyOf": [self.any(depth - 1) for _ in range(self.rng.randint(1, 3))]}

    def one_of(self, depth):
        makers = {"s": self.string, "n": self.number, "a": self.array, "o": self.object}
        chosen = self.rng.sample(list(makers), 2)
        return {"oneOf": [makers[name](depth - 1) for name in chosen]}

    def definition(self, depth):
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def recursive(self, depth):
        name = f"tree {len(self.definitions)}"
        again = {"$ref": f"#/$defs/{name.replace(' ', '%20')}"}
        self.definitions[name] = {}
        self.definitions[name] = {
            "type": "object",
            "properties": {
                "value": self.any(0),
                "left": {"anyOf": [{"type": "null"}, again]},
                "more": {"type": "array", "items": again, "maxItems": 2},
            },
            "required": ["left"],
            "additionalProperties": False,
        }
        return again


def made(seed):
    """Return a schema and the keywords in it that no grammar can express."""
    schemas = Schemas(seed)
    schema = schemas.schema()
    Draft202012Validator.check_schema(schema)
    return schema, schemas.unsupported


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2", dtype="float32", max_model_len=512, config={"device": "cpu"}) as llm:
        yield llm


def params(seed, schema, max_tokens=120):
    return SamplingParams(
        structured={"json": schema},
        max_tokens=max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **({"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}),
    )


def check(llm, jobs, neighbours, max_tokens=120):
    """Run jobs of (id, schema, unsupported keywords, seed) and others; return how they ended."""
    free = SamplingParams(
        temperature=0.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompts = [f"Sample {name} of the data, as JSON:\n" for name, *_ in jobs]
    outputs = llm.generate(
        [*prompts, *(each.prompt for each in neighbours)],
        [
            *(params(seed, schema, max_tokens) for _, schema, _, seed in jobs),
            *[free] * len(neighbours),
        ],
    )
    for each, output in zip(neighbours, outputs[len(jobs) :], strict=True):
        assert output.outputs[0].token_ids == each.tokens[:NEW_TOKENS], each.prompt
    ended = Counter()
    for (name, schema, unsupported, _), output in zip(jobs, outputs, strict=False):
        (completion,) = output.outputs
        ended[completion.finish_reason] += 1
        if completion.finish_reason == "error":
            ended.update(refusal(name, schema, unsupported, completion.error))
            continue
        assert not unsupported, (name, unsupported, schema)
        if completion.finish_reason == "stop":
            validate(name, schema, completion.text)
        else:
            assert completion.finish_reason == "length", (name, completion)
    return ended


def refusal(name, schema, unsupported, error):
    """Check that a schema was refused by its keywords; return them."""
    found = re.fullmatch(r"structured\.json: llguidance: ([^:]+): expected .*", error, re.DOTALL)
    keys = [found[1].rpartition(".")[2]] if found else re.findall("allOf|anyOf|minItems", error)
    assert keys, (name, error, schema)
    assert all(f'"{key}"' in json.dumps(schema) for key in keys), (name, error, schema)
    if found and keys != ["oneOf"]:
        assert unsupported & set(keys), (name, error, schema)
    return [f"refused: {', '.join(sorted(keys))}"]


def validate(name, schema, text):
    value = json.loads(text, parse_float=Decimal)
    validator = Draft202012Validator(schema, format_checker=FormatChecker(FORMATS))
    errors = [error.message for error in validator.iter_errors(value)]
    assert not errors, (name, errors, schema, text)


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, pytest.param(8, marks=pytest.mark.nightly)])
def test_answers_that_ended_are_valid_and_others_run_as_ever(llm, first):
    seeds = range(first, first + 8)
    jobs = [(f"{seed}", *made(seed), seed if seed % 2 else None) for seed in seeds]
    ended = check(llm, jobs, GREEDY[::5], max_tokens=70)
    print(dict(ended))
    assert ended["stop"] >= 2


@pytest.mark.nightly
def test_three_hundred_schemas(llm):
    total = Counter()
    for first in range(0, 300, 25):
        made_ = [(f"{seed}", *made(seed)) for seed in range(first, first + 25)]
        jobs = [(*job, None) for job in made_] + [(*job, int(job[0])) for job in made_]
        total += check(llm, jobs, GREEDY)
    print(dict(total))
    assert total["stop"] >= 300


def test_a_schema_is_refused_by_path_and_keyword(llm):
    for keyword, schema in UNSUPPORTED.items():
        (output,) = llm.generate("Data: ", params(None, {"anyOf": [{"type": "null"}, schema]}))
        error = output.outputs[0].error
        assert error.startswith(f"structured.json: llguidance: anyOf[1].{keyword}: expected ")
        assert "; with `lenient`, the grammar leaves it out" in error
