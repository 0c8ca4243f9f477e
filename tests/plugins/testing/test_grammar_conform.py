"""Every built-in grammar backend, and the one in examples/, passes the public conformance kit."""

from __future__ import annotations

import sys

from support.kit_suites import assert_tests_builtins
from support.processes import ROOT
from support.searching import kit_examples

from hardpoint.builtin_plugins.grammars.llguidance import LLGuidance
from hardpoint.testing import GrammarSample, GrammarSuite

sys.path.insert(0, str(ROOT / "examples" / "acme_choice_grammar" / "src"))

from choice_grammar import ChoiceGrammar

pytest_plugins = ["hardpoint.testing"]


class TestChoiceGrammar(GrammarSuite):
    grammar = ChoiceGrammar
    examples = kit_examples()


class TestChoiceGrammarWithSamples(GrammarSuite):
    grammar = ChoiceGrammar
    samples = [
        GrammarSample(
            {"choice": ["a", "aa", "aaa", "a\x00", "日本", "日"]},
            valid=["日本"],
            invalid=["aaaa", "本"],
        ),
        GrammarSample({"choice": ["<|x|>", "x"]}, language=["<|x|>", "x"]),
    ]
    special_tokens = ["<|x|>"]
    examples = kit_examples()


SAMPLES = [
    GrammarSample(
        {"json": {"enum": ["red", "reddish", True, None, 12, "é"]}},
        language=['"red"', '"reddish"', "true", "null", "12", '"é"'],
    ),
    GrammarSample(
        {"json": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
        valid=["[]", '["a"]', '["a", "b"]', '["a","b"]'],
        invalid=["", "{}", '["c"]', '["a" "b"]', '["a", "a", "a"]'],
    ),
    GrammarSample(
        {"json_object": True},
        valid=["{}", '{"a": [1, {"b": null}], "é": "🙂"}'],
        invalid=["", "[]", "1", "{", '{"a": 1,}', "{} x"],
    ),
    GrammarSample(
        {"regex": "(ab|a)c?|é[01]{2}|日本?"},
        language=["a", "ab", "abc", "ac", "é00", "é01", "é10", "é11", "日", "日本"],
    ),
    GrammarSample(
        {"grammar": 'start: "yes" | "no" MORE\nMORE: "!" | "?"\n'},
        language=["yes", "no!", "no?"],
    ),
    GrammarSample({"grammar": 'root ::= "yes" | "no" [!?]\n'}, language=["yes", "no!", "no?"]),
    GrammarSample(
        {"grammar": 'start: "(" start ")" | "x"\n'},
        valid=["x", "((x))"],
        invalid=["", "(x", "x)", "()"],
    ),
    GrammarSample(
        {"choice": ["yes", "yes, sure", "né", "🙂", "<|x|>"]},
        language=["yes", "yes, sure", "né", "🙂", "<|x|>"],
    ),
    GrammarSample(
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f="],
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<f=a>",
                            "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
                            "end": "</f>",
                        }
                    ],
                },
            }
        },
        valid=["", "so ", "so <f=a>1</f> and <f=a>2</f>.", "a < b"],
        invalid=["<f=b>", "<f=a>3</f>", "<f=a>1</f"],
    ),
    GrammarSample(
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<|x|>",
                    "content": {"type": "regex", "pattern": "[01]"},
                    "end": {"type": "token", "token": "<|end|>"},
                },
            }
        },
        language=["<|x|>0<|end|>", "<|x|>1<|end|>"],
    ),
]


class TestLLGuidance(GrammarSuite):
    grammar = LLGuidance
    special_tokens = ["<|x|>"]
    samples = SAMPLES
    examples = kit_examples()


def test_every_built_in_is_tested():
    assert_tests_builtins("grammars", "grammar", globals())
