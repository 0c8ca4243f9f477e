"""Tokenizers and output parsers, guarded: results fit the model, and events their order."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from hardpoint.errors import shown
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import Finish, OutputParser, ReasoningMarkers, Tokenizer
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.behaviour import UnusableError, within
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config.model_files import ModelFiles
from hardpoint.plugins.grammars import Vocabulary
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
from hardpoint.plugins.text.output_parser import EVENTS
from hardpoint.plugins.text.tokenizer import TokenizerContext

from .activity import PluginCalls
from .guard import UNWATCHED, Boundary, boundary_of, guard


def open_tokenizer(
    plugins: PluginSet, entry: PluginEntry, files: ModelFiles, vocab_size: int
) -> Tokenizer:
    """Return a new tokenizer with checked properties.

    Raises:
        PluginLoadError: its constructor failed.
        PluginFaultError: a property failed, or does not fit the interface.
    """
    tokenizer: Tokenizer = plugins.create(entry, TokenizerContext, files=files)
    guarded = guarded_tokenizer(tokenizer, entry.source, vocab_size)
    _ = guarded.eos_token_ids
    with contextlib.suppress(NotImplementedError):
        _ = guarded.vocab_size
    return guarded


def guarded_tokenizer(tokenizer: Tokenizer, source: Source, vocab_size: int) -> Tokenizer:
    """Return a tokenizer for a model with so many token ids; its faults name it."""

    def known(tokens: dict[str, int]) -> dict[str, int]:  # files may have more than the model
        return {text: token for text, token in tokens.items() if 0 <= token < vocab_size}

    def cut(vocabulary: Vocabulary) -> Vocabulary:
        special = tuple(token for token in vocabulary.special if token < vocab_size)
        return Vocabulary(tokens=vocabulary.tokens[:vocab_size], special=special)

    return guard(
        tokenizer,
        "tokenizers",
        calls=PluginCalls(UNWATCHED, "tokenizers", source),
        uses={
            "encode": partial(within, limit=vocab_size),
            "encode_pair": lambda pair: pair.within(vocab_size),
            "special_tokens": known,
            "vocabulary": cut,
        },
    )


def guarded_parser(
    parser: OutputParser, kind: str, source: Source, vocab_size: int
) -> OutputParser:
    """Return a parser of a kind for a model with so many token ids; its faults name it."""

    def fitting(markers: ReasoningMarkers) -> ReasoningMarkers:
        sequences = (*markers.start, *markers.end, markers.message_prefix, markers.content_prefix)
        for ids in sequences:
            within(ids, vocab_size)
        return markers

    guarded = guard(
        parser,
        kind,
        calls=PluginCalls(UNWATCHED, kind, source),
        uses={
            "markers": fitting,
            "token_ids": partial(within, limit=vocab_size),
            "open": lambda state: GuardedOutputState(
                boundary_of(guarded), state, may_end=parser.ends_requests
            ),
        },
    )
    return guarded


_TEXTS = frozenset({ContentText, ReasoningText})


class GuardedOutputState:
    """The state of an output; its exceptions and wrong results name its parser.

    Written by hand, since it is called for each token.
    """

    def __init__(self, boundary: Boundary, state: OutputState, *, may_end: bool = False) -> None:
        self._boundary, self._state = boundary, state
        self._feed, self._feed_token, self._finish = state.feed, state.feed_token, state.finish
        self._in_call = False
        self._may_end, self._name = may_end, boundary.calls.source.name

    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside reasoning."""
        try:
            return bool(self._state.in_reasoning)
        except BaseException as cause:
            self._boundary.end("in_reasoning", cause)

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take a piece of text."""
        try:
            return self._checked(self._feed(text))
        except BaseException as cause:
            self._boundary.end("feed", cause)

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special token."""
        try:
            return self._checked(self._feed_token(token_id, text))
        except BaseException as cause:
            self._boundary.end("feed_token", cause)

    def finish(self) -> Sequence[OutputEvent]:
        """End the output."""
        try:
            return self._checked(self._finish())
        except BaseException as cause:
            self._boundary.end("finish", cause)

    def _checked(self, events: Sequence[OutputEvent]) -> Sequence[OutputEvent]:
        checked: Sequence[Any] = EVENTS.check(events, (), ())
        for event in checked:
            kind = type(event)
            is_text = kind in _TEXTS or (kind is ToolCallArguments and self._in_call)
            if not (is_text and type(event.text) is str):
                self._check(event)
        if not self._may_end:
            return checked
        return [event.of(self._name) if type(event) is Finish else event for event in checked]

    def _check(self, event: OutputEvent) -> None:
        match event:
            case ToolCallBegin(str() as name, str() | None) if name and not self._in_call:
                self._in_call = True
            case ToolCallEnd() if self._in_call:
                self._in_call = False
            case MalformedText(str(), str()):
                self._in_call = False
            case Finish() if self._may_end and event.num_tokens is None:
                pass
            case _:
                where = "inside" if self._in_call else "outside of"
                raise UnusableError(f"gave {shown(event)} {where} a call, expected other events")
