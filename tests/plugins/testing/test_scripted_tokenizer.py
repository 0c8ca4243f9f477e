"""The scripted model's tokenizer agrees with the library for such tokenizers."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.plugins import ModelFiles, RequestError, TokenizerContext
from hardpoint.plugins.component import Source
from hardpoint.testing import write_scripted_model
from hardpoint.testing.scripted_tokenizer import ScriptedTokenizer

SPECIAL = ["<a>", "<ab>", "<a>b", "(x|"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def both(folder):
    """The scripted tokenizer, and the one of the library, of the same files."""
    return [
        cls(
            TokenizerContext(
                name="t",
                source=Source(
                    "t", f"{cls.__module__}:{cls.__name__}", "under test", "0", "default"
                ),
                options=cls.Options(),
                files=ModelFiles(name="scripted", path=folder),
            )
        )
        for cls in (ScriptedTokenizer, TransformersTokenizer)
    ]


def test_the_file_is_what_the_library_writes(folder, tmp_path):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    texts = ("<eos>", *SPECIAL)
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in texts])
    expected = json.loads(tokenizer.to_str())
    assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) == expected


TEXTS = st.lists(st.sampled_from([*SPECIAL, "<eos>", "a", "é", "日本", "b>", "<", "\n", "\0"]))


@given(TEXTS, st.booleans())
def test_it_encodes_and_decodes_as_the_library_does(both, pieces, skip):
    scripted, other = both
    ids = scripted.encode("".join(pieces))
    assert ids == other.encode("".join(pieces))
    assert scripted.decode(ids, skip_special_tokens=skip) == other.decode(
        ids, skip_special_tokens=skip
    )
    for cut in range(len(ids)):
        streams = [t.decode_stream(ids[:cut], skip_special_tokens=skip) for t in both]
        pieces_of = [[stream.step(token) or "" for token in ids[cut:]] for stream in streams]
        assert "".join(pieces_of[0]) == "".join(pieces_of[1])


def test_it_tells_the_same_of_its_vocabulary(both):
    scripted, other = both
    assert scripted.vocab_size == other.vocab_size
    assert scripted.vocabulary() == other.vocabulary()
    assert scripted.special_tokens == other.special_tokens
    assert list(scripted.eos_token_ids) == list(other.eos_token_ids)


def test_it_refuses_what_it_cannot_do(both):
    with pytest.raises(RequestError, match="'t' applies no chat template"):
        both[0].apply_chat_template([{"role": "user", "content": "Hi"}])
    with pytest.raises(RequestError, match="surrogates not allowed"):
        both[0].encode("\ud800")
