"""No built-in output parser drops text without a warning, whatever is cut, inserted or left out."""

from __future__ import annotations

import random
import re

import pytest
import test_output_parsers_conform as conform
import test_output_parsers_of_families as families
from support.searching import searches_long

from hardpoint.plugins import ParserRequest
from hardpoint.plugins.output_parser import MalformedText, ToolCallArguments, ToolCallBegin
from hardpoint.testing import OutputParserSuite

SUITES = {
    f"{name} {index}": (suite, sample)
    for module in (conform, families)
    for name, suite in vars(module).items()
    if isinstance(suite, type)
    and issubclass(suite, OutputParserSuite)
    and suite.__dict__.get("samples")
    for index, sample in enumerate(suite.samples)
}
WORD = "zqx"


def parsed(suite, sample, text):
    """Return the text of all events of an output, and whether it has a warning."""
    request = ParserRequest(reasoning_open=sample.reasoning_open, tools=sample.tools)
    events = suite._events(request, suite._pieces(text))
    parts = []
    for event in events:
        match event:
            case ToolCallBegin(name, call_id):
                parts.append(f" {name} {call_id or ''} ")
            case ToolCallArguments(part):
                parts.append(part)
            case _:
                parts.append(getattr(event, "text", ""))
    warnings = " ".join(e.reason for e in events if isinstance(e, MalformedText))
    return "".join(parts), warnings


def places(text, chosen, count):
    """Return places in a text: all of them in a long search."""
    every = range(len(text) + 1)
    return every if searches_long() or len(text) < count else sorted(chosen.sample(every, count))


@pytest.mark.parametrize("case", SUITES)
def test_inserted_text_is_never_dropped(case):
    kind, sample = SUITES[case]
    suite, chosen = kind(), random.Random(case)
    for at in places(sample.text, chosen, 25):
        text = f"{sample.text[:at]}{WORD}{sample.text[at:]}"
        text_out, warnings = parsed(suite, sample, text)
        is_id = re.search(rf'id": "[^"]*{WORD}', text)  # calls get others
        assert WORD in text_out or warnings or is_id, text


STRUCTURE = {
    *("None", "True", "False", "null", "true", "name", "arguments", "parameters", "function"),
    *("functions", "string", "to"),
}


def words_of(sample, markers):
    """Return the words of a sample's reasoning, content and calls that no marker has."""
    parts = [sample.reasoning, sample.content]
    for name, arguments in sample.calls:
        parts += [name, repr(arguments)]
    words = set(re.findall(r"[A-Za-z_]{2,}", " ".join(parts))) - STRUCTURE
    return {word for word in words if not any(word in marker for marker in markers)}


@pytest.mark.parametrize("case", SUITES)
def test_without_a_marker_or_with_another_one_no_word_is_dropped(case):
    kind, sample = SUITES[case]
    suite, chosen = kind(), random.Random(case)
    states = suite._subject.states().values()
    markers = sorted({marker for state in states for marker in state.moves})
    texts = [sample.text[:at] for at in places(sample.text, chosen, 12)]
    for marker in markers:
        for match in re.finditer(re.escape(marker), sample.text):
            texts.append(sample.text[: match.start()] + sample.text[match.end() :])
        for at in places(sample.text, chosen, 3):
            texts.append(sample.text[:at] + marker + sample.text[at:])
    words = words_of(sample, markers)
    for text in texts:
        match, warnings = parsed(suite, sample, text)
        written = re.findall("[A-Za-z_]+", text)
        missing = [word for word in words if match.count(word) < written.count(word)]
        assert not missing or warnings, (text, match)
