"""Descriptions of grammars that would cost much more than their size are refused, at once."""

from __future__ import annotations

import random
import time

import pytest
from llguidance.gbnf_to_lark import is_lark_syntax

from hardpoint.builtin_plugins.grammars.lark import LarkWriter, read_grammar
from hardpoint.builtin_plugins.grammars.limits import check_limits, is_lark
from hardpoint.plugins import RequestError
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.structured import StructuredOutputs

RANDOM = random.Random(3)
PATTERNS = [{"patternProperties": {f"^p{i}_": {}}} for i in range(200)]
MANY = {pattern: {} for part in PATTERNS for pattern in part["patternProperties"]}
MULTIPLES = [{"multipleOf": RANDOM.getrandbits(62) | 1} for _ in range(20_000)]
CHAIN = "\n".join(f'a{index} ::= "x" a{index + 1}?' for index in range(5000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": 'start: "' + '\\"' * 200_000}, "at most 32768 characters, got 400001"),
        ({"grammar": "start: /" + "\\/" * 200_000}, "at most 32768 characters, got 400001"),
        ({"json": {"allOf": MULTIPLES}}, "as the common multiple of several, got"),
        ({"json": {"patternProperties": MANY}}, "patternProperties: expected at most 128 .* 200"),
        ({"json": {"allOf": PATTERNS}}, "patternProperties: expected at most 128 for one .* 200"),
        (
            {"json": {"prefixItems": [{"patternProperties": dict(list(MANY.items())[:100])}] * 4}},
            "as the root of the sum of their squares for several, got 200",
        ),
        ({"regex": "a?" * 20_000}, "at most 5000 repetitions|at most 32768 characters"),
    ],
)
def test_what_would_cost_much_is_refused_at_once(fields, message):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        check_limits(StructuredOutputs(**fields))
    assert time.perf_counter() - start < 30


LONG_RULE = "".join(f"a{i}::=a{i + 1}\n" for i in range(900)) + "b ::= " + "|" * 50_000 + "a0"
LINES = "a" + "\n" * 500_000


@pytest.mark.parametrize("source", [CHAIN, LONG_RULE, LINES])
@pytest.mark.parametrize("count", [1, 2])
def test_a_large_grammar_of_gbnf_is_not_converted(source, count):
    part = source[: len(source) // count]  # those of a structural tag count together
    parts = [{"type": "grammar", "grammar": part}] * count
    format = {"type": "sequence", "elements": parts}
    fields = {"structural_tag": {"type": "structural_tag", "format": format}}
    structured = StructuredOutputs.checked(fields if count > 1 else {"grammar": source})
    message = "GBNF of at most 65536 characters and 1000 rules, and 8000000 as .*; a grammar in"
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        check_limits(structured)
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize(
    "source",
    [
        "root ::= " + "(" * 30_000,
        "root ::= a\n" + "\n" * 60_000,
        "no grammar",
    ],
)
def test_what_is_wrong_within_the_limits_is_refused_soon(source):
    start = time.perf_counter()
    check_limits(StructuredOutputs(grammar=source))
    with pytest.raises(ValueError, match="neither Lark nor GBNF"):
        read_grammar(source)
    assert time.perf_counter() - start < 30


@pytest.mark.nightly
def test_what_is_slowest_within_the_limits_is_converted_in_about_a_second():
    links = "".join(f"a{i}::=a{i + 1}\n" for i in range(400))
    source = f'root::=a0\n{links}a400::="x"\nb::={"|" * 14_000}a0'
    start = time.perf_counter()
    check_limits(StructuredOutputs(grammar=source))
    assert "start: A0" in read_grammar(source)
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize("before", ["", "\n" * 9, "a: b\n \t\r", "a: b\n\x0b\x0c"])
@pytest.mark.parametrize("line", ["start: x", "start  \n: x", "%llguidance {}", "start x", "%ll"])
@pytest.mark.parametrize("between", ["", " ", "x ", "\r", "\n\n"])
def test_lark_is_what_llguidance_finds_to_be_lark(before, between, line):
    source = before + between + line
    assert is_lark(source) == is_lark_syntax(source)


def test_grammars_of_a_usual_size_pass():
    check_limits(StructuredOutputs(grammar='start: "a" /b\\/c/ "d" x\nx: "e\\"f"'))
    check_limits(StructuredOutputs(json={"allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}))
    assert "start" in read_grammar('root ::= "a" b\nb ::= [0-9]+')


def test_tags_and_triggers_have_a_limit():
    text = {"type": "any_text"}
    tags = [{"type": "tag", "begin": f"<{i}>", "content": text} for i in range(1001)]
    format = {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
    tag = {"type": "structural_tag", "format": format}
    with pytest.raises(RequestError, match="tags: expected a list of length <= 1000"):
        StructuredOutputs.checked({"structural_tag": tag})
    format["tags"] = tags[:1000]
    StructuredOutputs.checked({"structural_tag": tag})


def triggered(triggers, begins, count=1):
    text = {"type": "any_text"}
    tags = [{"type": "tag", "begin": begin, "content": text, "end": ">"} for begin in begins]
    format = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    many = {"type": "sequence", "elements": [format] * count}
    return {"structural_tag": {"type": "structural_tag", "format": many if count > 1 else format}}


def test_many_tags_and_triggers_are_checked_at_once():
    numbers = [f"<{index:04}>" for index in range(1000)]
    start = time.perf_counter()
    with pytest.raises(RequestError, match=r"begin a tag, got '<0999>'"):
        StructuredOutputs.checked(triggered(numbers, numbers[:-1]))
    StructuredOutputs.checked(triggered(numbers, numbers, count=4))
    assert time.perf_counter() - start < 30


def test_triggers_and_tags_are_compared_as_texts():
    for seed in range(300):
        source = random.Random(seed)
        triggers, begins = (
            ["".join(source.choices("ab\U0001f600", k=source.randint(1, 4))) for _ in range(3)]
            for _ in range(2)
        )
        right = all(
            any(begin.startswith(trigger) for trigger in triggers) for begin in begins
        ) and all(any(begin.startswith(trigger) for begin in begins) for trigger in triggers)
        try:
            StructuredOutputs.checked(triggered(triggers, begins))
        except RequestError:
            assert not right
        else:
            assert right


def test_a_tag_begins_with_the_longest_of_its_triggers():
    fields = triggered(["<", "<a", "<abc"], ["<abd", "<abc", "<x"])
    tag = StructuredOutputs.checked(fields).structural_tag
    lark = LarkWriter(Vocabulary(tuple(bytes([byte]) for byte in range(256))), dict).grammar(tag)
    for start, rest in (("<", "x"), ("<a", "bd"), ("<abc", "")):
        assert f'(?s:.*)/ \\"{start}\\"' in lark
        assert f'\\"{rest}\\"' in lark or not rest


def test_an_error_quotes_the_start_of_long_texts():
    with pytest.raises(RequestError, match="one of the triggers") as error:
        StructuredOutputs.checked(triggered(["<" * 90_000] * 9, ["x" * 90_000]))
    assert len(str(error.value)) < 2000


def test_parts_have_a_limit():
    parts = [{"type": "any_text"}] * 10_000
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    with pytest.raises(RequestError, match="structural_tag: expected at most 10000 parts"):
        StructuredOutputs.checked({"structural_tag": tag})
    parts.pop()
    StructuredOutputs.checked({"structural_tag": tag})


def test_patterns_of_many_objects_are_no_limit():
    check_limits(StructuredOutputs(json={"prefixItems": PATTERNS}))
    check_limits(StructuredOutputs(json={"patternProperties": dict(list(MANY.items())[:128])}))
    joined = [{"patternProperties": {"^x-": {}}, "$ref": "#/$defs/a"}] * 500
    check_limits(StructuredOutputs(json={"prefixItems": joined, "$defs": {"a": {}}}))
