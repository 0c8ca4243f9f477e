"""The default tokenizer: Hugging Face's tokenizers library, for directories and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.plugins import (
    DecodeStream,
    ModelError,
    RequestError,
    Tokenizer,
    TokenizerContext,
)

from .chat_template import render_chat
from .gguf import build_gguf_tokenizer, special_tokens
from .stream import TokenTexts

_TEMPLATE_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class _Files:
    """The content of a tokenizer's files."""

    tokenizer: FastTokenizer
    chat_template: str | None
    special: dict[str, str] = field(default_factory=dict)


class TransformersTokenizer(Tokenizer):
    """Reads tokenizer.json or the metadata of a GGUF file, other formats through transformers."""

    contract = 1

    def __init__(self, context: TokenizerContext) -> None:
        """Read the files.

        Raises:
            ModelError: they are missing, damaged or of an unknown kind.
        """
        super().__init__(context)
        path = context.files.path
        files = _read_gguf(path) if path.is_file() else _read_directory(path)
        files.tokenizer.no_truncation()
        files.tokenizer.no_padding()
        self._tokenizer = files.tokenizer
        self._texts = {
            skip: TokenTexts(files.tokenizer, skip_special_tokens=skip) for skip in (False, True)
        }
        self._chat_template = files.chat_template
        self._special = files.special
        eos = files.special.get("eos_token")
        eos_id = None if eos is None else files.tokenizer.token_to_id(eos)
        self._eos = () if eos_id is None else (eos_id,)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, special and added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The `eos_token` of the files, if they have one."""
        return self._eos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens in it are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; incomplete characters become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """Return a decode stream for the output after the prompt."""
        return self._texts[skip_special_tokens].stream(prompt_token_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
    ) -> str:
        """Return the prompt text of a conversation; `template` overrides the model's.

        Raises:
            RequestError: there is no template, the messages are malformed, or the template rejects
                them.
        """
        source = self._chat_template if template is None else template
        if source is None:
            raise RequestError(
                f"messages: model {self.context.files.name!r} has no chat template; send a plain "
                f"prompt, or give a template"
            )
        return render_chat(
            messages, source, add_generation_prompt=add_generation_prompt, variables=self._special
        )


def _read_gguf(path: Path) -> _Files:
    if path.suffix != ".gguf":
        raise ModelError(f"{path.name}: expected a directory or a .gguf file with a tokenizer")
    file = open_gguf(path)
    return _Files(
        build_gguf_tokenizer(file, path),
        file.value("tokenizer.chat_template"),
        special_tokens(file),
    )


def _read_directory(path: Path) -> _Files:
    if not path.is_dir():
        raise ModelError(f"tokenizer: {path} is neither a file nor a directory")
    config = _read_json(path / "tokenizer_config.json")
    jinja = path / "chat_template.jinja"
    template = jinja.read_text(encoding="utf-8") if jinja.exists() else _template(config)
    special = {
        name: _content(config[name]) for name in _TEMPLATE_VARIABLES if config.get(name) is not None
    }
    return _Files(_fast_tokenizer(path), template, special)


def _fast_tokenizer(path: Path) -> FastTokenizer:
    file = path / "tokenizer.json"
    if file.exists():
        try:
            return FastTokenizer.from_file(str(file))
        except Exception as cause:  # the library raises nothing narrower
            raise ModelError(f"{path.name}/{file.name} is not readable: {cause}") from cause
    # Imported on use: importing transformers takes seconds, and most directories do not need it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except Exception as cause:  # damaged files can make it raise anything
        raise ModelError(
            f"{path.name}: it has no tokenizer.json, and transformers cannot read its "
            f"tokenizer: {cause}"
        ) from cause
    if not tokenizer.is_fast:
        raise ModelError(
            f"{path.name}: it has no tokenizer.json, and {type(tokenizer).__name__} has no fast "
            f"form that could give one"
        )
    fast: FastTokenizer = tokenizer.backend_tokenizer
    return fast


def _template(config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a tokenizer_config.json: a string, or the one named default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> str:
    """Return the text of a token, which is a string or an object with `content`."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelError(f"{path.parent.name}/{path.name} is not valid JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise ModelError(f"{path.parent.name}/{path.name}: expected an object")
    return value
