"""The default tokenizer: Hugging Face's tokenizers library, for directories and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint import plugins
from hardpoint.builtin_plugins.loaders.files import read_text, refusing_damage
from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.plugins import (
    Annotated,
    ConfigError,
    EncodedPair,
    Meta,
    ModelError,
    RequestError,
    Tokenizer,
    TokenizerContext,
)
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.toolkit.hf_config import short

from .chat_template import ChatRenderer
from .folder import DEFAULT_TEMPLATE, TokenizerFiles, read_folder
from .gguf import build_gguf_tokenizer, special_tokens
from .segments import SegmentCache
from .stream import TokenTexts
from .vocabulary import num_token_ids, read_vocabulary

if TYPE_CHECKING:
    from hardpoint.plugins.text.tokenizer import DecodeStream


class TransformersTokenizer(Tokenizer):
    """Reads tokenizer.json or the metadata of a GGUF file, other formats through transformers."""

    contract = 1

    class Options(plugins.Options):
        """Chat templates, which are programs of the model's author, their limits, and a cache.

        Attributes:
            chat_template: path of a Jinja file that replaces the model's template.
            template_variables: variables that callers may set, by `chat_template_kwargs`.
            cache_bytes: memory for the token ids of the latest messages, so that the next turn of a
                conversation costs its new messages; 0 keeps none.
            template_seconds: time limit for rendering a conversation.
            template_characters: maximum length of a conversation's text.
        """

        chat_template: Annotated[str, Meta(min_length=1)] | None = None
        template_variables: tuple[str, ...] = (
            "enable_thinking",
            "thinking",
            "reasoning_effort",
            "documents",
            "date_string",
            "model_identity",
        )

        cache_bytes: Annotated[int, Meta(ge=0)] = 1 << 26
        template_seconds: Annotated[float, Meta(gt=0, le=3600)] = 2.0
        template_characters: Annotated[int, Meta(gt=0, le=1 << 28)] = 10_000_000

    def __init__(self, context: TokenizerContext) -> None:
        """Read the files.

        Raises:
            ModelError: they are missing, damaged or of an unknown kind.
        """
        super().__init__(context)
        path = context.files.path
        files = _read_gguf(path) if path.is_file() else read_folder(path)
        files.tokenizer.no_truncation()
        files.tokenizer.no_padding()
        self._tokenizer = files.tokenizer
        self._num_token_ids = num_token_ids(files.tokenizer)
        self._segments = SegmentCache(files.tokenizer, self.options.cache_bytes)
        self._texts = {
            skip: TokenTexts(files.tokenizer, skip_special_tokens=skip) for skip in (False, True)
        }
        self._templates = files.chat_templates
        if self.options.chat_template is not None:
            template = self._own_template(Path(self.options.chat_template))
            self._templates = {DEFAULT_TEMPLATE: template}
        self._chat = ChatRenderer(self.options.template_seconds, self.options.template_characters)
        self._special = files.special
        self._has_types = files.has_types
        bos = files.tokenizer.token_to_id(files.special.get("bos_token") or "")
        self._two_bos = [bos, bos]
        eos = files.special.get("eos_token")
        eos_id = None if eos is None else files.tokenizer.token_to_id(eos)
        self._eos = () if eos_id is None else (eos_id,)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, special and added ones included, and ids without a token."""
        return self._num_token_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The special and added tokens of the files."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of each token, as the files' decoder makes them.

        Added tokens that are not special are decoded as others are. If the result is no text, they
        have their own.

        Raises:
            NotImplementedError: the decoder has tokens without bytes of their own.
        """
        return read_vocabulary(self._tokenizer, self._num_token_ids)

    @property
    def chat_template(self) -> str | None:
        """The operator's template, or the model's default one."""
        return self._templates.get(DEFAULT_TEMPLATE)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The operator's template, or the templates of the model."""
        return self._templates

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The `eos_token` of the files, if they have one."""
        return self._eos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens in it are recognized.

        A text that begins with the `bos_token`, as chat templates write it, gets no second one.
        """
        if not add_special_tokens:
            return self._segments.encode(text)
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids[1:] if ids[:2] == self._two_bos else ids

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return the tokens of two texts, with the special tokens of a pair."""
        encoding = self._tokenizer.encode(first, second)
        texts, types = encoding.sequence_ids, encoding.type_ids
        start = types.index(1) if 1 in types and self._has_types else len(types)
        if self._has_types and types != [0] * start + [1] * (len(types) - start):
            raise RequestError(
                f"text_pair: expected token types 0 and then 1 of the tokenizer "
                f"{self.context.files.name!r}, got {short(types)}"
            )
        return EncodedPair(encoding.ids, _span(texts, 0), _span(texts, 1), start)

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation; `template` overrides the model's.

        Raises:
            RequestError: there is no template, the messages are malformed, or the template rejects
                them.
        """
        source = self._template_for(tools) if template is None else template
        if source is None:
            raise RequestError(
                f"messages: model {self.context.files.name!r} has no chat template; send a plain "
                f"prompt (hardpoint generate without --chat), or add chat_template.jinja to the "
                f"model's directory"
            )
        if tools and "tools" not in source:
            raise RequestError(
                f"tools: the chat template of {self.context.files.name!r} does not show the model "
                f"any tools: set another one (plugin.{self.name}.chat_template), or require a call "
                f'(tool_choice "required" or a named tool), which a grammar writes'
            )
        for name in variables or ():
            if name not in self.options.template_variables:
                allowed = ", ".join(self.options.template_variables) or "none"
                raise RequestError(
                    f"chat_template_kwargs.{name}: expected a variable that is allowed: {allowed} "
                    f"(the option template_variables of the tokenizer)"
                )
        all_variables = {
            **self._special,
            **(variables or {}),
            **({"tools": tools} if tools else {}),
        }
        if continue_final_message:
            messages = _with_end_mark(messages)
        text = self._chat.render(
            messages, source, add_generation_prompt=add_generation_prompt, variables=all_variables
        )
        return _up_to_end_mark(text) if continue_final_message else text

    def _template_for(self, tools: object) -> str | None:
        templates = self._templates
        return (templates.get(_WITH_TOOLS) if tools else None) or templates.get(DEFAULT_TEMPLATE)

    def _own_template(self, path: Path) -> str:
        """Return the template that the operator names.

        Raises:
            ConfigError: its file cannot be read.
        """
        try:
            return read_text(path)
        except ModelError as cause:
            raise ConfigError(f"plugin.{self.name}.chat_template: {cause}") from cause

    def close(self) -> None:
        """End the process that renders chat templates."""
        self._chat.close()


_WITH_TOOLS = "tool_use"
"""Name of the chat template of conversations with tools, where there is one."""

_END_MARK = "<the final message ends here>"


def _with_end_mark(messages: Any) -> Any:
    """Return messages with an end mark after the last one, of the assistant.

    Raises:
        RequestError: the last one is no text of the assistant.
    """
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        role = last.get("role") if isinstance(last, Mapping) else last
        raise RequestError(
            f'messages: continue_final_message needs a last message of the role "assistant", '
            f"got {role!r}"
        )
    if not isinstance(last.get("content"), str):
        raise RequestError(
            f"messages[{len(messages) - 1}].content: expected a string to continue, got "
            f"{last.get('content')!r}"
        )
    return [*messages[:-1], {**last, "content": last["content"] + _END_MARK}]


def _up_to_end_mark(text: str) -> str:
    """Return a conversation up to the end of its last message.

    Raises:
        RequestError: the template does not show it.
    """
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise RequestError(
            "messages: continue_final_message: the chat template does not show the last message "
            "as it is"
        )
    return before


def _span(texts: Sequence[int | None], text: int) -> range:
    if text not in texts:
        return _span(texts, text - 1)[:0] if text else range(0)
    start = texts.index(text)
    return range(start, start + texts.count(text))


def _read_gguf(path: Path) -> TokenizerFiles:
    if path.suffix != ".gguf":
        raise ModelError(f"{path.name}: expected a directory or a .gguf file with a tokenizer")
    file = open_gguf(path)
    with refusing_damage(f"{path.name}: its tokenizer"):
        tokenizer = build_gguf_tokenizer(file, path)
        key = "tokenizer.chat_template"
        named = {name: f"{key}.{name}" for name in file.strings(f"{key}s") or ()}
        templates = {
            name: text
            for name, key in {DEFAULT_TEMPLATE: key, **named}.items()
            if (text := file.scalar(key, str)) is not None
        }
        return TokenizerFiles(tokenizer, templates, special_tokens(file, tokenizer))
