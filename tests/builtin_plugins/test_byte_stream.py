"""Byte-level tokens as a stream: the same text as decoding whole, at a cost that does not grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.tokenizer_harness import open_tokenizer
from support.searching import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hardpoint import SamplingParams
from hardpoint.builtin_plugins.tokenizer import stream as token_stream
from hardpoint.core.frontend.outputs.completion_stream import CompletionStream

CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
CROSSING = ["\u00a9\u00c3", "\u0142\u00e2", "a\u00f0", "\u0141\u00a9z", "\u013a\u013b", "he"]
NUM_TOKENS = len(CHARACTERS) + len(CROSSING) + 2


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """All bytes, pieces that cross characters' borders, an added text and a special token."""
    vocab = {word: index for index, word in enumerate([*CHARACTERS, *CROSSING])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["\ufffd and \u6f22"])
    tokenizer.add_special_tokens(["<|mark|>"])
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    folder = tmp_path_factory.mktemp("bytewise")
    tokenizer.save(str(folder / "tokenizer.json"))
    return open_tokenizer(folder)


class _Words:
    """A tokenizer with a text for each token id."""

    def __init__(self, *words):
        self.words = words

    def decode_stream(self, *_, **__):
        return self

    def step(self, token):
        return self.words[token]


@pytest.mark.parametrize(
    ("stop", "matched", "text"),
    [
        (["xyz", "y"], "y", "ax"),  # begins later, but is complete earlier
        (["y", "xyz"], "y", "ax"),
        (["zb", "xyz", "yz"], "xyz", "a"),
        (["yz", "xyz"], "yz", "ax"),  # end together: the order given
        (["xyz", "yz"], "xyz", "a"),
    ],
)
def test_of_several_stop_strings_in_one_token_the_first_complete_one_counts(stop, matched, text):
    words = _Words("a", "xyzb")
    output = CompletionStream(words, words.decode_stream([]), SamplingParams(stop=stop))
    assert output.push([0, 1, 0], None) == [0, 1]
    assert output.stop_string == matched
    assert output.pop(finished=True).text == text


TEXT = st.text(max_size=4)
ANY_IDS = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=6)


@examples(8)
@given(parts=st.lists(TEXT | ANY_IDS, max_size=8), cut=st.integers(0, 40), special=st.booleans())
def test_whatever_comes_joins_to_the_whole(bytewise, parts, cut, special):
    """Cut anywhere, also in the middle of a character."""
    ids = [
        token
        for part in parts
        for token in (bytewise.encode(part) if isinstance(part, str) else part)
    ][:cut]
    params = SamplingParams(skip_special_tokens=not special)
    stream = bytewise.decode_stream([], skip_special_tokens=not special)
    output = CompletionStream(bytewise, stream, params)
    for token in ids:
        output.push([token], None)
    output.finish()
    whole = bytewise.decode(ids, skip_special_tokens=not special)
    assert output.pop(finished=True).text == whole


@examples(8)
@given(text=st.text(min_size=1, max_size=6), cut=st.integers(0, 20))
def test_a_prompt_may_end_anywhere(bytewise, text, cut):
    ids = [*bytewise.encode("before "), *bytewise.encode(text)]
    cut = min(7 + cut, len(ids))
    stream = bytewise.decode_stream(ids[:cut])
    shown = bytes("before " + text, "utf-8")[:cut].decode("utf-8", "ignore")
    assert shown + "".join(stream.step(i) or "" for i in ids[cut:]) == "before " + text


@pytest.mark.parametrize("word", ["\u0122", "\u00c3", "\u00a9\u00c3", "\u0142\u00e2"])
def test_bytes_that_never_become_characters_cost_no_more_the_longer_it_goes_on(
    bytewise, word, monkeypatch
):
    token = bytewise._tokenizer.token_to_id(word)
    looked_at = []
    decode = token_stream.TokenTexts.decode

    def counted(texts, ids):
        looked_at.append(len(ids))
        return decode(texts, ids)

    def unwanted(**_):
        raise AssertionError("the library's stream keeps every token that is no text yet")

    monkeypatch.setattr(token_stream.TokenTexts, "decode", counted)
    monkeypatch.setattr(token_stream, "FastDecodeStream", unwanted)
    stream = bytewise.decode_stream([])
    pieces = [stream.step(token) or "" for _ in range(2000)]
    assert sum(looked_at) <= 1
    assert bytewise.decode([token] * 2000).startswith("".join(pieces))


def test_an_invalid_byte_is_reported_at_once(bytewise):
    stream = bytewise.decode_stream([])
    lone = bytewise.encode("\u00e9")[1]  # a byte that continues a character
    assert [stream.step(lone) for _ in range(3)] == ["\ufffd"] * 3
    lead = bytewise.encode("\u00e9")[0]
    a = bytewise.encode("a")[0]
    assert [stream.step(i) for i in (lead, lead, a)] == [None, None, "\ufffd\ufffda"]
