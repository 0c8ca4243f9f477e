"""Tokenizers of folders without tokenizer.json, and folders with several chat templates.

The token ids are those of `sentencepiece` 0.2.3 and `tiktoken` 0.14.0 for the same files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builtins.tokenizer_files import (
    BPE_PIECES,
    TIKTOKEN,
    USER_DEFINED,
    bpe_model,
    message,
    sentencepiece_model,
    tiktoken_file,
    unigram_model,
)
from support.builtins.tokenizer_harness import MESSAGES, open_tokenizer, write_gguf
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from hardpoint import LLM
from hardpoint.plugins import ModelError, RequestError
from hardpoint.testing import scripted_config, write_scripted_model


def written(folder: Path, files: dict[str, bytes], **config):
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return open_tokenizer(folder)


BPE = [
    ("Hello, the inner tin", [272, 302, 262, 264, 279, 265, 260, 263]),
    ("  two  spaces ", [266, 260, 290, 277, 266, 280, 289, 276, 286, 274, 280, 273]),
    (
        "naïve 漢 😀\n",
        [273, 279, 276, 198, 178, 294, 274, 273, 233, 191, 165, 273, 243, 162, 155, 131, 13],
    ),
    ("", []),
    (" ", [266]),
]


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "InternLM2Tokenizer", ""])
def test_a_model_of_sentencepiece_is_read_without_code(name, tmp_path):
    code = {"auto_map": {"AutoTokenizer": ["tokenization.Any", None]}}
    tokenizer = written(tmp_path, {"tokenizer.model": bpe_model()}, tokenizer_class=name, **code)
    for text, ids in BPE:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
        stream = tokenizer.decode_stream([])
        assert "".join(stream.step(token) or "" for token in ids) == text
    assert tokenizer.vocab_size == len(BPE_PIECES)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2, "<sep>": 259}
    assert tokenizer.vocabulary().tokens[262] == b" the"
    assert tokenizer.encode("<s>the<sep>", add_special_tokens=False) == [1, 262, 259]


def test_a_model_of_unigrams_joins_spaces(tmp_path):
    tokenizer = written(tmp_path, {"spiece.model": unigram_model()}, tokenizer_class="T5Tokenizer")
    for text, ids in (
        ("Hello, the inner tin", [13, 43, 5, 7, 20, 8, 3, 6]),
        ("  two  spaces ", [3, 31, 18, 14, 21, 30, 17, 27, 15, 21]),
        ("", []),
        (" ", []),
    ):
        assert tokenizer.encode(text) == [*ids, 2]
        assert tokenizer.decode(ids) == " ".join(text.split())


def test_the_configuration_chooses_what_is_added(tmp_path):
    added = {
        "added_tokens_decoder": {
            "302": {"content": "<tool>", "special": False},
            str(len(BPE_PIECES) + 2): {"content": "<|im_end|>", "special": True},
        },
        "add_bos_token": False,
        "add_eos_token": True,
        "eos_token": "<|im_end|>",
        "legacy": False,
    }
    added["added_tokens_decoder"].pop("302")
    files = {"tokenizer.model": bpe_model(), "added_tokens.json": b'{"<tool>": %d}'}
    files["added_tokens.json"] %= len(BPE_PIECES)
    tokenizer = written(tmp_path, files, tokenizer_class="LlamaTokenizer", **added)
    tool, end = len(BPE_PIECES), len(BPE_PIECES) + 2
    assert tokenizer.encode("the<tool>in") == [262, tool, 263, end]  # no space behind a token
    assert tokenizer.eos_token_ids == (end,)
    assert tokenizer.special_tokens[f"<|reserved_token_{end - 1}|>"] == end - 1


KIMI = [
    ("hello hello's 12345", [259, 261, 264, 32, 267, 52, 53]),
    ("汉字Hello汉字's\n\n x", [263, 72, 101, 257, 111, 263, 264, 269, 32, 120]),
    ("cafe\u0301 é", [99, 97, 102, 101, 204, 129, 32, 265]),
]
QWEN = [
    ("hello hello's 12345", [259, 261, 264, 32, 49, 50, 51, 52, 53]),
    ("cafe\u0301 é", [99, 97, 102, 265, 32, 265]),
]
GLM = [
    (
        "汉字Hello汉字's\n\n x",
        [
            *(230, 177, 137, 229, 173, 151, 72, 101, 257, 111, 230, 177, 137, 229, 173, 151),
            *(264, 269, 32, 120),
        ],
    ),
    KIMI[0],
]


@pytest.mark.parametrize(
    ("name", "file", "texts"),
    [
        ("TikTokenTokenizer", "tiktoken.model", KIMI),
        ("QWenTokenizer", "qwen.tiktoken", QWEN),
        ("HYTokenizer", "hy.tiktoken", QWEN),
        ("ChatGLM4Tokenizer", "tokenizer.model", GLM),
    ],
)
def test_a_file_of_tiktoken_is_read_without_code(name, file, texts, tmp_path):
    code = {"auto_map": {"AutoTokenizer": ["tokenization.Any", None]}}
    tokenizer = written(tmp_path, {file: tiktoken_file(TIKTOKEN)}, tokenizer_class=name, **code)
    for text, ids in texts:
        assert tokenizer.encode(text) == ids
    assert tokenizer.vocabulary().tokens[261] == b" hello"


def test_special_tokens_of_tiktoken_are_behind_the_others(tmp_path):
    count = 256 + len(TIKTOKEN)
    files = {"qwen.tiktoken": tiktoken_file(TIKTOKEN)}
    qwen = written(tmp_path, files, tokenizer_class="QWenTokenizer", eos_token="<|im_end|>")
    assert qwen.encode("<|im_start|>hello<|im_end|>") == [count + 1, 259, count + 2]
    assert (qwen.eos_token_ids, qwen.vocab_size) == ((count + 2,), count + 3 + 205)
    (tmp_path / "qwen.tiktoken").unlink()
    named = {str(count + 3): {"content": "<|im_end|>"}, str(count + 1): {"content": "[EOS]"}}
    files = {"tiktoken.model": tiktoken_file(TIKTOKEN)}
    kimi = written(tmp_path, files, tokenizer_class="TikTokenTokenizer", added_tokens_decoder=named)
    assert kimi.encode("hello<|im_end|>") == [259, count + 3]
    assert kimi.special_tokens["[EOS]"] == count + 1
    assert kimi.special_tokens[f"<|reserved_token_{count}|>"] == count
    assert kimi.vocab_size == count + 256


LLAMA = {"tokenizer_class": "LlamaTokenizer"}
PIECES = [("<unk>", 0.0, 2), ("a", -1.0, 1)]
WRONG = {
    "no message": ({"tokenizer.model": b"x"}, LLAMA, "tokenizer.model: expected a model of Sente"),
    "cut": ({"tokenizer.model": bpe_model()[:-3]}, LLAMA, "tokenizer.model: expected a model of"),
    "no pieces": ({"tokenizer.model": b""}, LLAMA, "expected up to 4194304 pieces.*got 0"),
    "no text": (
        {"tokenizer.model": message([(1, message([(1, b"\xff")]))])},
        LLAMA,
        "tokenizer.model: expected a model of SentencePiece: .*utf-8",
    ),
    "words": (
        {"tokenizer.model": sentencepiece_model(PIECES, {3: 3}, {})},
        LLAMA,
        r"model_type: expected 1 \(unigram\) or 2 \(BPE\), got 3",
    ),
    "suffixes": (
        {"tokenizer.model": sentencepiece_model(PIECES, {24: 1}, {})},
        LLAMA,
        "treat_whitespace_as_suffix: expected false, got true; add the model's tokenizer.json",
    ),
    "plain spaces": (
        {"tokenizer.model": sentencepiece_model(PIECES, {}, {5: 0})},
        LLAMA,
        "escape_whitespaces: expected true, got false",
    ),
    "unknown beyond": (
        {"tokenizer.model": sentencepiece_model(PIECES, {40: 9}, {})},
        LLAMA,
        "one of them for unknown text, got 2 and the id 9",
    ),
    "charsmap": (
        {"tokenizer.model": sentencepiece_model(PIECES, {}, {2: b"xx"})},
        LLAMA,
        "tokenizer.model",
    ),
    "code": (
        {"tokenizer.model": bpe_model()},
        {"tokenizer_class": "OtherTokenizer", "auto_map": {"AutoTokenizer": "x.Y"}},
        r"auto_map: expected no code \(a model's folder never runs any\)",
    ),
    "class of tiktoken": (
        {"x.tiktoken": tiktoken_file()},
        {"tokenizer_class": "OtherTokenizer"},
        "tokenizer_class: how .*x.tiktoken splits texts is in code, which is never run; known are "
        "QWenTokenizer, .*, got 'OtherTokenizer'; add the model's tokenizer.json",
    ),
    "line": (
        {"qwen.tiktoken": b"YQ== 0\nYg== x\n"},
        {"tokenizer_class": "QWenTokenizer"},
        "qwen.tiktoken: line 2: expected a token in base64 and its rank",
    ),
    "ranks": (
        {"qwen.tiktoken": b"YQ== 0\nYg== 2\n"},
        {"tokenizer_class": "QWenTokenizer"},
        "expected the ranks 0 to 1, each once",
    ),
    "bytes": (
        {"qwen.tiktoken": b"YQ== 0\nYg== 1\n"},
        {"tokenizer_class": "QWenTokenizer"},
        "expected a token for each byte, it has none for",
    ),
    "long token": (
        {"qwen.tiktoken": tiktoken_file([b"a" * 1025])},
        {"tokenizer_class": "QWenTokenizer"},
        "qwen.tiktoken: expected tokens of at most 1024 bytes, got 1025",
    ),
    "long piece": (
        {"tokenizer.model": sentencepiece_model([*PIECES, ("a" * 1025, 0.0, 1)], {3: 2}, {})},
        LLAMA,
        "tokenizer.model: expected pieces of at most 1024 characters, got 1025",
    ),
    "added id": (
        {"tokenizer.model": bpe_model()},
        {**LLAMA, "added_tokens_decoder": {"7": {"content": "<x>"}}},
        "the added token '<x>': expected the id [0-9]+, which the vocabulary .* gives it, got 7",
    ),
    "added id far off": (
        {"tokenizer.model": bpe_model()},
        {**LLAMA, "added_tokens_decoder": {"2000000000": {"content": "<x>"}}},
        "the added token '<x>': expected an id of at most [0-9]+, got 2000000000",
    ),
    "added id of words": (
        {"tokenizer.model": bpe_model()},
        {**LLAMA, "added_tokens_decoder": {"x": {"content": "<x>"}}},
        "added_tokens_decoder: expected an id of a token, got 'x'",
    ),
    "template": (
        {"tokenizer.model": bpe_model()},
        {**LLAMA, "chat_template": 5},
        "chat_template: expected a text or a list, got 5",
    ),
    "template of a list": (
        {"tokenizer.model": bpe_model()},
        {**LLAMA, "chat_template": [{"name": "rag"}]},
        r"chat_template\[0\]: expected a name and a template, got ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_folder_is_named(case, tmp_path):
    files, config, words = WRONG[case]
    with pytest.raises(ModelError, match=words):
        written(tmp_path, files, **config)


def test_a_model_of_hostile_pieces_is_read_in_time(tmp_path):
    pieces = [*PIECES, *(("a" * size, -float(size), USER_DEFINED) for size in range(2, 200))]
    model = sentencepiece_model(pieces, {3: 2}, {3: 0, 4: 0})
    tokenizer = written(tmp_path, {"tokenizer.model": model}, **LLAMA)
    assert len(tokenizer.encode("a" * 1000, add_special_tokens=False)) < 20


NAMED = [
    {"name": "default", "template": "D{{ messages[0].content }}"},
    {"name": "rag", "template": "R{{ documents is none }}"},
    {"name": "tool_use", "template": "T{{ tools | length }} [func_name1("},
]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


DECODER = {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}


@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        ({}, "<s>", "<sep>"),
        ({"eos_token": "</s>"}, "<s>", "<sep>"),
        ({"eos_token": "</s>", **DECODER}, "", "</s>"),
    ],
)
def test_special_tokens_of_older_folders_are_in_a_file_of_their_own(config, bos, eos, tmp_path):
    from transformers import AutoTokenizer

    config = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<sep>": 3}
    read = FastTokenizer(WordLevel(words, unk_token="<unk>"))
    read.add_special_tokens(["</s>", "<sep>"])
    special = {"bos_token": "<s>", "eos_token": {"content": "<sep>", "lstrip": False}}
    files = {
        "tokenizer.json": read.to_str().encode(),
        "special_tokens_map.json": json.dumps(special).encode(),
        "chat_template.jinja": b"{{ bos_token }}|{{ eos_token }}",
    }
    tokenizer = written(tmp_path, files, **config)
    assert tokenizer.apply_chat_template(MESSAGES) == f"{bos}|{eos}"
    assert tokenizer.eos_token_ids == (words[eos],)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token or "", theirs.eos_token) == (bos, eos)


def test_a_special_token_that_is_no_text_is_named_with_its_file(tmp_path):
    files = {
        "tokenizer.model": bpe_model(),
        "special_tokens_map.json": json.dumps({"eos_token": 5}).encode(),
    }
    message = r"special_tokens_map\.json: eos_token: expected a string, got 5"
    with pytest.raises(ModelError, match=message):
        written(tmp_path, files, **LLAMA)


def test_a_template_is_chosen_by_tools(tmp_path):
    files = {"tokenizer.model": bpe_model()}
    tokenizer = written(tmp_path, files, chat_template=NAMED, **LLAMA)
    assert list(tokenizer.chat_templates) == ["default", "rag", "tool_use"]
    assert tokenizer.apply_chat_template(MESSAGES) == "DWhy?"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[NOW]).startswith("T1")
    assert tokenizer.chat_template == NAMED[0]["template"]


def test_files_of_templates_come_before_the_configuration(tmp_path):
    files = {"tokenizer.model": bpe_model(), "chat_template.jinja": b"J"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = written(tmp_path, files, chat_template=NAMED, **LLAMA)
    assert tokenizer.chat_templates == {
        "default": "J",
        "rag": NAMED[1]["template"],
        "tool_use": "tools",
    }


def test_a_gguf_file_has_named_templates(tmp_path):
    read = open_tokenizer(write_gguf(tmp_path / "m.gguf", templates=NAMED)).chat_templates
    assert read == {item["name"]: item["template"] for item in NAMED}


def test_a_request_chooses_a_template_by_name(tmp_path):
    folder = write_scripted_model(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = NAMED
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(config=scripted_config(folder)) as llm:
        prompt = llm.model.apply_chat_template(MESSAGES, chat_template="rag")["prompt"]
        assert prompt == "RTrue"
        assert llm.model.apply_chat_template(MESSAGES, tools=[NOW])["prompt"].startswith("T1")
        for wrong in ("{{ messages }}", "Rag", 5):
            with pytest.raises(
                RequestError,
                match=r"chat_template: expected the name of a template of the model \(default, "
                r"rag, tool_use\), got .*; templates themselves come from the operator alone",
            ):
                llm.chat(MESSAGES, chat_template=wrong)
