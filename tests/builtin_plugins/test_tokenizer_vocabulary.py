"""The bytes of tokens are equal to the output of the library's decoder, for each decoder."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.tokenizer_harness import open_tokenizer, write_gguf
from support.searching import examples
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from hardpoint.builtin_plugins.tokenizer.vocabulary import num_token_ids, read_vocabulary
from hardpoint.plugins.grammars import Vocabulary

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
MARK = "\u2581"


def numbered(*tokens: str) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return read_vocabulary(tokenizer, num_token_ids(tokenizer))


def bytes_of(tokenizer: Tokenizer, *tokens: str) -> list[bytes]:
    token_bytes = vocabulary_of(tokenizer).tokens
    return [token_bytes[tokenizer.token_to_id(token)] for token in tokens]


def byte_level(*more: str) -> Tokenizer:
    merges = [("h", "e"), ("Ġ", "he"), ("Ã", "©")]
    vocab = numbered(*ALPHABET, "he", "Ġhe", "Ã©", *more)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_in_sequence() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def llama() -> Tokenizer:
    vocab = numbered("<unk>", *BYTE_TOKENS, "h", "i", "hi", f"{MARK}hi", MARK, "é", MARK * 2)
    merges = [("h", "i"), (MARK, "hi"), (MARK, MARK)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Sequence(steps), decoders.Strip(content=" ", left=1, right=0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    words = [("<unk>", 0.0), (MARK, -3.0), ("h", -3.0), ("i", -3.0), (f"{MARK}hi", -1.0)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece(*, cleanup: bool = True) -> Tokenizer:
    words = ("[UNK]", "hi", "##hi", "##", "h", ".", "'s", "n't", "do not", "' x ' y", "##.", "a .b")
    tokenizer = Tokenizer(models.WordPiece(numbered(*words), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


def suffixes() -> Tokenizer:
    vocab = numbered("h", "i", "i</w>", "hi</w>")
    merges = [("h", "i</w>")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(numbered("h", "hi", "é"), unk_token="h"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def replaced() -> Tokenizer:
    vocab = numbered("h", "__", "_h_", "aab", "   h  ", " ", "", *BYTE_TOKENS)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="h"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Replace(Regex("a+"), "c"),
            decoders.Replace("_", "--"),
            decoders.Strip(content=" ", left=2, right=0),
        ]
    )
    return tokenizer


# tokenizer, text, bytes of its tokens
FAMILIES = {
    "byte_level": (byte_level(), "he é 漢 he", None),
    "byte_level_in_sequence": (byte_level_in_sequence(), "he é 漢 he", None),
    "llama": (llama(), "hi  é漢", " hi  é漢"),
    "metaspace": (metaspace(), "hi hhi", " hi hhi"),
    "word_piece": (word_piece(), "hihi hi.", " hihi hi."),
    "word_piece_without_cleanup": (word_piece(cleanup=False), "hihi hi.", " hihi hi ."),
    "suffixes": (suffixes(), "hi hi", "hi hi "),
    "words": (words(), "hi é", " hi é"),
    "replaced": (replaced(), "aab", "cb"),
}


@functools.cache
def tokens_of(family: str) -> Sequence[bytes]:
    return vocabulary_of(FAMILIES[family][0]).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_text(family: str) -> None:
    tokenizer, text, expected = FAMILIES[family]
    tokens = vocabulary_of(tokenizer).tokens
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(tokens[i] for i in ids) == (expected or text).encode()
    assert len(tokens) == num_token_ids(tokenizer) == tokenizer.get_vocab_size()


@pytest.mark.parametrize("family", FAMILIES)
@examples(8)
@given(data=st.data())
def test_bytes_join_to_what_the_decoder_makes(family: str, data: st.DataObject) -> None:
    tokenizer, _, _ = FAMILIES[family]
    tokens = tokens_of(family)
    token = st.integers(0, len(tokens) - 1)
    if family in ("llama", "replaced"):  # most of their tokens are bytes
        others = [i for i in range(len(tokens)) if tokenizer.id_to_token(i) not in BYTE_TOKENS]
        token = st.one_of(token, st.sampled_from(others))
    first = tokenizer.token_to_id("h")
    # No grammar allows a token without bytes, which the decoder lets end a character's bytes.
    ids = [i for i in data.draw(st.lists(token, max_size=8)) if tokens[i]]
    try:
        text = b"".join(tokens[i] for i in ids).decode()
    except UnicodeDecodeError:
        return
    if family == "replaced" and "cc" in text:
        return  # it joins the tokens of bytes before it replaces "a+", so that two may become one
    decoded = tokenizer.decode([first, *ids], skip_special_tokens=False)
    if family == "suffixes":  # the last token has no space
        text, decoded = text.rstrip(), decoded.rstrip()
    assert decoded == "h" + text


def test_bytes_of_each_value() -> None:
    every = {bytes([byte]) for byte in range(256)}
    assert {*bytes_of(byte_level(), *ALPHABET)} == every
    assert bytes_of(llama(), *BYTE_TOKENS) == sorted(every)


def test_tokens_outside_of_the_alphabet_are_plain_text() -> None:
    odd = ("Ġ日", "a b", "Ġ\n", "Ġ", "")
    expected = ["Ġ日".encode(), b"a b", "Ġ\n".encode(), b" ", b""]
    assert bytes_of(byte_level(*odd), *odd) == expected


def test_strip_cuts_each_token_unless_they_are_fused() -> None:
    tokenizer = words()
    tokenizer.add_tokens(["   x   "])
    strip = decoders.Strip(content=" ", left=1, right=2)
    tokenizer.decoder = strip
    assert bytes_of(tokenizer, "   x   ") == [b"  x "]
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), strip])
    assert bytes_of(tokenizer, "   x   ") == [b"   x   "]


@pytest.mark.parametrize("build", [byte_level, llama, word_piece, words])
def test_special_tokens_have_their_own_text(build) -> None:
    tokenizer = build()
    tokenizer.add_special_tokens(["<|é|>", f"{MARK}Ġ<s>", "<0x41>"])
    vocabulary = vocabulary_of(tokenizer)
    names = {text: tokenizer.token_to_id(text) for text in ("<|é|>", f"{MARK}Ġ<s>", "<0x41>")}
    assert vocabulary.special_ids == names
    assert list(vocabulary.special) == sorted(names.values())


def test_added_tokens_that_are_not_special_are_decoded() -> None:
    tokenizer = byte_level()
    added = ["<think>", "\t\t", "漢é", "éa"]  # the last one is no text in the byte alphabet
    tokenizer.add_tokens([AddedToken(text) for text in [*added, "Ġx"]])
    assert vocabulary_of(tokenizer).special == ()
    assert bytes_of(tokenizer, *added) == [text.encode() for text in added]
    assert bytes_of(tokenizer, "Ġx") == [b" x"]


def test_added_runs_of_spaces_are_spaces() -> None:
    tokenizer = llama()
    tokenizer.add_tokens([AddedToken(MARK * count, normalized=False) for count in (2, 3)])
    assert bytes_of(tokenizer, MARK * 2, MARK * 3) == [b"  ", b"   "]


def test_ids_without_a_token_have_no_bytes(tmp_path: Path) -> None:
    tokenizer = byte_level("last")
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["last"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    opened = open_tokenizer(tmp_path)
    vocabulary = opened.vocabulary()
    assert opened.vocab_size == len(vocabulary.tokens) == 301
    assert vocabulary.tokens[258:] == ("é".encode(), *[b""] * 41, b"last")
    tokenizer = words()
    tokenizer.model = models.WordLevel({"a": 1, "b": 3}, unk_token="a")
    assert vocabulary_of(tokenizer).tokens == (b"", b" a", b"", b" b")


def test_pieces_that_occur_twice_have_bytes_both_times() -> None:
    tokenizer = Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0), ("a", 0.0)], unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    assert vocabulary_of(tokenizer).tokens == (b"a", b"b", b"a")


def test_ids_far_apart_cost_nothing(tmp_path: Path) -> None:
    state = json.loads(byte_level("last").to_str())
    state["model"]["vocab"]["last"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    opened = open_tokenizer(tmp_path)
    assert opened.vocab_size == 4_000_000_001
    message = "^the tokenizer's largest token id is 4000000000; grammars need ids below"
    with pytest.raises(NotImplementedError, match=message):
        opened.vocabulary()


def test_decoders_without_bytes_are_named() -> None:
    tokenizer = words()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.CTC()])
    with pytest.raises(NotImplementedError, match="decoder is of the type 'CTC', which grammars"):
        vocabulary_of(tokenizer)


class TestGGUF:
    def test_types_of_tokens(self, tmp_path: Path) -> None:
        tokenizer = open_tokenizer(write_gguf(tmp_path / "t.gguf"))
        vocabulary = tokenizer.vocabulary()
        assert vocabulary.special_ids == {"<s>": 0, "</s>": 1}
        assert vocabulary.tokens[2] == b"<tool>"
        assert vocabulary.tokens[-4:] == (b"he", b"ll", b"hell", b"12")

    def test_a_token_that_is_there_twice_has_its_last_id(self, tmp_path: Path) -> None:
        tokens = ["<s>", "</s>", "<tool>", "he", *ALPHABET, "he", "ll", "hell", "12"]
        types = [3, 3, 4] + [1] * (len(tokens) - 3)
        path = write_gguf(tmp_path / "t.gguf", tokens=tokens, token_type=types)
        tokenizer = open_tokenizer(path)
        vocabulary = tokenizer.vocabulary()
        assert tokenizer.vocab_size == len(vocabulary.tokens) == len(tokens)
        assert vocabulary.tokens[3] == b""
        assert vocabulary.tokens[-4] == b"he"

    def test_demo(self, demo_gguf: Path) -> None:
        tokenizer = open_tokenizer(demo_gguf)
        vocabulary = tokenizer.vocabulary()
        assert len(vocabulary.tokens) == 49152
        assert vocabulary.special_ids == tokenizer.special_tokens
        assert vocabulary.special == tuple(range(17))
        text = '{"name": "naïve 漢字", "n": [1, 2.5]}\n\t👩‍👩‍👧<|im_end|>'
        assert b"".join(vocabulary.tokens[i] for i in tokenizer.encode(text)) == text.encode()
        for token, token_text in enumerate(vocabulary.tokens):
            decoded = tokenizer.decode([token], skip_special_tokens=False)
            assert token_text.decode(errors="replace") == decoded
