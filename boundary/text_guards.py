"""Guards of tokenizers and output parsers: what a plugin does wrong names it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from hardpoint import typed
from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import (
    HardpointError,
    OutputParser,
    OutputParserContext,
    ParserRequest,
    ReasoningMarkers,
    RequestError,
    Tokenizer,
)
from hardpoint.plugins.behaviour import TOKEN_IDS, Behaviour, UnusableError, behaviour_of
from hardpoint.plugins.component import Component
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.manifest import PluginEntry, Source
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputState,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.structured import Format, StructuralTag
from hardpoint.plugins.tokenizer import DecodeStream
from hardpoint.registry.blame import describe, raise_unless_fault, responsible
from hardpoint.registry.plugin_set import PluginSet

T = TypeVar("T")


class _Guard(Component):
    """Calls a component; whatever it raises or wrongly returns becomes an error that names it.

    Methods and attributes that the interface does not have are the component's own.
    """

    contract = 1
    _declared: ClassVar[dict[str, Behaviour | None]]

    def __init_subclass__(cls) -> None:
        cls._declared = {name: behaviour_of(cls, name) for name in dir(cls)}

    def __init__(self, component: Component, source: Source) -> None:
        super().__init__(component.context)
        self._component, self._source = component, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._component, name)

    def close(self) -> None:
        self._call("close", self._component.close)

    def fault(self, method: str, reason: str | BaseException) -> HardpointError:
        """Return the error for a method that failed."""
        source, name = self._source, self.name
        if isinstance(reason, UnusableError):
            cause = reason.__cause__
            reason = str(reason) if cause is None else f"{reason}: {describe(cause)}"
        elif isinstance(reason, BaseException):
            source, method = responsible(reason, source, method)
            name = name if source is self._source else source.name
            reason = f"failed: {describe(reason)}"
        fault = PluginFaultError(f"{source}: its {method} {reason}")
        fault.plugin = name
        return fault

    def _call(self, method: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return the result of a method, if it is as the contract declares."""
        behaviour = self._declared.get(method)
        try:
            result = call(*args, **options)
            if behaviour is not None and behaviour.returned is not None:
                result = behaviour.returned.check(result, args, args)
            return result
        except BaseException as cause:
            origin = cause.__cause__ if isinstance(cause, UnusableError) else cause
            if origin is not None:
                raise_unless_fault(origin)
            # A fault that names another plugin passes, as does what the contract allows.
            allowed = () if behaviour is None else behaviour.raises
            if isinstance(cause, (PluginFaultError, *allowed)):
                raise
            raise self.fault(method, cause) from origin

    def _ids(self, method: str, value: Any, limit: int) -> list[int]:
        """Return token ids as a new list of whole numbers, all of them in the vocabulary."""
        try:
            ids: list[int] = TOKEN_IDS.check(value, (), ())
        except UnusableError as wrong:
            if wrong.__cause__ is not None:
                raise_unless_fault(wrong.__cause__)
            raise self.fault(method, wrong) from wrong.__cause__
        return self._within(method, ids, limit)

    def _within(self, method: str, ids: list[int], limit: int) -> list[int]:
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
            PluginFaultError: one failed, or is not as the interface declares.
        """
        _ = self.eos_token_ids
        with contextlib.suppress(NotImplementedError):
            _ = self.vocab_size

    @property
    def vocab_size(self) -> int:
        """The number that the tokenizer reports.

        Raises:
            NotImplementedError: the tokenizer does not know it.
        """
        return self._call("vocab_size", lambda: self._tokenizer.vocab_size)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens, by their texts.

        Raises:
            PluginFaultError: the tokenizer failed.
        """
        tokens = self._call("special_tokens", lambda: dict(self._tokenizer.special_tokens))
        for text, token in tokens.items():
            if not isinstance(text, str) or type(token) is not int:
                wrong = f"returned {shown(text)}: {shown(token)}, expected a token id by its text"
                raise self.fault("special_tokens", wrong)
        # Files may have more tokens than the model.
        return {text: token for text, token in tokens.items() if 0 <= token < self._vocab_size}

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of each token that the model has.

        Raises:
            NotImplementedError: the tokenizer does not know it.
            PluginFaultError: the tokenizer failed.
        """
        found = self._call("vocabulary", self._tokenizer.vocabulary)
        tokens = found.tokens
        if not isinstance(tokens, tuple):
            wrong = f"returned tokens in a {type(tokens).__name__}, expected a tuple of bytes"
            raise self.fault("vocabulary", wrong)
        for token in tokens:
            if type(token) is not bytes:
                wrong = f"returned the token {shown(token)}, expected a tuple of bytes"
                raise self.fault("vocabulary", wrong)
        special = sorted(set(self._ids("vocabulary", found.special, len(tokens))))
        # Files may have more tokens than the model.
        limit = self._vocab_size
        return Vocabulary(
            tokens=tokens[:limit], special=tuple(token for token in special if token < limit)
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if there is one.

        Raises:
            PluginFaultError: the tokenizer failed.
        """
        return self._call("chat_template", lambda: self._tokenizer.chat_template)

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The end-of-sequence tokens."""
        ids = self._call("eos_token_ids", lambda: self._tokenizer.eos_token_ids)
        # A tokenizer may know more special tokens than the model.
        return self._within("eos_token_ids", list(ids), 1 << 31)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        encode = self._tokenizer.encode
        ids = self._call("encode", encode, text, add_special_tokens=add_special_tokens)
        return self._within("encode", ids, self._vocab_size)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        decode = self._tokenizer.decode
        return self._call("decode", decode, token_ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """Return the tokenizer's own decoder; the detokenizer reports its faults."""
        make = self._tokenizer.decode_stream
        return self._call(
            "decode_stream", make, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )

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
        """Return the prompt text for a conversation."""
        apply = self._tokenizer.apply_chat_template
        more = {
            "tools": tools,
            "continue_final_message": continue_final_message,
            "variables": variables,
        }
        return self._call(
            "apply_chat_template",
            apply,
            messages,
            add_generation_prompt=add_generation_prompt,
            template=template,
            **{name: value for name, value in more.items() if value},
        )


class GuardedOutputParser(_Guard, OutputParser):
    """An output parser plugin whose faults name it; it is asked once for its markers."""

    def __init__(self, parser: OutputParser, source: Source, vocab_size: int) -> None:
        """Wrap a parser for a model with so many token ids."""
        super().__init__(parser, source)
        self._parser, self._vocab_size = parser, vocab_size
        self._markers: ReasoningMarkers | None = None
        self._token_ids: frozenset[int] | None = None

    def markers(self) -> ReasoningMarkers:
        """Return the token ids that enclose reasoning.

        Raises:
            RequestError: the parser failed.
        """
        if self._markers is None:
            markers = self._refusing("markers", self._parser.markers)
            if not isinstance(markers, ReasoningMarkers):
                wrong = f"its markers returned {shown(markers)}, expected ReasoningMarkers"
                raise self._refused(wrong)
            self._markers = ReasoningMarkers(
                start=self._sequences(markers.start),
                end=self._sequences(markers.end),
                begins_open=bool(markers.begins_open),
                message_prefix=tuple(self._checked_ids("markers", markers.message_prefix)),
                content_prefix=tuple(self._checked_ids("markers", markers.content_prefix)),
            )
        return self._markers

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the format of an answer with calls of tools.

        Raises:
            RequestError: the parser gives no grammar, or none of these tools.
        """

        def call() -> Format | RequestError:
            try:
                return self._parser.call_format(tools, required=required, parallel=parallel)
            except (NotImplementedError, ValueError) as cause:  # meant for the caller
                return RequestError(f"tools: output parser {self.name!r}: {cause}")

        made = self._refusing("call_format", call)
        if isinstance(made, RequestError):
            raise made
        path = f"output parser {self.name!r}: its call_format"
        tag = typed.convert(
            StructuralTag(format=made), StructuralTag, path=path, error=RequestError
        )
        return tag.format

    @property
    def token_ids(self) -> frozenset[int]:
        """Special tokens that states take as ids.

        Raises:
            RequestError: the parser failed.
        """
        if self._token_ids is None:
            found = self._refusing("token_ids", lambda: self._parser.token_ids)
            self._token_ids = frozenset(self._checked_ids("token_ids", found))
        return self._token_ids

    def open(self, request: ParserRequest) -> OutputState:
        """Return the state of a new output.

        Raises:
            PluginFaultError: the parser failed.
        """
        state = self._call("open", self._parser.open, request)
        return self._call("open", GuardedOutputState, self, state)

    def _sequences(self, markers: Any) -> tuple[tuple[int, ...], ...]:
        try:
            sequences = list(markers)
        except TypeError:
            wrong = f"its markers returned {shown(markers)}, expected sequences of token ids"
            raise self._refused(wrong) from None
        return tuple(tuple(self._checked_ids("markers", ids)) for ids in sequences)

    def _checked_ids(self, method: str, ids: Any) -> list[int]:
        try:
            return self._ids(method, ids, self._vocab_size)
        except PluginFaultError as fault:
            raise self._refused(str(fault).removeprefix(f"{self._source}: ")) from fault

    def _refusing(self, method: str, call: Callable[[], T]) -> T:
        """Call a method on behalf of a request that is refused if it fails."""
        try:
            return call()
        except BaseException as cause:
            raise_unless_fault(cause)
            source, method = responsible(cause, self._source, method)
            name = self.name if source is self._source else source.name
            reason = f"its {method} failed: {describe(cause)}"
            raise RequestError(f"output parser {name!r}: {reason}") from cause

    def _refused(self, reason: str) -> RequestError:
        return RequestError(f"output parser {self.name!r}: {reason}")


_TEXTS = frozenset({ContentText, ReasoningText})


class GuardedOutputState:
    """The state of an output; what it raises, or gives and must not, names its parser."""

    def __init__(self, parser: GuardedOutputParser, state: OutputState) -> None:
        """Wrap the state of a parser."""
        self._parser, self._state = parser, state
        self._call = parser._call
        # Looked up once: they are called for each token.
        self._feed, self._feed_token, self._finish = state.feed, state.feed_token, state.finish
        self._in_call = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside reasoning."""
        return bool(self._call("in_reasoning", lambda: self._state.in_reasoning))

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take a piece of text."""
        return self._checked("feed", self._call("feed", self._feed, text))

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special token."""
        events = self._call("feed_token", self._feed_token, token_id, text)
        return self._checked("feed_token", events)

    def finish(self) -> Sequence[OutputEvent]:
        """End the output."""
        return self._checked("finish", self._call("finish", self._finish))

    def _checked(self, method: str, events: Sequence[OutputEvent]) -> Sequence[OutputEvent]:
        """Return events if they are some, in an order in which they may come."""
        if not isinstance(events, list | tuple):
            raise self._parser.fault(method, f"returned {shown(events)}, expected a list of events")
        for event in events:
            kind = type(event)
            is_text = kind in _TEXTS or (kind is ToolCallArguments and self._in_call)
            if not (is_text and type(event.text) is str):
                self._check(method, event)
        return events

    def _check(self, method: str, event: OutputEvent) -> None:
        """Check an event, and whether it begins or ends a call."""
        match event:
            case ToolCallBegin(str() as name, str() | None) if name and not self._in_call:
                self._in_call = True
            case ToolCallEnd() if self._in_call:
                self._in_call = False
            case MalformedText(str(), str()):
                self._in_call = False
            case _:
                where = "inside" if self._in_call else "outside of"
                raise self._parser.fault(
                    method, f"gave {shown(event)} {where} a call, expected other events"
                )


def open_parser(
    plugins: PluginSet,
    entry: PluginEntry,
    tokenizer: Tokenizer,
    vocab_size: int,
    arguments: typed.Arguments | None = None,
) -> GuardedOutputParser:
    """Return a new output parser.

    Args:
        plugins: plugins of the engine.
        entry: entry of the parser.
        tokenizer: tokenizer of its context.
        vocab_size: vocabulary size of the model.
        arguments: arguments of the request that it is for; None is the defaults.

    Raises:
        PluginLoadError: its constructor failed.
        ConfigError: the tokenizer lacks what its format needs.
    """
    parser: OutputParser = plugins.create(
        entry, OutputParserContext, tokenizer=tokenizer, arguments=arguments
    )
    return GuardedOutputParser(parser, entry.source, vocab_size)
