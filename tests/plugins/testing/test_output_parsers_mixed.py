"""Built-in output parsers give text once, however markers, signs and words are mixed."""

from __future__ import annotations

import random
import re

import pytest
from support.builtins.model_calls import make
from support.searching import searches_long
from test_output_parsers_account import SUITES, WORD

from hardpoint.builtin_plugins.parsers.harmony import Harmony
from hardpoint.builtin_plugins.parsers.python_calls import Llama4Pythonic
from hardpoint.plugins import ParserRequest
from hardpoint.toolkit.parsing.completion_parts import CompletionParts

HARMONY = (*Harmony.required_tokens, "<|return|>", "<|constrain|>")
SIGNS = ["{", "}", "[", "]", '"', ":", ",", "\n", " ", "\\", "(", ")", "=", "<", ">", "null", "{}"]
ROLES = [{"reasoning", "tools"}, {"reasoning"}, {"tools"}, set()]


def mixtures(sample, markers, chosen, count):
    """Yield texts of markers, parts of a sample, signs and numbered words in a random order."""
    ends = sorted(markers, key=len, reverse=True)
    parts = [p for p in re.split(f"({'|'.join(map(re.escape, ends)) or '$^'})", sample.text) if p]
    for _ in range(count):
        words = [f"{WORD}{number}{WORD}" for number in range(4)]
        pieces = [chosen.choice([*words, *ends, *parts, *chosen.sample(SIGNS, 4)]) for _ in words]
        if chosen.random() < 0.5:  # the sample with a part replaced
            pieces = list(parts)
            pieces[chosen.randrange(len(parts))] = "".join(chosen.sample([*words, *SIGNS], 3))
        yield "".join(pieces)


def parts_of(subject, tokenizer, request, text):
    """Return reasoning, content and calls of an output as one text."""
    state, special = subject.open(request), tokenizer.special_tokens
    parts = CompletionParts(delta=False)
    for piece in re.split("|".join(f"({re.escape(token)})" for token in special) or "$^", text):
        if piece and special.get(piece) in subject.token_ids:
            parts.add(state.feed_token(special[piece], piece))
        elif piece:
            parts.add(state.feed(piece))
    parts.add(state.finish())
    parts.finish()
    reasoning, content, calls = parts.pop()
    called = [f" {call.name} {call.arguments} " for call in calls or ()]
    return "".join([reasoning or "", content or "", *called])


@pytest.mark.parametrize("case", SUITES)
def test_text_is_not_repeated_whatever_is_mixed(case):
    """Content, reasoning and calls have a word at most as often as the output."""
    suite, sample = SUITES[case]
    subject, tokenizer = make(suite.parser, suite.special_tokens)
    chosen = random.Random(case)
    markers = {marker for state in subject.states().values() for marker in state.moves}
    for text in mixtures(sample, markers, chosen, 200 if searches_long() else 10):
        tools, roles = chosen.choice([sample.tools, {}]), frozenset(chosen.choice(ROLES))
        request = ParserRequest(reasoning_open=sample.reasoning_open, tools=tools, roles=roles)
        output = parts_of(subject, tokenizer, request, text)
        for word in set(re.findall(rf"{WORD}.{WORD}", text)):
            assert output.count(word) <= text.count(word), (text, output)


@pytest.mark.parametrize(
    ("parser", "special", "text"),
    [
        (Harmony, HARMONY, "<|start|>zqx<|end|>more"),
        (Harmony, HARMONY, "<|channel|><|start|>zqx[]<|end|>analysis{}"),
        (Llama4Pythonic, (), "a<|python_start|>[zqx"),
    ],
)
def test_text_of_a_broken_head_is_content_once(parser, special, text):
    subject, tokenizer = make(parser, special)
    for roles in map(frozenset, ROLES):
        output = parts_of(subject, tokenizer, ParserRequest(roles=roles), text)
        assert output.count("zqx") == 1, (roles, output)


@pytest.mark.parametrize("roles", ROLES)
def test_text_in_a_header_is_shown_or_warned_of(roles):
    """Also where the output has no warnings, because no calls are to be found."""
    subject, tokenizer = make(Harmony, HARMONY)
    request = ParserRequest(roles=frozenset(roles))
    output = parts_of(subject, tokenizer, request, "<|channel|>final zqx<|message|>42")
    assert output == ("42" if "tools" in roles else "zqx42")
