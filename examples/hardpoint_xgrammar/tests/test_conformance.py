"""The backend allows exactly the texts of its grammars: the conformance kit checks it."""

import pytest
from hardpoint_xgrammar import XGrammar

from hardpoint.testing import GrammarSample, GrammarSuite

pytest_plugins = ["hardpoint.testing"]
pytest.importorskip("xgrammar")


class TestXGrammar(GrammarSuite):
    grammar = XGrammar
    special_tokens = ["<|x|>"]
    samples = [
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
        GrammarSample({"grammar": 'root ::= "yes" | "no" [!?]\n'}, language=["yes", "no!", "no?"]),
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
