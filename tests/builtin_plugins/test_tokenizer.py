from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.tokenizer_harness import MESSAGES, open_tokenizer, token_texts
from support.searching import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.plugins import ModelError, RequestError

TEXTS = [
    "",
    "Hello, world!",
    "  leading and trailing  ",
    "def f(x):\n    return x + 1\n\n\n# done\t\tok",
    "naïve café ﬁ Ω ≈ ç √ ∫ 漢字かな 한국어 العربية",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 ok",
    "It's we'll they've I'D",
    "<|im_start|>user\nhi<|im_end|>\n",
    "numbers 1  12 2026   3.14 a1b2",
    "\u0000\u200b\ufeff\r\n",
]
# The demo vocabulary lacks the bytes of some control characters and unused planes.
ANY_TEXT = st.text(
    st.characters(
        max_codepoint=0x1FFFF,
        exclude_categories=["Cs"],
        exclude_characters="\x04\x06\x13\x14\x16\x1d",
    ),
    max_size=50,
)


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> TransformersTokenizer:
    return open_tokenizer(demo_gguf)


@pytest.fixture(scope="module")
def theirs(demo_gguf: Path):
    """transformers' tokenizer of the same file; its conversion leaves the split of digits out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(demo_gguf.parent), gguf_file=demo_gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def spaced() -> Tokenizer:
    """A small tokenizer that writes message with a leading mark, as Llama 2 does."""
    message = ["<unk>", "<s>", "\u2581hello", "\u2581world", "s", "!"]
    message += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: index for index, word in enumerate(message)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


class TestDemo:
    def test_facts(self, demo: TransformersTokenizer) -> None:
        assert demo.vocab_size == 49152
        assert demo.eos_token_ids == (2,)

    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_equal_transformers(self, text: str, demo, theirs) -> None:
        ids = demo.encode(text)
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert demo.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )

    @examples(8)
    @given(text=ANY_TEXT)
    def test_any_text_comes_back(self, text: str, demo) -> None:
        assert demo.decode(demo.encode(text), skip_special_tokens=False) == text

    def test_digits_are_single_tokens(self, demo: TransformersTokenizer) -> None:
        assert token_texts(demo, "in  2026") == ["in", "  ", "2", "0", "2", "6"]

    def test_chat_template_equals_transformers(self, demo, theirs) -> None:
        for add in (True, False):
            assert demo.apply_chat_template(
                MESSAGES, add_generation_prompt=add
            ) == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
        assert demo.apply_chat_template(MESSAGES).endswith(
            "Why?<|im_end|>\n<|im_start|>assistant\n"
        )

    @examples(8)
    @given(text=ANY_TEXT, cut=st.integers(0, 10))
    def test_chunks_join_to_the_whole(self, text: str, cut: int, demo) -> None:
        ids = demo.encode("He said: " + text + ".", add_special_tokens=False)
        cut = min(cut, len(ids))
        stream = demo.decode_stream(ids[:cut], skip_special_tokens=False)
        got = "".join(stream.step(i) or "" for i in ids[cut:])
        whole = demo.decode(ids, skip_special_tokens=False)
        before = demo.decode(ids[:cut], skip_special_tokens=False).rstrip("\ufffd")
        assert before + got == whole or "\ufffd" in text

    @examples(8)
    @given(seed=st.integers(0, 10_000))
    def test_random_tokens_join_to_the_whole(self, seed: int, demo) -> None:
        ids = random.Random(seed).choices(range(17, 49152), k=30)
        ids += demo.encode(" end")
        stream = demo.decode_stream([])
        got = "".join(stream.step(i) or "" for i in ids)
        assert got == demo.decode(ids)

    def test_special_tokens_are_skipped_or_shown(self, demo) -> None:
        ids = demo.encode("a<|im_end|>b")
        for skip, expected in ((True, "ab"), (False, "a<|im_end|>b")):
            stream = demo.decode_stream([], skip_special_tokens=skip)
            assert "".join(stream.step(i) or "" for i in ids) == expected


class TestStream:
    def stream(self, tokenizer: Tokenizer, tmp_path: Path, prompt: list[int]):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return open_tokenizer(tmp_path).decode_stream(prompt)

    def test_first_token_keeps_its_space(self, spaced, tmp_path: Path) -> None:
        stream = self.stream(spaced, tmp_path, [1, 2])
        assert [stream.step(i) for i in (3, 4, 5)] == [" world", "s", "!"]

    def test_without_a_prompt_there_is_no_space(self, spaced, tmp_path: Path) -> None:
        assert self.stream(spaced, tmp_path, []).step(3) == "world"

    def test_a_character_waits_for_its_last_byte(self, spaced, tmp_path: Path) -> None:
        stream = self.stream(spaced, tmp_path, [2])
        steps = [stream.step(6 + byte) for byte in "😀".encode()]
        assert steps == [None, None, None, "😀"]

    def test_a_character_that_the_prompt_began_is_finished(self, spaced, tmp_path: Path) -> None:
        first, *rest = [6 + byte for byte in "é".encode()]
        stream = self.stream(spaced, tmp_path, [2, first])
        assert [stream.step(i) for i in rest] == ["é"]
        assert stream.step(3) == " world"

    def test_text_that_changes_afterwards_does_not_end_the_stream(self, tmp_path: Path) -> None:
        # This decoder turns "ab" into "x": a later token changes the text of the one before.
        tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, [], unk_token="a"))
        tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
        stream = self.stream(tokenizer, tmp_path, [])
        assert [stream.step(i) for i in (0, 1, 2)] == ["a", "b", "c"]

    def test_a_wrong_id_type_is_an_error(self, spaced, tmp_path: Path) -> None:
        with pytest.raises(TypeError):
            self.stream(spaced, tmp_path, []).step("x")


class TestDirectory:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def configure(self, folder: Path, **fields) -> TransformersTokenizer:
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
        return open_tokenizer(folder)

    def test_encode_adds_specials_and_never_truncates(self, folder: Path) -> None:
        tokenizer = open_tokenizer(folder)
        assert tokenizer.encode("a b c a") == [1, 3, 4, 5, 3]
        assert tokenizer.encode("a b c a", add_special_tokens=False) == [3, 4, 5, 3]
        assert tokenizer.vocab_size == 6

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"eos_token": "</s>"}, (2,)),
            ({"eos_token": {"content": "</s>"}}, (2,)),
            ({"eos_token": None}, ()),
            ({"eos_token": "<nowhere>"}, ()),
            ({}, ()),
        ],
    )
    def test_eos(self, fields, expected, folder: Path) -> None:
        assert self.configure(folder, **fields).eos_token_ids == expected

    def test_templates_are_found_in_order(self, folder: Path) -> None:
        with pytest.raises(RequestError, match="no chat template"):
            self.configure(folder).apply_chat_template(MESSAGES)
        named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
        assert self.configure(folder, chat_template=named).apply_chat_template(MESSAGES) == "D"
        plain = self.configure(folder, chat_template="{{ bos_token }}P", bos_token="<s>")
        assert plain.apply_chat_template(MESSAGES) == "<s>P"
        (folder / "chat_template.jinja").write_text("J{{ messages[0].content }}")
        assert open_tokenizer(folder).apply_chat_template(MESSAGES) == "JWhy?"

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ("hello", 'expected a list of {"role": ..., "content": ...}, got \'hello\''),
            ({"role": "user"}, "messages: expected a list"),
            ([], "at least one message"),
            (["hi"], r"messages\[0\]: expected {\"role\": .*, got 'hi'"),
            ([*MESSAGES, {"content": "x"}], r"messages\[1\].role: expected a string .* got None"),
            ([{"role": 3, "content": "x"}], r"messages\[0\].role: expected a string .* got 3"),
            ([{"role": "user"}], r"messages\[0\].content: expected a string, got None"),
            ([{"role": "user", "content": 5}], r"messages\[0\].content: .* got 5"),
            ([{"role": "pirate", "content": "x"}], "chat template refuses them: Unknown role!"),
        ],
    )
    def test_malformed_messages_are_refused(self, messages, message, folder: Path) -> None:
        template = (
            "{% for m in messages %}{% if m.role == 'pirate' %}"
            "{{ raise_exception('Unknown role!') }}{% endif %}{% endfor %}"
        )
        tokenizer = self.configure(folder, chat_template=template)
        with pytest.raises(RequestError, match=message):
            tokenizer.apply_chat_template(messages)

    @pytest.mark.parametrize("template", ["{% if %}", "{{ 1 + 'a' }}", "{{ x.y.z }}"])
    def test_broken_templates_are_request_errors(self, template: str, folder: Path) -> None:
        with pytest.raises(RequestError, match="chat template refuses them: "):
            open_tokenizer(folder).apply_chat_template(MESSAGES, template=template)

    def test_damaged_files_are_named(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{")
        with pytest.raises(ModelError, match=r"tokenizer_config.json is not valid JSON"):
            open_tokenizer(folder)
        (folder / "tokenizer_config.json").unlink()
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelError, match=r"tokenizer.json is not readable"):
            open_tokenizer(folder)

    def test_directories_without_a_tokenizer_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no tokenizer.json, nor another file of a tokenizer"):
            open_tokenizer(tmp_path)
        (tmp_path / "tekken.json").write_bytes(b"x")
        with pytest.raises(ModelError, match=r"no tokenizer.json, and transformers cannot read"):
            open_tokenizer(tmp_path)
        with pytest.raises(ModelError, match="neither a file nor a directory"):
            open_tokenizer(tmp_path / "nowhere")
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ModelError, match=r"model.bin: expected a directory or a .gguf file"):
            open_tokenizer(tmp_path / "model.bin")

    def test_slow_files_are_converted_by_transformers(self, tmp_path: Path) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: i for i, token in enumerate([*alphabet, "he", "<|endoftext|>"])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
        tokenizer = self.configure(tmp_path, tokenizer_class="GPT2Tokenizer")
        assert vocab["he"] in tokenizer.encode("he")
        assert tokenizer.decode(tokenizer.encode("he ho")) == "he ho"
