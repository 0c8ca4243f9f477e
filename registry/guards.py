"""Guards of tokenizers and reasoning parsers: what a plugin does wrong names it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hardpoint.plugins import (
    HardpointError,
    ReasoningContext,
    ReasoningMarkers,
    ReasoningParser,
    RequestError,
    Tokenizer,
    typed,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.errors import PluginFaultError, shown
from hardpoint.plugins.manifest import PluginEntry, Source
from hardpoint.plugins.tokenizer import DecodeStream

from .blame import describe, raise_unless_fault, responsible
from .plugin_set import PluginSet

T = TypeVar("T")

_MAY_REFUSE = frozenset({"encode", "apply_chat_template"})
"""Methods whose RequestError is for the caller; a RequestError of another method is a fault."""


class _Guard(Component):
    """Calls a component; whatever it raises or wrongly returns becomes an error that names it.

    Methods and attributes that the interface does not have are the component's own.
    """

    contract = 1

    def __init__(self, component: Component, source: Source) -> None:
        super().__init__(component.context)
        self._component, self._source = component, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._component, name)

    def close(self) -> None:
        self._call("close", self._component.close)

    def fault(self, method: str, reason: str | BaseException) -> HardpointError:
        """Return the error for a method that failed."""
        source = self._source
        if isinstance(reason, BaseException):
            source, method = responsible(reason, source, method)
            reason = f"failed: {describe(reason)}"
        return PluginFaultError(f"{source}: its {method} {reason}")

    def _call(self, method: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        try:
            return call(*args, **options)
        except BaseException as cause:
            raise_unless_fault(cause)
            # A fault that names another plugin passes, as does the refusal of a request.
            if isinstance(cause, PluginFaultError) or (
                isinstance(cause, RequestError) and method in _MAY_REFUSE
            ):
                raise
            raise self.fault(method, cause) from cause

    def _text(self, method: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.fault(method, f"returned {shown(value)}, expected text")
        return value

    def _ids(self, method: str, value: Any, limit: int) -> list[int]:
        """Return token ids as a new list of whole numbers, all of them in the vocabulary."""
        try:
            ids = list(value)
            if set(map(type, ids)) != {int}:
                ids = [int(operator.index(token)) for token in ids]
        except BaseException as cause:
            raise_unless_fault(cause)
            returned = f"returned {shown(value)}, expected token ids: {describe(cause)}"
            raise self.fault(method, returned) from cause
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            wrong = next(token for token in ids if not 0 <= token < limit)
            raise self.fault(
                method, f"returned {shown(wrong)}, expected token ids from 0 to {limit - 1}"
            )
        return ids


class GuardedTokenizer(_Guard, Tokenizer):
    """A tokenizer plugin whose faults name it."""

    def __init__(self, tokenizer: Tokenizer, source: Source, vocab_size: int) -> None:
        """Wrap a tokenizer of a model with so many token ids."""
        super().__init__(tokenizer, source)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def check(self) -> None:
        """Check the properties, which an engine reads once.

        Raises:
            PluginFaultError: one failed, or is not what the interface says.
        """
        _ = self.eos_token_ids
        with contextlib.suppress(NotImplementedError):
            _ = self.vocab_size

    @property
    def vocab_size(self) -> int:
        """The number that the tokenizer says.

        Raises:
            NotImplementedError: the tokenizer does not say.
        """
        try:
            size = self._tokenizer.vocab_size
        except NotImplementedError:
            raise
        except BaseException as cause:
            raise_unless_fault(cause)
            raise self.fault("vocab_size", cause) from cause
        if type(size) is not int or size < 1:
            raise self.fault("vocab_size", f"returned {shown(size)}, expected a number of tokens")
        return size

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The end-of-sequence tokens."""
        ids = self._call("eos_token_ids", lambda: self._tokenizer.eos_token_ids)
        # A tokenizer may know more special tokens than the model.
        return self._ids("eos_token_ids", ids, 1 << 31)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        encode = self._tokenizer.encode
        ids = self._call("encode", encode, text, add_special_tokens=add_special_tokens)
        return self._ids("encode", ids, self._vocab_size)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        decode = self._tokenizer.decode
        text = self._call("decode", decode, token_ids, skip_special_tokens=skip_special_tokens)
        return self._text("decode", text)

    def decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """Return the tokenizer's own decoder; the detokenizer reports its faults."""
        make = self._tokenizer.decode_stream
        stream = self._call(
            "decode_stream", make, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        if not callable(self._call("decode_stream", getattr, stream, "step", None)):
            raise self.fault("decode_stream", f"returned {shown(stream)}, which has no step()")
        return stream

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
    ) -> str:
        """Return the prompt text for a conversation."""
        apply = self._tokenizer.apply_chat_template
        text = self._call(
            "apply_chat_template",
            apply,
            messages,
            add_generation_prompt=add_generation_prompt,
            template=template,
        )
        return self._text("apply_chat_template", text)


class GuardedReasoningParser(_Guard, ReasoningParser):
    """A reasoning parser plugin whose faults name it; it is asked once for its markers."""

    def __init__(self, parser: ReasoningParser, source: Source, vocab_size: int) -> None:
        """Wrap a parser for a model with so many token ids."""
        super().__init__(parser, source)
        self._parser, self._vocab_size = parser, vocab_size
        self._markers: ReasoningMarkers | None = None

    def markers(self) -> ReasoningMarkers:
        """Return the token ids that enclose the reasoning.

        Raises:
            RequestError: the parser failed.
        """
        if self._markers is None:
            markers = self._call("markers", self._parser.markers)
            if not isinstance(markers, ReasoningMarkers):
                wrong = f"returned {shown(markers)}, expected ReasoningMarkers"
                raise self.fault("markers", wrong)
            start, end = (
                self._ids("markers", ids, self._vocab_size) for ids in (markers.start, markers.end)
            )
            self._markers = ReasoningMarkers(tuple(start), tuple(end))
        return self._markers

    def split(self, text: str) -> tuple[str | None, str]:
        """Return a whole output as (reasoning, content).

        Raises:
            NotImplementedError: the parser does not split text.
            RequestError: the parser failed.
        """
        try:
            parts = self._parser.split(text)
        except NotImplementedError:
            raise
        except BaseException as cause:
            raise_unless_fault(cause)
            raise self.fault("split", cause) from cause
        match parts:
            case (str() | None as reasoning, str() as content):
                return reasoning, content
        raise self.fault("split", f"returned {shown(parts)}, expected (text or None, text)")

    def fault(self, method: str, reason: str | BaseException) -> HardpointError:
        """Return the error of the request for which a method failed."""
        name = self.name
        if isinstance(reason, BaseException):
            source, method = responsible(reason, self._source, method)
            name = name if source is self._source else source.name
            reason = f"failed: {describe(reason)}"
        return RequestError(f"reasoning parser {name!r}: its {method} {reason}")


def open_parser(
    plugins: PluginSet,
    entry: PluginEntry,
    tokenizer: Tokenizer,
    vocab_size: int,
    arguments: typed.Arguments | None = None,
) -> GuardedReasoningParser:
    """Return a new reasoning parser.

    Args:
        plugins: of the engine.
        entry: of the parser.
        tokenizer: of its context.
        vocab_size: of the model.
        arguments: of the request that it is for; None is the defaults.

    Raises:
        PluginLoadError: its constructor failed.
    """
    parser: ReasoningParser = plugins.create(
        entry, ReasoningContext, tokenizer=tokenizer, arguments=arguments
    )
    return GuardedReasoningParser(parser, entry.source, vocab_size)
