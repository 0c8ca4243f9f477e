"""The backend allows exactly the texts of its grammars: the conformance kit checks it."""

from choice_grammar import ChoiceGrammar

from hardpoint.testing import GrammarSuite

pytest_plugins = ["hardpoint.testing"]


class TestChoiceGrammar(GrammarSuite):
    grammar = ChoiceGrammar
