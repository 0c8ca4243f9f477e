"""Descriptions of grammars that would cost much more than their size are refused, at once."""

from __future__ import annotations

import random
import time

import pytest

from hardpoint.builtin_plugins.grammars.lark import read_grammar
from hardpoint.builtin_plugins.grammars.limits import check_limits
from hardpoint.plugins import RequestError
from hardpoint.plugins.structured import StructuredOutputs

RANDOM = random.Random(3)
MULTIPLES = [{"multipleOf": RANDOM.getrandbits(62) | 1} for _ in range(20_000)]
CHAIN = "\n".join(f'a{index} ::= "x" a{index + 1}?' for index in range(5000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": 'start: "' + '\\"' * 200_000}, "at most 32768 characters, got 400001"),
        ({"grammar": "start: /" + "\\/" * 200_000}, "at most 32768 characters, got 400001"),
        ({"json": {"allOf": MULTIPLES}}, "as the common multiple of several, got"),
        ({"regex": "a?" * 20_000}, "at most 5000 repetitions|at most 32768 characters"),
    ],
)
def test_what_would_cost_much_is_refused_at_once(fields, message):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        check_limits(StructuredOutputs(**fields))
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (CHAIN, "GBNF of at most 65536 characters and 1000 rules, got .* and 5000; a grammar in"),
        ("root ::= " + "(" * 30_000, "neither Lark nor GBNF"),
        ("no grammar", "neither Lark nor GBNF"),
    ],
)
def test_a_large_grammar_of_gbnf_is_not_converted(source, message):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        read_grammar(source)
    assert time.perf_counter() - start < 5


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
