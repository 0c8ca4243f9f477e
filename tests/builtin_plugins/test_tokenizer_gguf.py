from __future__ import annotations

from pathlib import Path

import pytest
from support.builtins.tokenizer_harness import MESSAGES, open_tokenizer, token_texts, write_gguf

from hardpoint.builtin_plugins.tokenizer.splits import SPLITS
from hardpoint.builtin_plugins.tokenizer.stream import byte_of_character
from hardpoint.plugins import ModelError, RequestError


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", " ", "12", "3", "4", "12"]),
        ("default", ["a", " ", "12", "3", "4", "12"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "1", "2"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "1", "2"]),
        ("llama-bpe", ["a", " ", "12", "3", "4", "12"]),
        ("deepseek-v3", ["a", " ", "12", "3", "4", "12"]),
        ("command-r", ["a", " ", "1", "2", "3", "4", "1", "2"]),
    ],
)
def test_pre_tokenizers(pre: str, expected: list[str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", pre=pre, add_bos_token=False)
    assert token_texts(open_tokenizer(path), "a 123412") == expected


def test_patterns_are_those_of_transformers() -> None:
    """It has the patterns of most files, and no others."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    both = SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert both >= {"llama-bpe", "dbrx", "smaug-bpe", "tekken", "qwen2", "qwen35", "gpt-4o"}
    for name in both:
        assert SPLITS[name].patterns == (GGUF_PRE_TOKENIZER_SPLITS[name],), name


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-4o", "camelCase's 12345/\n", ["camel", "Case's", " ", "123", "45", "/\n"]),
        ("tekken", "camelCase's 123/\n", ["camel", "Case", "'s", " ", "1", "2", "3", "/\n"]),
        ("kimi-k2", "aB漢字c 1234", ["a", "B", "漢字", "c", " ", "123", "4"]),
        (
            "deepseek-v3",
            "it's 漢かな1234 (x)",
            ["it", "'s", " ", "漢かな", "123", "4", " (", "x", ")"],
        ),
        ("deepseek-llm", "It's 漢字12\n", ["It", "'", "s", " ", "漢字", "1", "2", "\n"]),
        ("qwen35", "สวัสดี 12", ["สวัสดี", " ", "1", "2"]),
        ("glm4", "สวัสดี 12", ["สว", "ัสด", "ี", " ", "12"]),
        ("olmo", "it's 123 x", ["it", "'s", " 123", " x"]),
        ("refact", "it's 12 x", ["it", "'s", " ", "1", "2", " x"]),
    ],
)
def test_a_text_is_split_as_published(name: str, text: str, expected: list[str]) -> None:
    byte_of = byte_of_character()
    parts = [part for part, _ in SPLITS[name].pre_tokenizer().pre_tokenize_str(text)]
    assert [bytes(byte_of[c] for c in part).decode() for part in parts] == expected


def test_llama3_begins_with_bos_unless_specified_otherwise(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", pre="llama-bpe")
    assert open_tokenizer(path).encode("a")[0] == 0
    path = write_gguf(tmp_path / "t.gguf", pre="llama-bpe", add_bos_token=False)
    assert 0 not in open_tokenizer(path).encode("a")


def test_bos_and_eos_are_added_as_in_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", add_bos_token=True, add_eos_token=True)
    tokenizer = open_tokenizer(path)
    middle = tokenizer.encode("hell", add_special_tokens=False)
    assert len(middle) == 1
    assert tokenizer.encode("hell") == [0, *middle, 1]
    assert tokenizer.decode([0, *middle, 1]) == "hell"


def test_user_defined_tokens_stay_whole_and_are_shown(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_gguf(tmp_path / "t.gguf"))
    assert 2 in tokenizer.encode("a<tool>b")
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "a<tool>b"


PIECES = ["<unk>", "<s>", "</s>", "\u2581", "h", "i", "hi", "\u2581hi"]
PIECES += [*(f"<0x{byte:02X}>" for byte in range(256)), "[", "\u2581[", "<tool>"]


def write_sentencepiece(path: Path, **changes) -> Path:
    return write_gguf(
        path,
        model="llama",
        pre=None,
        tokens=PIECES,
        scores=[0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -1.0, -2.0] + [0.0] * 256 + [-7.0, -3.0, 0.0],
        token_type=[2, 3, 3] + [1] * 5 + [6] * 256 + [1, 1, 4],
        merges=None,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


def test_sentencepiece_goes_through_transformers(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "t.gguf")
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("hi", add_special_tokens=False) == [7]
    assert tokenizer.decode([7]) == "hi"
    vocabulary = tokenizer.vocabulary()
    assert vocabulary.tokens[7:264] == (b" hi", *(bytes([byte]) for byte in range(256)))
    assert vocabulary.special == (0, 1, 2)
    assert tokenizer.eos_token_ids == (2,)


SPACES = {
    "hi": ("\u2581hi", "hi"),
    " hi": ("\u2581 \u2581hi", "\u2581hi"),
    "<s>[hi": ("<s> \u2581[ hi", "<s> [ hi"),
    "hi</s>hi": ("\u2581hi </s> \u2581hi", "hi </s> hi"),
    "hi<tool>hi": ("\u2581hi <tool> \u2581hi", "hi <tool> hi"),
    "<s></s>": ("<s> </s>", "<s> </s>"),
    "": ("", ""),
}
"""Tokens of texts if texts are prefixed with a space, and if not."""


@pytest.mark.parametrize(
    ("architecture", "stated"),
    [("llama", None), ("llama", True), ("llama", False), ("phi3", None), ("phi3", False)],
)
def test_texts_are_prefixed_as_in_llama_cpp(architecture, stated, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(
        write_sentencepiece(tmp_path / "t.gguf", architecture=architecture, add_space_prefix=stated)
    )
    for text, tokens in SPACES.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert " ".join(PIECES[i] for i in ids) == tokens[stated is False], text
        assert tokenizer.encode(text) == (ids if ids[:1] == [1] else [1, *ids])
    for text in ("hi", " hi", "  [hi", "é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    first = " hi" if stated is False else "hi"
    assert tokenizer.decode([7]) == tokenizer.decode_stream([1]).step(7) == first
    assert tokenizer.decode_stream([1, 7]).step(7) == " hi"


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_texts_for_gemma_are_not_prefixed(architecture: str, tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "t.gguf", architecture=architecture)
    tokenizer = open_tokenizer(path)
    for text, (_, tokens) in SPACES.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert " ".join(PIECES[i] for i in ids) == tokens, text
    assert tokenizer.decode([7]) == " hi"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "t.gguf: tokenizer.ggml.model: missing"),
        ({"model": "rwkv"}, "tokenizer.ggml.model: 'rwkv' could not be converted"),
        ({"tokens": None}, "tokenizer.ggml.tokens: missing"),
        ({"merges": None}, "tokenizer.ggml.merges: missing"),
        ({"merges": ["he zz"]}, "tokenizer.ggml.merges: .*zz"),
        ({"pre": "viking"}, "pre: expected one of .*tekken, got 'viking'; set tokenizer.path"),
    ],
)
def test_unsupported_files_are_refused(changes, message, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", **changes)
    with pytest.raises(ModelError, match=message):
        open_tokenizer(path)


def test_no_template_is_a_request_error(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_gguf(tmp_path / "t.gguf"))
    with pytest.raises(RequestError, match=r"model 't.gguf' has no chat template"):
        tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.apply_chat_template(MESSAGES, template="{{ eos_token }}!") == "</s>!"
