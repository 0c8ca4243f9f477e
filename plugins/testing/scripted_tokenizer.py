"""The tokenizer of the scripted model: one token per byte, EOS, and special tokens.

The scripted model's files are those of a byte-level tokenizer, which other tokenizers read, too.
The one of this module needs no library, for engines that have no other.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.plugins import DecodeStream, ModelFiles, RequestError, Tokenizer, TokenizerContext
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.text.tokenizer import EncodedPair

__all__ = ["ByteTokenizer", "ByteTokens", "ScriptedTokenizer"]

_EOS_TEXT = "<eos>"
_LONGEST_CHARACTER = 4  # bytes
_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in files, as in GPT-2's encoder.

    Printable bytes are their own characters, the others are U+0100 and up in order (Radford et al.,
    2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(0x100)]


class ByteTokens:
    """The ids of bytes and special tokens.

    Attributes:
        special: ids of special tokens by their texts; the first one is EOS.
    """

    def __init__(self, special_tokens: Iterable[str] = ()) -> None:
        """`special_tokens` are texts, besides EOS; their ids follow its."""
        characters = _byte_characters()
        self._vocabulary = {character: index for index, character in enumerate(sorted(characters))}
        self._of_byte = [self._vocabulary[character] for character in characters]
        self._bytes = {token: bytes([byte]) for byte, token in enumerate(self._of_byte)}
        self.special: dict[str, int] = {}
        for text in (_EOS_TEXT, *special_tokens):
            known = self._vocabulary.get(text, len(self._bytes))
            token = self.special.setdefault(text, known)
            self._bytes[token] = text.encode()
        longest_first = sorted(self.special, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are tokens.

        Raises:
            UnicodeEncodeError: it has no UTF-8.
        """
        ids: list[int] = []
        for index, piece in enumerate(self._pattern.split(text)):
            if index % 2:
                ids.append(self.special[piece])
            else:
                ids += [self._of_byte[byte] for byte in piece.encode()]
        return ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none of an id that is unknown."""
        return self._bytes.get(token_id, b"")

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of each token."""
        tokens = tuple(self._bytes[token] for token in range(len(self)))
        return Vocabulary(tokens=tokens, special=tuple(sorted(self.special.values())))

    def write(self, folder: Path, chat_template: str) -> None:
        """Write the files that tokenizers read into a folder, EOS and a chat template included."""
        added = [
            {"id": token, "content": text, **_SPECIAL, "special": True}
            for text, token in self.special.items()
        ]
        content: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {**_BYTE_LEVEL, "add_prefix_space": False},
            "post_processor": None,
            "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": self._vocabulary,
                "merges": [],
            },
        }
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        settings = {"eos_token": _EOS_TEXT, "chat_template": chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    @classmethod
    def read(cls, folder: Path) -> ByteTokens:
        """Return the tokens of a folder of `write`."""
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        texts = (token["content"] for token in content["added_tokens"])
        return cls(text for text in texts if text != _EOS_TEXT)


class ByteTokenizer(Tokenizer):
    """One token per byte, and one per special token; no chat template, which needs a library."""

    contract = 1

    def __init__(
        self, special_tokens: Iterable[str] = (), context: TokenizerContext | None = None
    ) -> None:
        """`special_tokens` are texts, besides EOS."""
        files = ModelFiles(name="bytes", path=Path())
        super().__init__(
            context or TokenizerContext(name="bytes", options=self.Options(), files=files)
        )
        self._tokens = ByteTokens(special_tokens)
        self._special_ids = frozenset(self._tokens.special.values())

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._tokens)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by their texts."""
        return self._tokens.special

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of each token."""
        return self._tokens.vocabulary()

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """EOS."""
        return [self._tokens.special[_EOS_TEXT]]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """Return a token per byte, or special token.

        Raises:
            RequestError: the text has no UTF-8.
        """
        try:
            return self._tokens.encode(text)
        except UnicodeEncodeError as cause:
            raise RequestError(f"prompt: {cause}") from cause

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return the tokens of both texts without special tokens; the second has type 1.

        Raises:
            RequestError: a text has no UTF-8.
        """
        ids, more = self.encode(first), self.encode(second)
        end = len(ids) + len(more)
        return EncodedPair([*ids, *more], range(len(ids)), range(len(ids), end), len(ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        visible = self._kept(token_ids, skip_special_tokens)
        return b"".join(map(self._tokens.bytes_of, visible)).decode(errors="replace")

    def decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """Return a decoder; the output begins with an incomplete character of the prompt."""
        decoder = _Utf8Decoder("replace")
        for token in self._kept(prompt_token_ids[-_LONGEST_CHARACTER:], skip_special_tokens):
            decoder.decode(self._tokens.bytes_of(token))
        return _Stream(self._tokens, decoder, self._special_ids if skip_special_tokens else ())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],  # noqa: ARG002
        **options: Any,  # noqa: ARG002
    ) -> str:
        """Refuse: there is no library for templates.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"messages: the tokenizer {self.name!r} applies no chat template")

    def _kept(self, token_ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        return [token for token in token_ids if token not in skipped]


class ScriptedTokenizer(ByteTokenizer):
    """Reads the files of a scripted model."""

    contract = 1

    def __init__(self, context: TokenizerContext) -> None:
        super().__init__(ByteTokens.read(context.files.path).special, context)


class _Stream:
    """Text is final once no character is incomplete."""

    def __init__(
        self, tokens: ByteTokens, decoder: codecs.IncrementalDecoder, skipped: Iterable[int]
    ) -> None:
        self._tokens, self._decoder, self._skipped = tokens, decoder, frozenset(skipped)
        self._pending = ""

    def step(self, token_id: int) -> str | None:
        if token_id not in self._skipped:
            self._pending += self._decoder.decode(self._tokens.bytes_of(token_id))
        if self._decoder.getstate()[0]:
            return None
        text, self._pending = self._pending, ""
        return text
