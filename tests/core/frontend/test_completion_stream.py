"""A completion's stream: however its tokens and outputs are cut, what it gives is the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core.output_desk import CUMULATIVE, DELTA, LENGTH
from support.searching import examples

from hardpoint import SamplingParams
from hardpoint.builtin_plugins.parsers.think_tags import ThinkTags
from hardpoint.builtin_plugins.step_parts.parsing.formats import ParsedReader
from hardpoint.core.frontend.outputs.completion_stream import CompletionStream
from hardpoint.plugins import OutputParserContext, ParserRequest
from hardpoint.toolkit.parsing.completion_parser import CompletionParser

PIECES = ["<think>", "</think>", "<thi", "Hm, é.", "STOP", "ST", "漢", "x"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
CUTS = st.lists(st.integers(1, 7), max_size=12)
STOPS = st.lists(st.sampled_from(["STOP", "TO", "é.", "</think>"]), max_size=2, unique=True)


@pytest.fixture(scope="module")
def think_tags(byte_tokenizer):
    options = ThinkTags.Options()
    context = OutputParserContext(name="think_tags", options=options, tokenizer=byte_tokenizer)
    return ThinkTags(context)


def outputs(tokenizer, parser, ids, cuts, **params):
    """Return the outputs of tokens that come in batches of given sizes, then all others."""
    params = SamplingParams(**params)
    state = parser.open(ParserRequest(roles=("reasoning",)))
    reader = ParsedReader(CompletionParser(state, {}, delta=params.output_kind is DELTA))
    stream = CompletionStream(
        tokenizer, tokenizer.decode_stream([]), params, interval=3, readers=[reader]
    )
    found = []
    for size in [*cuts, len(ids)]:
        batch, ids = ids[:size], ids[size:]
        stream.push(batch, None if ids else LENGTH)
        if not ids or stream.stop_string is not None:
            return [*found, stream.pop(finished=True)]
        if not stream.waits():
            found.append(stream.pop(finished=False))
    raise AssertionError("the last batch has all tokens")


@examples(300)
@given(text=TEXTS, cuts=CUTS, stop=STOPS, keep=st.booleans())
def test_deltas_of_any_size_join_to_the_whole(byte_tokenizer, think_tags, text, cuts, stop, keep):
    ids = byte_tokenizer.encode(text)
    params = {"stop": stop, "include_stop_str_in_output": keep}

    def run(cuts, kind):
        return outputs(byte_tokenizer, think_tags, ids, cuts, output_kind=kind, **params)

    (whole,) = run([], CUMULATIVE)
    deltas = run(cuts, DELTA)
    for part in ("text", "reasoning", "content"):
        assert "".join(getattr(o, part) or "" for o in deltas) == (getattr(whole, part) or "")
    assert [token for o in deltas for token in o.token_ids] == whole.token_ids
    assert run(cuts, CUMULATIVE)[-1] == whole


@examples(200)
@given(text=TEXTS, cuts=CUTS, stop=STOPS)
def test_nothing_that_was_shown_is_taken_back(byte_tokenizer, think_tags, text, cuts, stop):
    ids = byte_tokenizer.encode(text)
    found = outputs(byte_tokenizer, think_tags, ids, cuts, output_kind=CUMULATIVE, stop=stop)
    for before, after in itertools.pairwise(found):
        for part in ("text", "reasoning", "content"):
            assert (getattr(after, part) or "").startswith(getattr(before, part) or "")
