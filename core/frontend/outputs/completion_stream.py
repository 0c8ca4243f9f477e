"""One completion's way from tokens to the text, reasoning and calls that outputs show."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from hardpoint.boundary.guard import boundary_of
from hardpoint.plugins import (
    CompletionOutput,
    DecodeStream,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.behaviour import PIECE
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
from hardpoint.plugins.requests import ToolCall

_NO_TOKENS: Mapping[int, str] = MappingProxyType({})


class _Mark(NamedTuple):
    """A special token in a text."""

    token_id: int
    start: int
    end: int


class CompletionStream:
    """Turns one completion's tokens into its outputs as they come.

    Tokens pass four stages; each may hold back what came last, until the completion ends:

    1. decode: `push` makes whole characters of tokens.
    2. stop: `push` ends the text at a stop string; `pop` keeps the end in which one may begin.
    3. interval: `waits` for as many tokens as `engine.stream_interval` wants.
    4. parse: `pop` gives the text to the parser, which keeps what may become a marker.

    The cost of a token does not grow with the text: pieces are joined on output, and stop strings
    are searched for at the end only.

    Attributes:
        token_ids: token ids of the completion so far.
        num_shown: how many of them the outputs so far have.
        stop_string: the stop string that was found, if one was.
        parts: what the parser has found; None without one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: DecodeStream | None,
        params: SamplingParams,
        *,
        index: int = 0,
        interval: int = 1,
    ) -> None:
        """Start with nothing.

        Args:
            decoder: a stream of the tokenizer; None leaves the texts empty.
            index: index of the completion.
            interval: outputs between the first and the last wait for so many new tokens.
        """
        self.token_ids: list[int] = []
        self.num_shown = 0
        self.stop_string: str | None = None
        self.parts: Parts | None = None
        self._index = index
        self._delta = params.output_kind is RequestOutputKind.DELTA
        # decode
        self._tokenizer, self._decoder = tokenizer, decoder
        self._skip = params.skip_special_tokens
        self._pending: list[int] | None = None  # tokens without text so far
        self._length = 0  # of the text so far
        self._pieces: list[str] = []  # not yet output; of deltas, else all of the text
        # stop
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._num_decoded, self._min_tokens = 0, params.min_tokens
        longest = max(map(len, self._stops), default=0)
        self._lookback = max(longest - 1, 0)  # characters that a stop string may begin in
        self._tail = ""
        # interval
        self._interval, self._has_shown = interval, False
        # parse
        self._parser: OutputState | None = None
        self._special = _NO_TOKENS  # texts of the special tokens that the parser takes, by id
        self._marks: list[_Mark] = []  # where in the text they are; those not parsed yet
        self._num_parsed = 0  # characters
        self._is_parsed = False

    def parse(self, parser: OutputState, special: Mapping[int, str], *, parallel: bool) -> None:
        """Parse the text that comes; after a further part of the prompt, by another state.

        Args:
            special: texts of the special tokens that the parser takes, by id.
            parallel: whether there may be several calls; if not, those after the first complete one
                are left out.
        """
        self._parser, self._special, self._is_parsed = parser, special, False
        if self.parts is None:
            self.parts = Parts(delta=self._delta, parallel=parallel)

    def drop_parser(self) -> None:
        """Parse no more, and forget what was found: the text is kept."""
        self._parser = self.parts = None

    def resume(self, decoder: DecodeStream | None) -> None:
        """Continue after a further part of the prompt, by another stream of the tokenizer."""
        self._decoder = decoder
        self._pending = None
        self._tail = ""
        self.stop_string = None

    def push(self, token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
        """Take new tokens.

        Args:
            token_ids: in order.
            finish_reason: why the engine ended the completion, if it did. The text of a stop token
                is left out unless `include_stop_str_in_output`.

        Returns:
            The tokens up to the one that completes a stop string: all, if none was found. The first
            `min_tokens` tokens complete none.

        Raises:
            PluginFaultError: the tokenizer failed.
        """
        if self._decoder is not None:
            taken = self._decode(token_ids, finish_reason is FinishReason.STOP)
            if taken is not None:
                token_ids = token_ids[:taken]
            elif finish_reason is not None:
                self.finish()
        self.token_ids += token_ids
        return token_ids

    def _decode(self, token_ids: Sequence[int], ended_by_token: bool) -> int | None:
        """Decode tokens; return the number of those up to a stop string, None without one."""
        assert self._decoder is not None
        before = self._num_decoded
        self._num_decoded += len(token_ids)
        ending = token_ids[-1:] if ended_by_token and not self._keep_stop else ()
        token_ids = token_ids[: len(token_ids) - len(ending)]
        step = self._decoder.step
        for count, token in enumerate(token_ids, start=1):
            try:
                piece = step(token)
                if piece is not None and type(piece) is not str:
                    PIECE.check(piece, (), ())
            except BaseException as cause:
                boundary_of(self._tokenizer).end("step", cause)
            if token in self._special:
                self._mark(token, piece or "")
            if piece:
                self._length += len(piece)
                self._pending = None
                self._pieces.append(piece)
                if self._stops and self._find_stop(piece, before + count):
                    return count
            elif self._pending is None:
                self._pending = [token]
            else:
                self._pending.append(token)
        for token in ending:
            if token in self._special:
                self._mark(token, "")
        return None

    def _mark(self, token: int, piece: str) -> None:
        """Note where a special token is; a piece may end with its text."""
        end = self._length + len(piece)
        shown = piece.endswith(self._special[token])
        self._marks.append(_Mark(token, end - len(self._special[token]) if shown else end, end))

    def _find_stop(self, piece: str, num_tokens: int) -> bool:
        """Look for the stop string that is completed first in the newest piece; cut there.

        Of several that end at the same character, the first one given counts.
        """
        window, first_end = self._tail + piece, len(self._tail) + 1
        found: tuple[int, str] | None = None
        if num_tokens > self._min_tokens:
            for stop in self._stops:
                place = window.find(stop, max(first_end - len(stop), 0))
                if place >= 0 and (found is None or place + len(stop) < found[0]):
                    found = place + len(stop), stop
        if found is None:
            self._tail = window[-self._lookback :] if self._lookback else ""
            return False
        end, self.stop_string = found
        if not self._keep_stop:
            end -= len(self.stop_string)
        text = "".join(self._pieces)
        self._pieces = [text[: len(text) - (len(window) - end)]]
        return True

    def finish(self) -> None:
        """Add the text of tokens that never became whole characters.

        Raises:
            PluginFaultError: the tokenizer failed.
        """
        if self._pending and self.stop_string is None:
            piece = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip)
            self._pending = None
            self._pieces.append(piece)
            if self._stops:
                self._find_stop(piece, self._num_decoded)

    def waits(self) -> bool:
        """Return whether the next output of a running completion waits for more tokens."""
        num_new = len(self.token_ids) - self.num_shown
        if self._interval > 1 and self._has_shown and num_new < self._interval:
            return True
        return self._delta and not num_new

    def pop(self, *, finished: bool) -> CompletionOutput:
        """Return the output so far, or of deltas what is new.

        Raises:
            PluginFaultError: the parser failed; without it, the next output has the same text.
        """
        pieces = self._pieces
        text = whole = pieces[0] if len(pieces) == 1 else "".join(pieces)
        held = ""
        if self._lookback and not (finished or self._keep_stop):
            held = whole[-self._lookback :]
            text = whole[: len(whole) - len(held)]
        shown = CompletionOutput(
            index=self._index,
            text=text,
            token_ids=self.token_ids[self.num_shown if self._delta else 0 :],
            content=text or None,
        )
        if self.parts is not None:
            self._parse(text, finished=finished)
            shown.reasoning, shown.content, shown.tool_calls = self.parts.pop()
            if finished:
                shown.warning = self.parts.warning
        if self._delta:
            self._pieces = [held] if held else []
        elif len(pieces) > 1:
            self._pieces = [whole]
        self.num_shown, self._has_shown = len(self.token_ids), True
        return shown

    def _parse(self, text: str, *, finished: bool) -> None:
        """Parse the text so far, or of deltas what is new, with the special tokens in it."""
        if self._is_parsed:
            return
        assert self._parser is not None
        assert self.parts is not None
        first = self._num_parsed if self._delta else 0  # where `text` begins
        self._is_parsed = finished
        at, end = self._num_parsed, first + len(text)
        count = 0
        for mark in self._marks:
            if mark.end > end and not (finished and mark.start <= end):
                break
            count += 1
            start = max(mark.start, at)
            if before := text[at - first : start - first]:
                self.parts.add(self._parser.feed(before))
            own = text[start - first : mark.end - first]
            self.parts.add(self._parser.feed_token(mark.token_id, own))
            at = start + len(own)
        del self._marks[:count]
        if rest := text[at - first :]:
            self.parts.add(self._parser.feed(rest))
        self._num_parsed = end
        if finished:
            if self._parser.in_reasoning:
                self.parts.warning = "the output ended inside the reasoning"
            self.parts.add(self._parser.finish())
            self.parts.finish()


@dataclass
class _Call:
    """A call so far, and whether an output has shown it."""

    index: int
    id: str
    name: str
    content_before: int
    arguments: list[str] = field(default_factory=list)
    shown: bool = False


_OF_CALLS = (ToolCallBegin, ToolCallArguments, ToolCallEnd, MalformedText)


class Parts:
    """Reasoning, content and tool calls of one completion, as its outputs show them.

    White space next to a call is no content, and where content begins it waits for the rest of it:
    a call may follow.

    Attributes:
        warning: what is wrong with the output, if anything is.
        has_calls: whether there is a complete tool call.
    """

    def __init__(self, *, delta: bool, parallel: bool = True) -> None:
        """Start with nothing.

        Args:
            delta: whether each output has only what is new.
            parallel: whether there may be several calls; if not, those after the first complete one
                are left out.
        """
        self._delta, self._parallel = delta, parallel
        self._in_extra_call = False
        self._void: list[int] = []  # indexes of calls that were output and then broke
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._space = ""  # that waits
        self._in_content = False
        self._calls: list[_Call] = []
        self._num_calls = 0
        self._in_call = self.has_calls = False
        self.warning: str | None = None

    def add(self, events: Iterable[OutputEvent]) -> None:
        """Take what the parser has found, in order."""
        for event in itertools.filterfalse(self._is_left_out, events):
            match event:
                case ContentText(text):
                    self._add_content(text)
                case ReasoningText(text):
                    self._in_content = False
                    self._reasoning.append(text)
                case ToolCallArguments(text):
                    self._calls[-1].arguments.append(text)
                case ToolCallBegin(name, call_id):
                    call_id = call_id or f"call_{secrets.token_hex(12)}"
                    place = sum(map(len, self._content))
                    self._calls.append(_Call(self._num_calls, call_id, name, place))
                    self._num_calls += 1
                    self._in_call, self._in_content, self._space = True, False, ""
                case MalformedText(text, reason):
                    if self._in_call:
                        self._void_call()
                    self._add_content(text)
                    self.warning = reason
                    if self._void:  # a stream cannot take back what it has shown
                        void = ", ".join(map(str, self._void))
                        self.warning += f"; void are the calls begun with index {void}"
                case ToolCallEnd():
                    self.has_calls, self._in_call = True, False

    def finish(self) -> None:
        """End the completion: white space that is no part of anything is content without calls."""
        if self._space and not self.has_calls:
            self._content.append(self._space)
        self._space = ""

    def _add_content(self, text: str) -> None:
        if self._in_content:
            self._content.append(text)
            return
        self._space += text
        if self._space and not self._space.isspace():
            self._content.append(self._space)
            self._space, self._in_content = "", True

    def _is_left_out(self, event: OutputEvent) -> bool:
        """Return whether an event belongs to a call after the only one that there may be."""
        if isinstance(event, ToolCallBegin):
            self._in_extra_call = self.has_calls and not self._parallel
        if not self._in_extra_call or not isinstance(event, _OF_CALLS):
            return False
        self._in_extra_call = not isinstance(event, ToolCallEnd | MalformedText)
        return True

    def _void_call(self) -> None:
        """Drop the open call, whose text is content; a part that was output stays so."""
        self._in_call = False
        call = self._calls.pop()
        if call.shown:
            self._void.append(call.index)
        else:
            self._num_calls -= 1

    def pop(self) -> tuple[str | None, str | None, list[ToolCall] | None]:
        """Return reasoning, content and tool calls: all of them, or what is new; None if absent."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        calls = [shown for call in self._calls if (shown := self._part_of(call))]
        if self._delta:
            self._reasoning, self._content = [], []
            self._calls = self._calls[-1:] if self._in_call else []
            for call in self._calls:
                call.content_before = 0
        return reasoning or None, content or None, calls or None

    def _part_of(self, call: _Call) -> ToolCall | None:
        arguments = "".join(call.arguments)
        first = not (self._delta and call.shown)
        if not first and not arguments:
            return None
        if self._delta:
            call.arguments, call.shown = [], True
        return ToolCall(
            index=call.index,
            id=call.id if first else None,
            name=call.name if first else None,
            arguments=arguments,
            content_before=call.content_before,
        )
