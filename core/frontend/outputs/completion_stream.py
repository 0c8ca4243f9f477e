"""One completion's way from tokens to the text, reasoning and calls that outputs show."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.host.boundary.guard import boundary_of
from hardpoint.host.boundary.parts.output_formats import BoundReader
from hardpoint.plugins import (
    CompletionOutput,
    DecodeStream,
    Finish,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component.behaviour import PIECE


class CompletionStream:
    """Turns one completion's tokens into its outputs as they come.

    Tokens pass four stages; each may hold back the latest part, until the completion ends:

    1. decode: `push` makes whole characters of tokens.
    2. stop: `push` ends the text at a stop string; `pop` keeps the end in which one may begin.
    3. interval: `waits` for as many tokens as `engine.stream_interval` wants.
    4. read: `pop` gives the output to the readers of step parts; a parser keeps what may become a
       marker.

    The cost of a token does not grow with the text: pieces are joined on output, and stop strings
    are searched for at the end only.

    Args:
        decoder: a stream of the tokenizer; None leaves the texts empty.
        interval: outputs between the first and the last wait for so many new tokens.

    Attributes:
        token_ids: token ids of the completion so far; for deltas, the new ones.
        num_shown: how many token ids the outputs so far have.
        stop_string: the stop string that was found, if one was.
        finished_by: the end of the request by a reader, if there is one.
        readers: complete the outputs; without them, these have the text alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: DecodeStream | None,
        params: SamplingParams,
        *,
        index: int = 0,
        interval: int = 1,
        readers: Sequence[BoundReader] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.num_shown = 0
        self.stop_string: str | None = None
        self.finished_by: Finish | None = None
        self._index = index
        self._delta = params.output_kind is RequestOutputKind.DELTA
        # decode
        self._tokenizer, self._decoder = tokenizer, decoder
        self._skip = params.skip_special_tokens
        self._pending: list[int] | None = None  # tokens without text so far
        self._pieces: list[str] = []  # not yet output; of deltas, else all of the text
        # stop, read
        self._stops, self.readers = params.stop_strings, readers
        self._special = frozenset[int]().union(*(reader.special for reader in readers))
        self._ending = [reader for reader in readers if reader.may_end]
        self._is_watched = bool(self._special or self._stops or self._ending)
        self._length = self._num_decoded = 0  # text and tokens so far, if it is watched
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        longest = max(map(len, self._stops), default=0)
        self._lookback = max(longest - 1, 0)  # characters that a stop string may begin in
        self._tail, self._num_read = "", 0  # read: characters of the pieces
        # interval
        self._interval, self._has_shown = interval, False

    @property
    def has_calls(self) -> bool:
        """Whether a reader has found a complete call of a tool."""
        return any(reader.has_calls for reader in self.readers)

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return len(self.token_ids) + (self.num_shown if self._delta else 0)

    def push(
        self, token_ids: list[int], finish_reason: FinishReason | None, *, is_shown: bool = False
    ) -> list[int]:
        """Take new tokens.

        Args:
            token_ids: in order.
            finish_reason: why the engine ended the completion, if it did. The text of a stop token
                is left out unless `include_stop_str_in_output`.
            is_shown: whether the text of the last token is shown in any case.

        Returns:
            The tokens up to the one that completes a stop string: all, if none was found. The first
            `min_tokens` tokens complete none.

        Raises:
            PluginFaultError: the tokenizer failed.
        """
        if self._decoder is not None:
            has_text = is_shown or finish_reason is not FinishReason.STOP or self._keep_stop
            decoded = token_ids if has_text else token_ids[:-1]
            if not self._is_watched:
                if piece := self.decode(decoded):
                    self._pieces.append(piece)
            else:
                token_ids = self._watch(token_ids, len(decoded))
            if finish_reason is not None and self.stop_string is None:
                self.finish()
        self.token_ids += token_ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that tokens add, which the caller shows.

        Raises:
            PluginFaultError: the tokenizer failed; the text of the tokens before is kept.
        """
        assert self._decoder is not None
        text, step = "", self._decoder.step
        for token in token_ids:
            try:
                piece = step(token)
                if type(piece) is not str and piece is not None:
                    PIECE.check(piece, (), ())
            except BaseException as cause:
                self._pieces.append(text)
                boundary_of(self._tokenizer).end("step", cause)
            if piece:
                text += piece
                self._pending = None
            elif self._pending is None:
                self._pending = [token]
            else:
                self._pending.append(token)
        return text

    def _watch(self, token_ids: list[int], num_decoded: int) -> list[int]:
        """Decode the first of some tokens one by one, and note the special ones.

        Returns:
            The tokens up to a stop string; all without one.
        """
        for index, token in enumerate(token_ids):
            piece = self.decode((token,)) if index < num_decoded else ""
            self._num_decoded += 1
            if token in self._special:
                for reader in self.readers:
                    if token in reader.special:
                        reader.mark(token, piece, self._length + len(piece))
            if piece:
                self._length += len(piece)
                self._pieces.append(piece)
                if self._stops and self._find_stop(piece, self._num_decoded):
                    return token_ids[: index + 1]
                if self._ending and self._is_ended():
                    return token_ids[: index + 1]
        return token_ids

    def _is_ended(self) -> bool:
        """Let readers read new text in which no stop string may begin; return whether one ends."""
        text = "".join(self._pieces)
        end = len(text) - (len(self._tail) if self._stops and not self._keep_stop else 0)
        new, self._num_read = text[self._num_read : end], max(end, self._num_read)
        ends = [reader.read(new) for reader in self._ending] if new else []
        if (finish := next(filter(None, ends), None)) is not None:
            self.finished_by, self._pieces = finish, [text[:end]]
        return finish is not None

    def _find_stop(self, piece: str, num_tokens: int) -> bool:
        """Look for the stop string that is completed first in the newest piece; cut there.

        Of several that end at the same character, the first one given counts.
        """
        window, first_end = self._tail + piece, len(self._tail) + 1
        first: tuple[int, str] | None = None
        if num_tokens > self._min_tokens:
            for stop in self._stops:
                place = window.find(stop, max(first_end - len(stop), 0))
                if place >= 0 and (first is None or place + len(stop) < first[0]):
                    first = place + len(stop), stop
        if first is None:
            self._tail = window[-self._lookback :] if self._lookback else ""
            return False
        end, self.stop_string = first
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
        num_new = self.num_tokens - self.num_shown
        if self._interval > 1 and self._has_shown and num_new < self._interval:
            return True
        return self._delta and not num_new

    def pop(self, *, finished: bool) -> CompletionOutput:
        """Return the output so far, or the new part of it for deltas.

        Raises:
            PluginFaultError: a reader failed; without it, the next output has the same text.
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
            token_ids=self.token_ids[:],
            content=text or None,
        )
        for reader in self.readers:
            reader.complete(shown, finished=finished)
        self._has_shown = True
        self.num_shown = len(self.token_ids) + (self.num_shown if self._delta else 0)
        if self._delta:
            self._num_read = max(self._num_read - len(text), 0)
            self._pieces = [held] if held else []
            self.token_ids = []
        elif len(pieces) > 1:
            self._pieces = [whole]
        return shown
