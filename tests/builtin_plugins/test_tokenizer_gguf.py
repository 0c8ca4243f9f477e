from __future__ import annotations

from pathlib import Path

import pytest
from support.builtins.tokenizer_harness import MESSAGES, open_tokenizer, token_texts, write_gguf

from hardpoint.plugins import ModelError, RequestError


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", " ", "12", "3", "4", "12"]),
        ("default", ["a", " ", "12", "3", "4", "12"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "1", "2"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "1", "2"]),
        ("llama-bpe", ["a", " ", "12", "3", "4", "12"]),
    ],
)
def test_pre_tokenizers(pre: str, expected: list[str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", pre=pre, add_bos_token=False)
    assert token_texts(open_tokenizer(path), "a 123412") == expected


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


def test_sentencepiece_goes_through_transformers(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "h", "i", "hi", "\u2581hi"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -1.0, -2.0] + [0.0] * 256
    path = write_gguf(
        tmp_path / "t.gguf",
        model="llama",
        pre=None,
        tokens=tokens,
        scores=scores,
        token_type=[2, 3, 3] + [1] * 5 + [6] * 256,
        merges=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("hi", add_special_tokens=False) == [7]
    assert tokenizer.decode([7]) == "hi"
    vocabulary = tokenizer.vocabulary()
    assert vocabulary.tokens[7:] == (b" hi", *(bytes([byte]) for byte in range(256)))
    assert vocabulary.special == (0, 1, 2)
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "t.gguf: tokenizer.ggml.model: missing"),
        ({"model": "rwkv"}, "tokenizer.ggml.model: 'rwkv' could not be converted"),
        ({"tokens": None}, "tokenizer.ggml.tokens: missing"),
        ({"merges": None}, "tokenizer.ggml.merges: missing"),
        ({"merges": ["he zz"]}, "tokenizer.ggml.merges: .*zz"),
        ({"pre": "tekken"}, "pre: expected one of .*smollm, got 'tekken'; set tokenizer.path"),
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
