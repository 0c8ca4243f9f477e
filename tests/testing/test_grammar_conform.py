"""Every built-in grammar backend, and the one in examples/, passes the public conformance kit."""

from __future__ import annotations

import sys

from support.processes import ROOT
from support.searching import kit_examples

from hardpoint.testing import GrammarSample, GrammarSuite

sys.path.insert(0, str(ROOT / "examples"))

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
