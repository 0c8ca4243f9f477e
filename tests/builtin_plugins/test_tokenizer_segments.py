"""Segments of texts: their ids are equal to the whole text's, and a conversation's are cached."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.tokenizer_harness import open_tokenizer
from support.searching import examples
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.tokenizer.gguf import build_gguf_tokenizer
from hardpoint.builtin_plugins.tokenizer.segments import SegmentCache, segment_starts

ENOUGH = 1 << 20


def trained(pre_tokenizer, normalizer=None, *, model=None, tokens=()):
    """Return a small tokenizer with added tokens."""
    tokenizer = Tokenizer(model or models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    corpus = ["the the then when he hen user assistant ab  ab aabb <a> <b>"] * 9
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    if model is None:
        tokenizer.train_from_iterator(corpus, trainer)
    for token in tokens:
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
    return tokenizer


def special(content, **fields):
    return AddedToken(content, special=True, normalized=False, **fields)


MARKS = [special("<a>"), special("<b>"), special("<b>x")]
TRICKY = [
    special("<l>", lstrip=True),
    special("<r>", rstrip=True),
    special(" s>"),
    special("<a><"),
    special("é>"),
    AddedToken("<n>", special=True, normalized=True),
    AddedToken("the", special=False, normalized=False),
]
METASPACE = pre_tokenizers.Metaspace(prepend_scheme="first")
TOKENIZERS = {
    "byte level": trained(pre_tokenizers.ByteLevel(add_prefix_space=True), tokens=MARKS),
    "first word": trained(METASPACE, tokens=MARKS + TRICKY),
    "every word": trained(pre_tokenizers.Metaspace(prepend_scheme="always"), tokens=MARKS),
    "prepended": trained(None, normalizers.Prepend("_"), tokens=MARKS + TRICKY),
    "stripped": trained(
        pre_tokenizers.Whitespace(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]),
        tokens=MARKS + TRICKY,
    ),
    "replaced": trained(
        pre_tokenizers.Split(Regex("a+"), "merged_with_next"),
        normalizers.Replace(Regex(" +"), "_"),
        tokens=MARKS,
    ),
}
PIECES = st.sampled_from(
    [*(token.content for token in MARKS + TRICKY), "<", ">", " ", "\n", "a", "é", "the", "then"]
) | st.text("ab hé<>_", max_size=6)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def whole(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@examples(8)
@given(name=st.sampled_from(sorted(TOKENIZERS)), texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_ids_are_those_of_the_whole_text(name, texts):
    tokenizer = TOKENIZERS[name]
    cache = SegmentCache(tokenizer, 2000)
    for text in [*texts, "".join(texts), *texts]:
        assert cache.encode(text) == whole(tokenizer, text)
        assert cache.num_bytes <= 2000


def test_tokens_before_which_a_text_is_cut():
    assert segment_starts(TOKENIZERS["byte level"]) == {"<unk>", "<a>", "<b>", "<b>x"}
    # "<l>" takes blanks before it, "<r>" could take that of " s>", "<a><" may end in any of them.
    assert segment_starts(TOKENIZERS["first word"]) == {"é>"}


@pytest.mark.parametrize(
    "changed",
    [
        lambda t: setattr(t, "encode_special_tokens", True),
        lambda t: t.add_tokens([AddedToken("w", single_word=True)]),
        lambda t: setattr(t, "model", models.BPE({"a": 0}, [], dropout=0.5)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.PreTokenizer.custom(object())),
    ],
)
def test_no_text_is_cut_where_pieces_may_depend_on_others(changed):
    tokenizer = trained(METASPACE, tokens=MARKS)
    assert segment_starts(tokenizer)
    changed(tokenizer)
    assert segment_starts(tokenizer) == set()


class Counting:
    """A tokenizer that counts the characters that it tokenises."""

    def __init__(self, tokenizer):
        self._tokenizer, self.count = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **fields):
        self.count += len(text)
        return self._tokenizer.encode(text, **fields)


@pytest.fixture(scope="module")
def demo(demo_gguf):
    return build_gguf_tokenizer(open_gguf(demo_gguf), demo_gguf)


def turn(number, length=400):
    words = " ".join(f"word{number * k % 97}" for k in range(length))
    return f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\nYes, {number}.<|im_end|>\n"


def test_the_next_turn_costs_its_new_messages(demo):
    tokenizer = Counting(demo)
    cache, text = SegmentCache(tokenizer, ENOUGH), ""
    for number in range(6):
        new = turn(number)
        text += new
        tokenizer.count = 0
        assert cache.encode(text) == whole(demo, text)
        assert tokenizer.count <= len(new)


def test_memory_is_bounded_and_the_latest_stay(demo):
    tokenizer = Counting(demo)
    cache = SegmentCache(tokenizer, 30_000)
    for number in range(40):
        cache.encode(turn(number))
        assert cache.num_bytes <= 30_000
    tokenizer.count = 0
    cache.encode(turn(39))
    assert tokenizer.count == 0
    cache.encode(turn(0))
    assert tokenizer.count > 1000
    huge = turn(1, length=20_000)
    assert cache.encode(huge) == whole(demo, huge)
    assert cache.num_bytes <= 30_000


def test_nothing_is_kept_without_memory(demo):
    tokenizer = Counting(demo)
    cache = SegmentCache(tokenizer, 0)
    for _ in range(2):
        tokenizer.count = 0
        assert cache.encode(turn(1)) == whole(demo, turn(1))
        assert tokenizer.count == len(turn(1))
    assert cache.num_bytes == 0


def test_threads_share_it(demo):
    cache, wrong = SegmentCache(demo, 20_000), []
    expected = {number: whole(demo, turn(number)) for number in range(12)}

    def work(first):
        for step in range(24):
            number = (first * 5 + step) % 12
            if cache.encode(turn(number)) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < cache.num_bytes <= 20_000


def test_the_plugin_uses_it_for_conversations(demo_gguf):
    tokenizer = open_tokenizer(demo_gguf)
    text = turn(3)
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)
