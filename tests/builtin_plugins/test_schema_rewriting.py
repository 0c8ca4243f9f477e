"""Keywords that llguidance lacks are rewritten with others, exactly, or rejected."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter

import pytest
from jsonschema import Draft202012Validator
from support.schema_grammars import compiled, open_backend, takes, takes_value

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.builtin_plugins.grammars.schemas.patterns import none_of, not_starting, start_of
from hardpoint.plugins.structured import StructuredOutputs

NAMES = ["a", "b", "c"]
TEXTS = ["x", "yy", "xy", ""]
LENIENT = (
    "; with `lenient`, the grammar leaves it out, and the finished answer is validated against the "
    "whole schema"
)


class Schemas:
    """Makes small random schemas of all keywords."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def any(self, depth):
        kinds = [self.leaf, self.object, self.object, self.array, self.logic, self.logic]
        return self.rng.choice(kinds if depth > 0 else [self.leaf])(depth)

    def leaf(self, depth):
        rng = self.rng
        kind = rng.choice(["string", "integer", "number", "boolean", "null", "array", "object"])
        return rng.choice(
            [
                {"type": kind},
                {"const": rng.choice([*TEXTS, 1, 2, True, None, 1.5])},
                {"enum": rng.sample([*TEXTS, 1, 2, 3, True, False, None, 1.5], rng.randint(1, 4))},
                {"type": "string", "enum": rng.sample(TEXTS, 2)},
                {rng.choice(["minimum", "exclusiveMinimum"]): rng.choice([0, 1, 2, 1.5])},
                {rng.choice(["maximum", "exclusiveMaximum"]): rng.choice([0, 1, 2, 1.5])},
                {"type": "string", rng.choice(["minLength", "maxLength"]): rng.choice([0, 1, 2.0])},
                {"pattern": rng.choice(["^x", "^x$", "y", "^(x|y)", "^[xy]+$"])},
                {"type": ["string", "null"]},
                rng.choice([True, {}]),
            ]
        )

    def some(self, chance, **keywords):
        return {name: make() for name, make in keywords.items() if self.rng.random() < chance}

    def object(self, depth):
        rng = self.rng
        names = rng.sample(NAMES, rng.randint(1, 3))
        rare = {
            "dependentRequired": lambda: {rng.choice(NAMES): rng.sample(NAMES, rng.randint(0, 2))},
            "dependentSchemas": lambda: {rng.choice(NAMES): self.condition(depth - 1)},
            "minProperties": lambda: rng.randint(0, 3),
            "maxProperties": lambda: rng.randint(0, 3),
            "propertyNames": lambda: rng.choice(
                [{"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 1}, {"const": "a"}, False]
            ),
            "unevaluatedProperties": lambda: rng.choice([False, {"type": "integer"}]),
            "patternProperties": lambda: {"^a": self.leaf(0)},
        }
        return {
            **self.some(0.7, type=lambda: "object"),
            **self.some(0.8, properties=lambda: {name: self.any(depth - 1) for name in names}),
            **self.some(0.6, required=lambda: rng.sample(NAMES, rng.randint(1, 2))),
            **self.some(0.4, additionalProperties=lambda: rng.choice([False, {"type": "integer"}])),
            **self.some(0.1, **rare),
        }

    def array(self, depth):
        rng = self.rng
        return {
            **self.some(0.8, type=lambda: "array"),
            **self.some(0.7, items=lambda: self.any(depth - 1)),
            **self.some(0.2, prefixItems=lambda: [self.leaf(0)]),
            **self.some(0.5, maxItems=lambda: rng.randint(0, 3)),
            **self.some(0.3, minItems=lambda: rng.randint(0, 2), uniqueItems=lambda: True),
            **self.some(0.3, contains=lambda: self.leaf(0)),
        }

    def condition(self, depth):
        name = self.rng.choice(NAMES)
        about = {"properties": {name: self.leaf(0)}}
        required = {"required": [self.rng.choice(NAMES)]}
        return self.rng.choice([about, about | required, required, self.any(depth - 1)])

    def logic(self, depth):
        rng = self.rng
        schema = rng.choice([self.object, self.object, self.leaf])(depth)
        schema = {} if schema is True else dict(schema)
        kind = rng.choice(["oneOf", "oneOf", "not", "if", "allOf", "anyOf", "ifs"])
        if kind in ("oneOf", "anyOf", "allOf"):
            schema[kind] = [self.any(depth - 1) for _ in range(rng.randint(1, 3))]
        elif kind == "not":
            schema[kind] = self.condition(depth - 1)
        elif kind == "ifs":
            schema["allOf"] = [
                {"if": self.condition(depth - 1), "then": self.condition(depth - 1)}
                for _ in range(rng.randint(1, 3))
            ]
        else:
            for name in ("if", "then", "else"):
                schema[name] = self.condition(depth - 1)
        items = list(schema.items())
        rng.shuffle(items)
        return dict(items)

    def value(self, depth):
        rng = self.rng
        kind = rng.randrange(10 if depth > 0 else 5)
        if kind < 5:
            return rng.choice([*TEXTS, "y", 0, 1, 2, 3, -1, 1.5, True, False, None])
        if kind < 7:
            return [self.value(depth - 1) for _ in range(rng.randint(0, 2))]
        names = rng.sample([*NAMES, "ab"], rng.randint(0, 3))
        return {name: self.value(depth - 1) for name in names}


def compare(seeds):
    """Compare grammars with a validator; return how often each came."""
    counted = Counter()
    for seed in seeds:
        schemas = Schemas(seed)
        schema = schemas.any(schemas.rng.choice([1, 1, 2, 2, 3]))
        validator = Draft202012Validator(schema)
        try:
            state = compiled(schema)
        except ValueError as error:
            counted["refused"] += 1
            message = str(error)
            if "no JSON fits" in message or "Unsatisfiable" in message:
                values = [schemas.value(2) for _ in range(40)]
                assert not any(map(validator.is_valid, values)), (seed, schema)
            else:
                assert re.search(": expected |min/maxProperties|not disjoint", message), message
            continue
        counted["compiled"] += 1
        values = {json.dumps(value): value for value in (schemas.value(2) for _ in range(15))}
        for value in values.values():
            is_valid = validator.is_valid(value)
            counted["valid"] += is_valid
            assert takes_value(state, value) == is_valid, (seed, schema, value)
    return counted


def test_random_schemas_are_enforced_exactly_or_refused():
    counted = compare(range(60))
    assert counted["compiled"] > 30
    assert counted["valid"] > 80


@pytest.mark.nightly
def test_thousands_of_random_schemas():
    counted = compare(range(1000, 4000))
    assert counted["compiled"] > 1500


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"items": {"type": "array", "uniqueItems": True}}}},
            "properties.a.items.uniqueItems: expected items of an enum, with few values or a small "
            "maxItems, and no prefixItems",
        ),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"contains": {"type": "null"}}}},
            "$defs.x.contains: expected maxItems of at most 32, and no minContains or maxContains, "
            "or a maxContains of 0",
        ),
        (
            {"oneOf": [{"minimum": 1}, {"multipleOf": 3}]},
            "oneOf: expected branches that a constant, a type or a required property "
            "distinguishes, or anyOf, not the keyword multipleOf",
        ),
        (
            {"allOf": [{"not": {"pattern": "a+b"}}]},
            "allOf[0].not: expected a schema of constants, types, limits and required properties, "
            "not the pattern 'a+b'",
        ),
        (
            {"properties": {"a": {"pattern": "(?<!a)b"}}},
            "properties.a.pattern: expected expressions that compile, without look-around and back "
            "references",
        ),
        ({"maxLength": 2.5}, "maxLength: expected a whole number of 0 or more, got 2.5"),
        (
            {"properties": {"a": {"$dynamicRef": "#x"}}},
            "properties.a.$dynamicRef: expected $ref",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_path_and_left_out_where_lenient(schema, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole of it is compared
        compiled(schema)
    assert str(error.value) == message + LENIENT
    compiled(schema, lenient=True)


def test_no_error_names_an_option_that_users_do_not_have():
    with pytest.raises(ValueError, match="oneOf: expected branches") as error:
        compiled({"oneOf": [{"type": "integer"}, {"type": "number"}]})
    assert "coerce_one_of" not in str(error.value)
    assert takes(compiled({"oneOf": [{"type": "integer"}, {}]}, lenient=True), "5")


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"type": "string", "pattern": "(?=a)b", "maxLength": 2}, '"ab"'),
        ({"patternProperties": {"(?=a)b": {}}, "additionalProperties": False}, '{"x": 1}'),
        ({"patternProperties": {"a": {}, "b": {}}, "additionalProperties": False}, '{"x": 1}'),
        ({"type": "object", "properties": {"a": {}}, "maxProperties": 3}, '{"a": 1, "b": 2}'),
    ],
)
def test_lenient_requests_leave_out_what_does_not_compile(schema, right):
    assert takes(compiled(schema, lenient=True), right)


def test_whole_numbers_may_be_written_as_floats():
    state = compiled({"type": "array", "items": {"maxLength": 2.0}, "minItems": 1.0})
    assert takes(state, '["ab"]')
    assert not takes(state, '["abc"]')
    assert not takes(state, "[]")


def test_a_number_next_to_an_excluded_one():
    state = compiled({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5})
    assert not takes(state, "0")
    assert takes(state, "0.5")


@pytest.mark.parametrize("limit", [10, 10**6, 10**8, 3 * 10**11])
def test_a_number_next_to_an_excluded_large_one(limit):
    state = compiled({"type": "number", "exclusiveMinimum": limit, "maximum": limit + 0.5})
    assert not takes(state, f"{limit}")
    assert takes(state, f"{limit}.25")


def test_more_items_contained_than_may_be():
    """`minContains` is 1 where it is left out."""
    with pytest.raises(ValueError, match="no JSON fits|Unsatisfiable"):
        compiled({"type": "array", "contains": {"const": 1}, "maxContains": 0})
    array = {"items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxContains": 0}
    assert [text for text in ("[2]", "[]", "5") if takes(compiled(array), text)] == ["5"]
    array["minContains"] = 0
    assert [text for text in ("[2]", "[]", "[1]") if takes(compiled(array), text)] == ["[2]", "[]"]


def test_references_within_a_part_that_has_an_address():
    """References start there, even if their targets tell the branches apart."""
    part = {
        "$id": "http://x/part",
        "$defs": {"t": {"type": ["integer", "string"]}},
        "$ref": "#/$defs/t",
        "oneOf": [{"type": "string"}, {"minLength": 1}],
    }
    state = compiled({"$id": "http://x/", "$defs": {"t": {"type": "integer"}}, "items": part})
    assert [text for text in ('["abc"]', '[""]', "[5]") if takes(state, text)] == ['[""]', "[5]"]


@pytest.mark.parametrize(
    ("draft", "schema", "right", "wrong"),
    [
        (4, {"minimum": 1, "exclusiveMinimum": True}, "2", "1"),
        (7, {"items": [{"type": "integer"}]}, "[1]", '["x"]'),
        (7, {"dependencies": {"a": ["b"]}, "type": "object"}, "{}", '{"a": 1}'),
    ],
)
def test_answers_are_validated_in_the_draft_that_a_schema_names(draft, schema, right, wrong):
    schema = {"$schema": f"http://json-schema.org/draft-0{draft}/schema#", **schema}
    state = compiled(schema)
    constraint = StructuredOutputs.checked({"json": schema, "lenient": True})
    for text, is_right in ((right, True), (wrong, False)):
        assert takes(state, text) == is_right
        assert (LLGuidance.validate(constraint, text) is None) == is_right


def test_a_name_that_comes_twice_does_not_count_twice():
    with pytest.raises(ValueError, match="minProperties: expected .*may be written twice"):
        compiled({"type": "object", "minProperties": 2})
    state = compiled({"type": "object", "required": ["a"], "minProperties": 2})
    assert takes(state, '{"a": 1, "b": 2}')
    assert not takes(state, '{"a": 1}')


def test_a_schema_that_refers_to_itself_beside_others():
    branch = {"properties": {"kind": {"const": "not"}, "of": {"$ref": "#"}}, "required": ["of"]}
    leaf = {"properties": {"kind": {"const": "leaf"}}}
    schema = {
        "type": "object",
        "required": ["kind"],
        "oneOf": [{"$ref": "#/$defs/not"}, {"$ref": "#/$defs/leaf"}],
        "$defs": {"not": branch, "leaf": leaf},
    }
    state = compiled(schema)
    assert takes(state, '{"kind": "not", "of": {"kind": "leaf"}}')
    assert not takes(state, '{"kind": "not", "of": {"kind": "not"}}')


@pytest.mark.parametrize("keyword", ["oneOf", "anyOf"])
def test_branches_of_a_part_stay(keyword):
    part = {keyword: [{"type": "string", "maxLength": 2}], "properties": {"a": {"enum": ["x"]}}}
    state = compiled({"allOf": [part, {"required": ["c"]}]})
    assert takes_value(state, "ab")
    for value in ("abc", [], [{"c": 1}], 3, {"c": 1}):
        assert not takes_value(state, value)


def test_properties_keep_their_order():
    """Unknown ones come after the properties of the schema, in any order."""
    schema = {"properties": {"b": {}, "a": {}}, "if": {"required": ["a"]}, "then": {}}
    state = compiled({**schema, "type": "object", "allOf": [{"properties": {"c": {}}}]})
    assert takes(state, '{"b": 1, "a": 2, "c": 3, "z": 4, "y": 5}')
    assert not takes(state, '{"a": 2, "b": 1}')


@pytest.mark.parametrize(
    "limit",
    [
        {"type": "integer", "minimum": 2},
        {"type": "integer", "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 2},
        {"type": "integer", "exclusiveMaximum": 2},
        {"type": "string", "minLength": 2},
        {"type": "string", "maxLength": 2},
        {"type": "array", "minItems": 2},
        {"type": "array", "maxItems": 2},
        {"type": "object", "minProperties": 2},
        {"type": "object", "required": ["a", "c"]},
        {"type": "object", "dependentRequired": {"a": ["b", "c"]}},
    ],
    ids=lambda limit: [*limit][1],
)
def test_what_is_not_within_a_limit(limit):
    kind = limit["type"]
    names = {name: {} for name in NAMES}
    listed = {"properties": names, "additionalProperties": False} if kind == "object" else {}
    schema = {"type": kind, **listed, "not": limit}
    values = {
        "integer": [1, 2, 3],
        "string": ["", "x", "yy", "xyx"],
        "array": [[], [1], [1, 2], [1, 2, 3]],
        "object": [dict.fromkeys(NAMES[:count], 1) for count in range(4)] + [{"c": 1}],
    }[kind]
    state, validator = compiled(schema), Draft202012Validator(schema)
    assert [takes_value(state, value) for value in values] == [
        validator.is_valid(value) for value in values
    ]


@pytest.mark.parametrize(
    ("pattern", "start"),
    [("^ab", "ab"), ("ab", ""), ("^ab*", "a"), ("^ab|c", ""), (r"^a\.b[|]", "a.b"), ("^(a)", "")],
)
def test_the_start_of_an_expression(pattern, start):
    assert start_of(pattern) == start


def test_expressions_for_all_other_texts():
    for texts in (["a"], ["", "ab"], ["ab", "abc", "b"], ["]", "^", "-"], ['"', 'a"', "\\"]):
        state = compiled({"type": "string", "pattern": none_of(texts)})
        letters = ("]", "^", "-", "]]", "\n", "é", '"', "\\", 'a"', "a\\", "\\\\", '""')
        for text in ("", "a", "ab", "abc", "b", "ba", *letters):
            assert takes(state, json.dumps(text, ensure_ascii=False)) == (text not in texts), (
                texts,
                text,
            )
    state = compiled({"type": "string", "pattern": not_starting("x-")})
    assert [t for t in ("x", "x-", "x-a", "y", "", "xx-") if takes(state, json.dumps(t))] == [
        "x",
        "y",
        "",
        "xx-",
    ]


@pytest.mark.parametrize(
    ("letters", "taken"),
    [
        ('[^"]', ["\\", "a", "\n", "\x01"]),
        (r"[^\\]", ['"', "a", "\n", "\x01"]),
        (r'[^"\\]', ["a", "\n", "\x01"]),
        ('[^"\n]', ["\\", "a", "\x01"]),
        (r"[^\x{22}]", ["\\", "a", "\n", "\x01"]),
        (r"[^!-/\]]", ["\\", "a", "\n", "\x01"]),
        (r"[^]\"]", ["\\", "a", "\n", "\x01"]),
        (r"[^\S\x00-\x1f]", []),
        (r"\P{P}", ["a", "\n", "\x01"]),
        (r"[\x00-\x1f]", ["\n", "\x01"]),
        ("[\x00-\x1fa]", ["a", "\n", "\x01"]),
        ("[[:cntrl:]]", ["\n", "\x01"]),
        ("[^a]", ['"', "\\", "\n", "\x00", "\x01"]),
        (r"\W", ['"', "\\", "\n", "\x00", "\x01"]),
        (r"\D", ['"', "\\", "a", "\n", "\x00", "\x01"]),
        (".", ['"', "\\", "a", "\x00", "\x01"]),
    ],
)
def test_classes_of_all_control_characters_have_no_other_escapes(letters, taken):
    """llguidance's own have, so that strings would come which the expression does not match."""
    texts = ['"', "\\", "a", "\n", "\x00", "\x01"]
    state = compiled({"type": "string", "pattern": f"^{letters}$"})
    assert [text for text in texts if takes(state, json.dumps(text))] == taken
    names = {"patternProperties": {f"^{letters}$": {}}, "additionalProperties": False}
    of_object = compiled({"type": "object", **names})
    assert [text for text in texts if takes(of_object, json.dumps({text: 1}))] == taken
    state = compiled({"type": "object", "propertyNames": {"pattern": f"^{letters}$"}})
    assert [text for text in texts if takes(state, json.dumps({text: 1}))] == taken


def test_a_name_is_not_spelled_with_an_escaped_quote():
    """The other names next to a listed one have a schema of their own."""
    name = 'a"'
    schema = {"properties": {name: {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    state = compiled({"type": "object", **schema})
    assert takes(state, json.dumps({name: None}))
    assert not takes(state, json.dumps({name: 1}))
    assert takes(state, json.dumps({'"': 1}))


class TestWhiteSpace:
    OPEN = compiled({"type": "object"})

    @pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
    def test_indented_json_is_taken(self, indent):
        value = 1
        for _ in range(9):  # ten levels of 4 blanks
            value = {"key": [1, 2], "next": value}
        assert takes(self.OPEN, json.dumps(value, indent=indent))
        assert takes(self.OPEN, json.dumps(value, indent=indent).replace("\n", "\r\n"))

    @pytest.mark.parametrize(
        "space", [" " * 21, "\n\n\n", "\n" + " " * 41, "\n \n \n", "  \n", "\t" * 30]
    )
    def test_long_runs_are_not(self, space):
        assert not takes(self.OPEN, f"{{{space}}}")

    @pytest.mark.parametrize("space", [" " * 20, "\n\n", " \n" + " " * 40, "\r\n\t"])
    def test_short_ones_are(self, space):
        assert takes(self.OPEN, f"{{{space}}}")

    def test_options(self):
        no_lines = compiled({}, backend=open_backend(max_newlines=0))
        assert takes(no_lines, "[1, 2]")
        assert not takes(no_lines, "[1,\n2]")
        compact = compiled({}, backend=open_backend(max_whitespace=0))
        assert takes(compact, "[1,2]")
        assert not takes(compact, "[1, 2]")
        wide = compiled({}, backend=open_backend(max_whitespace=40, max_newlines=5))
        assert takes(wide, "[" + "\n" * 5 + " " * 80 + "]")


INTEGER = {"type": "integer"}
LISTED = {"type": "object", "properties": {"a": INTEGER}}


@pytest.mark.parametrize(
    "schema",
    [
        LISTED,
        {**LISTED, "additionalProperties": {"type": "string"}},
        {**LISTED, "anyOf": [{"properties": {"b": INTEGER}}, {"required": ["c"]}]},
        {"allOf": [LISTED, {"properties": {"b": INTEGER}}]},
        {"$ref": "#/$defs/it", "$defs": {"it": LISTED}},
        {"type": "object", "required": ["a"], "properties": {"a": INTEGER, "b": True}},
    ],
)
def test_another_name_is_no_listed_one_with_escapes(schema):
    state = compiled(schema)
    assert takes(state, '{"a": 1, "x": "y"}')
    assert takes(state, r'{"a": 1, "x\"\\\n\u0001": "y"}')
    for name in (r"\u0061", r"x\u0061", r"\u00E9"):
        assert not takes(state, f'{{"{name}": "y"}}')
        assert not takes(state, f'{{"a": 1, "{name}": "y"}}')


@pytest.mark.parametrize("rest", [{"type": "integer"}, True])
@pytest.mark.parametrize("branch", [{"type": "object"}, {"maximum": 5}, {"required": ["a"]}])
def test_branches_that_list_no_names_take_others(rest, branch):
    listed = {"properties": {"a": {"type": "string"}}, "additionalProperties": rest}
    patterns = {"patternProperties": {"^a$": {"type": "string"}, "^c": rest}}
    for schema in (listed, {**patterns, "additionalProperties": False}):
        state = compiled({**schema, "anyOf": [branch, {"const": None}]})
        assert takes_value(state, {"a": "x", "c": 1})
        assert takes_value(state, {"c": 1}) == ("required" not in branch)
        assert takes_value(state, {"a": 1}) is False
        assert takes_value(state, {"a": "x", "c": "x"}) == (rest is True)


def test_many_long_names_compile_fast():
    listed = {f"property_{index}_of_many": INTEGER for index in range(1000)}
    start = time.perf_counter()
    state = compiled(
        {"type": "object", "properties": listed, "additionalProperties": {"type": "string"}}
    )
    assert takes(state, '{"property_3_of_many": 1, "other": "x"}')
    assert time.perf_counter() - start < 60
