"""Incremental detokenising and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import RequestOutputKind, SamplingParams, Tokenizer


class Detokenizer:
    """Turns one request's tokens into text as they come.

    The cost of a token does not grow with the text: pieces are joined on output, and stop strings
    are searched for at the end only.

    Attributes:
        stop_string: the stop string that was found, if one was.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """The prompt's end decides how the first token reads."""
        self._tokenizer = tokenizer
        self._skip = params.skip_special_tokens
        self._stream = tokenizer.decode_stream(prompt_token_ids, skip_special_tokens=self._skip)
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._delta = params.output_kind is RequestOutputKind.DELTA
        longest = max(map(len, self._stops), default=0)
        self._lookback = max(longest - 1, 0)  # characters that a stop string may begin in
        self._pieces: list[str] = []  # not yet output; all of the text, unless outputs are deltas
        self._tail = ""
        self._pending: list[int] = []  # tokens without text so far
        self.stop_string: str | None = None

    def update(self, token_ids: Sequence[int], *, ended_by_token: bool) -> int | None:
        """Decode new tokens.

        Args:
            token_ids: in order.
            ended_by_token: the last one is a stop token; its text is left out unless
                `include_stop_str_in_output`.

        Returns:
            The number of tokens up to the stop string that was found, None if none was found.
        """
        if ended_by_token and not self._keep_stop:
            token_ids = token_ids[:-1]
        step, pending = self._stream.step, self._pending
        for count, token in enumerate(token_ids, start=1):
            if piece := step(token):
                if pending:
                    pending.clear()
                self._pieces.append(piece)
                if self._stops and self._find_stop(piece):
                    return count
            else:
                pending.append(token)
        return None

    def finish(self) -> None:
        """Add the text of tokens that never became whole characters."""
        if self._pending and self.stop_string is None:
            piece = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip)
            self._pending.clear()
            self._pieces.append(piece)
            if self._stops:
                self._find_stop(piece)

    def resume(self, prompt_token_ids: Sequence[int]) -> None:
        """Continue after a further part of the prompt; its end decides how a token reads."""
        self._stream = self._tokenizer.decode_stream(
            prompt_token_ids, skip_special_tokens=self._skip
        )
        self._pending.clear()
        self._tail = ""
        self.stop_string = None

    def pop_text(self, *, finished: bool) -> str:
        """Return the text that no stop string can cut any more.

        All of it, or, where outputs are deltas, the part that was not returned before.
        """
        pieces = self._pieces
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        held = ""
        if self._lookback and not (finished or self._keep_stop):
            held = text[-self._lookback :]
        if self._delta:
            self._pieces = [held] if held else []
        elif len(pieces) > 1:
            self._pieces = [text]
        return text[: len(text) - len(held)] if held else text

    def _find_stop(self, piece: str) -> bool:
        """Look for the first stop string that ends in the newest piece; cut there."""
        window = self._tail + piece
        found = [(place, stop) for stop in self._stops if (place := window.find(stop)) >= 0]
        if not found:
            self._tail = window[-self._lookback :] if self._lookback else ""
            return False
        place, self.stop_string = min(found)
        if self._keep_stop:
            place += len(self.stop_string)
        text = "".join(self._pieces)
        self._pieces = [text[: len(text) - (len(window) - place)]]
        return True
