"""Incremental detokenising and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from hardpoint.boundary.guard import boundary_of
from hardpoint.plugins import DecodeStream, RequestOutputKind, SamplingParams, Tokenizer
from hardpoint.plugins.behaviour import PIECE

NO_TOKENS: Mapping[int, str] = MappingProxyType({})


class Mark(NamedTuple):
    """A special token in a text."""

    token_id: int
    start: int
    end: int


class Detokenizer:
    """Turns one request's tokens into text as they come.

    The cost of a token does not grow with the text: pieces are joined on output, and stop strings
    are searched for at the end only.

    Attributes:
        stop_string: the stop string that was found, if one was.
        special: texts of the special tokens that a parser takes, by id.
        marks: where in the text these tokens are; their own text is from `start` up to `end`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stream: DecodeStream,
        params: SamplingParams,
    ) -> None:
        """Decode by a stream of the tokenizer."""
        self.special = NO_TOKENS
        self.marks: list[Mark] = []
        self._length = 0  # of the text so far
        self._tokenizer = tokenizer
        self._stream = stream
        self._skip = params.skip_special_tokens
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._num_tokens, self._min_tokens = 0, params.min_tokens
        longest = max(map(len, self._stops), default=0)
        self._lookback = max(longest - 1, 0)  # characters that a stop string may begin in
        self._pieces: list[str] | None = None  # not yet output; of deltas, else all of the text
        self._tail = ""
        self._pending: list[int] | None = None  # tokens without text so far
        self.stop_string: str | None = None

    def update(self, token_ids: Sequence[int], *, ended_by_token: bool) -> int | None:
        """Decode new tokens.

        Args:
            token_ids: in order.
            ended_by_token: the last one is a stop token; its text is left out unless
                `include_stop_str_in_output`.

        Returns:
            The number of tokens up to the stop string that was found, None if none was found. The
            first `min_tokens` tokens complete none.

        Raises:
            PluginFaultError: the tokenizer failed.
        """
        before = self._num_tokens
        self._num_tokens += len(token_ids)
        ending = token_ids[-1:] if ended_by_token and not self._keep_stop else ()
        token_ids = token_ids[: len(token_ids) - len(ending)]
        step = self._stream.step
        for count, token in enumerate(token_ids, start=1):
            try:
                piece = step(token)
                if piece is not None and type(piece) is not str:
                    PIECE.check(piece, (), ())
            except BaseException as cause:
                boundary_of(self._tokenizer).end("step", cause)
            if token in self.special:
                self._mark(token, piece or "")
            if piece:
                self._length += len(piece)
                self._pending = None
                if self._pieces is None:
                    self._pieces = [piece]
                else:
                    self._pieces.append(piece)
                if self._stops and self._find_stop(piece, before + count):
                    return count
            elif self._pending is None:
                self._pending = [token]
            else:
                self._pending.append(token)
        self._mark_ending(ending)
        return None

    def _mark_ending(self, ending: Sequence[int]) -> None:
        """Note a stop token whose text is left out."""
        for token in ending:
            if token in self.special:
                self._mark(token, "")

    def _mark(self, token: int, piece: str) -> None:
        """Note where a special token is; a piece may end with its text."""
        end = self._length + len(piece)
        shown = piece.endswith(self.special[token])
        self.marks.append(Mark(token, end - len(self.special[token]) if shown else end, end))

    def finish(self) -> None:
        """Add the text of tokens that never became whole characters."""
        if self._pending and self.stop_string is None:
            piece = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip)
            self._pending = None
            self._pieces = [*(self._pieces or ()), piece]
            if self._stops:
                self._find_stop(piece, self._num_tokens)

    def resume(self, stream: DecodeStream) -> None:
        """Continue after a further part of the prompt, by another stream."""
        self._stream = stream
        self._pending = None
        self._tail = ""
        self.stop_string = None

    def restore(self, text: str) -> None:
        """Take back text that was popped and not output."""
        if self._delta and text:
            self._pieces = [text, *(self._pieces or ())]

    def pop_text(self, *, finished: bool) -> str:
        """Return the text that no stop string can cut any more.

        All of it, or, where outputs are deltas, the part that was not returned before.
        """
        pieces = self._pieces
        if pieces is None:
            return ""
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        held = ""
        if self._lookback and not (finished or self._keep_stop):
            held = text[-self._lookback :]
        if self._delta:
            self._pieces = [held] if held else None
        elif len(pieces) > 1:
            self._pieces = [text]
        return text[: len(text) - len(held)] if held else text

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
        text = "".join(self._pieces or ())
        self._pieces = [text[: len(text) - (len(window) - end)]]
        return True
