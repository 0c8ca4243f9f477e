"""A tokenizer with the methods of transformers' that programs for vLLM call."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.plugins import Tokenizer

_ENCODING = ("return_tensors", "padding", "truncation", "max_length")
"""Options of `apply_chat_template` for its token ids."""


class TokenizerLike:
    """An engine's tokenizer with the methods of one of transformers.

    Members that it has not come from `transformers.AutoTokenizer`, if the model is a folder.
    """

    def __init__(self, tokenizer: Tokenizer, path: str) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: tokenizer of the engine.
            path: path of the model's files.
        """
        self._tokenizer, self._path = tokenizer, path
        self._wrapped: Any = None
        self._set: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any
    ) -> Any:
        """Return the token ids and the attention mask of texts, as transformers does."""
        if options:
            return self._transformers()(text, add_special_tokens=add_special_tokens, **options)
        from transformers import BatchEncoding  # noqa: PLC0415

        texts = [text] if isinstance(text, str) else list(text)
        ids = [self.encode(item, add_special_tokens=add_special_tokens) for item in texts]
        masks = [[1] * len(row) for row in ids]
        if isinstance(text, str):
            return BatchEncoding({"input_ids": ids[0], "attention_mask": masks[0]})
        return BatchEncoding({"input_ids": ids, "attention_mask": masks})

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Return the token ids of a text."""
        if options:
            full = self._transformers()
            return list(full.encode(text, add_special_tokens=add_special_tokens, **options))
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of token ids."""
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        ids = [ids] if isinstance(ids, int) else [int(token) for token in ids]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, rows: Sequence[Any], skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        """Return the texts of rows of token ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def tokenize(self, text: str) -> list[str]:
        """Return the texts of the tokens of a text."""
        token_texts: list[str] = self.convert_ids_to_tokens(
            self.encode(text, add_special_tokens=False)
        )
        return token_texts

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the texts of tokens."""
        if isinstance(ids, int):
            return self._tokenizer.decode([ids], skip_special_tokens=False)
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the ids of the texts of tokens; None for unknown ones."""
        vocabulary = self.get_vocab()
        if isinstance(tokens, str):
            return vocabulary.get(tokens)
        return [vocabulary.get(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """Return the prompt of a conversation, or of each of several, as transformers does.

        Args:
            conversation: messages, or a list of conversations.
            tools: tools for the template.
            tokenize: whether the result is token ids, not text.
            return_dict: whether it has an attention mask, too.
            options: `add_generation_prompt`, `continue_final_message`, `chat_template`; those of
                `__call__` for tensors and padding; others are variables of the template.
        """
        encoding = {name: options.pop(name, None) for name in _ENCODING}
        encoding = {name: value for name, value in encoding.items() if value}
        is_several = bool(conversation) and not isinstance(conversation[0], Mapping)
        conversations = conversation if is_several else [conversation]
        texts = [self._prompt(messages, tools, **options) for messages in conversations]
        is_list = is_several or (tokenize and "return_tensors" in encoding)
        result = texts if is_list else texts[0]
        if not tokenize:
            return result
        encoded = self(result, add_special_tokens=False, **encoding)
        return encoded if return_dict else encoded["input_ids"]

    def _prompt(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        template = chat_template or self._tokenizer.chat_template or ""
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            template=chat_template,
            tools=tools,
            continue_final_message=continue_final_message,
            variables=used_variables(template, variables) or None,
        )

    @functools.cache  # noqa: B019 - a tokenizer lives as long as its engine
    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by the texts of the tokens; special tokens by their own."""
        texts = self.convert_ids_to_tokens(range(self._tokenizer.vocab_size))
        return {text: token for token, text in enumerate(texts)} | dict(
            self._tokenizer.special_tokens
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.vocab_size

    @property
    def chat_template(self) -> str | None:
        """The model's chat template."""
        return self._tokenizer.chat_template

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return next(iter(self._tokenizer.eos_token_ids), None)

    @property
    def eos_token(self) -> str | None:
        """Its text."""
        token = self.eos_token_id
        return None if token is None else self._tokenizer.decode([token], skip_special_tokens=False)

    @property
    def bos_token_id(self) -> int | None:
        """The special token that begins a text; None if none does."""
        first = self._tokenizer.encode("a", add_special_tokens=True)[:1]
        return first[0] if first and first[0] in self.all_special_ids else None

    @property
    def bos_token(self) -> str | None:
        """Its text."""
        token = self.bos_token_id
        return None if token is None else self._tokenizer.decode([token], skip_special_tokens=False)

    @property
    def name_or_path(self) -> str:
        """The model."""
        return self._path

    @property
    def pad_token_id(self) -> int | None:
        """The token that pads batches of `__call__`: by default, the one that ends a text."""
        return self._set.get("pad_token_id", self.eos_token_id)

    @property
    def pad_token(self) -> str | None:
        """Its text."""
        return self._set.get("pad_token", self.eos_token)

    @property
    def tokenizer(self) -> TokenizerLike:
        """Itself: vLLM V0 has tokenizers in groups."""
        return self

    def get_lora_tokenizer(self, lora_request: Any = None) -> TokenizerLike:
        """Return itself: adapters have no tokenizers of their own."""
        del lora_request
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option of transformers' tokenizer, such as `padding_side`."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        self._set[name] = value
        if self._wrapped is not None:
            setattr(self._wrapped, name, value)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens."""
        return sorted(self._tokenizer.special_tokens.values())

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens."""
        return list(self._tokenizer.special_tokens)

    @property
    def is_fast(self) -> bool:
        """True."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._set[name] if name in self._set else getattr(self._transformers(), name)

    def _transformers(self) -> Any:
        """Return the tokenizer of transformers.

        Raises:
            AttributeError: the model has no files for one.
        """
        if self._wrapped is None:
            context = getattr(self._tokenizer, "context", None)
            path = Path(self._path) if context is None else context.files.path
            if not path.is_dir() and path.suffix != ".gguf":
                raise AttributeError(
                    f"the tokenizer of {self._path!r} has no files for transformers; the engine's "
                    f"own has encode, decode and apply_chat_template"
                )
            from transformers import AutoTokenizer  # noqa: PLC0415

            name, file = pretrained_source(path)
            self._wrapped = AutoTokenizer.from_pretrained(name, **file)
            for name, value in {"pad_token": self.pad_token, **self._set}.items():
                setattr(self._wrapped, name, value)
        return self._wrapped


def pretrained_source(path: Path) -> tuple[str, dict[str, str]]:
    """Return the arguments of `from_pretrained` for a folder, a GGUF file or a model's id."""
    if path.suffix == ".gguf" and not path.is_dir():
        return str(path.parent), {"gguf_file": path.name}
    return str(path), {}


def used_variables(template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a chat template names; transformers ignores others, too."""
    identifiers = set(re.findall(r"\w+", template))
    return {name: value for name, value in variables.items() if name in identifiers}
