"""Incremental detokenising and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import SamplingParams, Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turns one request's tokens into text as they come.

    Attributes:
        text: everything that is certain so far.
        stop_string: the stop string that was found, if one was.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """The prompt's end decides how the first token reads."""
        self._tokenizer = tokenizer
        self._params = params
        self._stream = tokenizer.decode_stream(
            prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = params.stop_strings
        self._longest_stop = max(map(len, self._stops), default=0)
        self._pending: list[int] = []
        self._begin = 0
        self.text = ""
        self.stop_string: str | None = None

    def update(self, token_ids: Sequence[int], *, ended_by_token: bool) -> int | None:
        """Take new tokens.

        Args:
            token_ids: in order.
            ended_by_token: the last one is a stop token; its text is left out unless
                `include_stop_str_in_output`.

        Returns:
            How many of the tokens were taken if a stop string was found in the last of them,
            else None.
        """
        keep = self._params.include_stop_str_in_output
        visible = token_ids if keep or not ended_by_token else token_ids[:-1]
        for count, token in enumerate(visible, start=1):
            before = len(self.text)
            self._pending.append(token)
            if piece := self._stream.step(token):
                self._pending.clear()
                self.text += piece
                if self._stops and self._find_stop(before):
                    return count
        return None

    def finish(self) -> None:
        """Bring out the text of tokens that never became whole characters."""
        if self._pending and self.stop_string is None:
            before = len(self.text)
            self.text += self._tokenizer.decode(
                self._pending, skip_special_tokens=self._params.skip_special_tokens
            )
            self._pending.clear()
            if self._stops:
                self._find_stop(before)

    def resume(self, prompt_token_ids: Sequence[int]) -> None:
        """Take it that more of the prompt follows what there is; its end counts as at the start."""
        self._stream = self._tokenizer.decode_stream(
            prompt_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )
        self._pending.clear()
        self._begin = len(self.text)
        self.stop_string = None

    def certain_length(self, *, finished: bool) -> int:
        """Return how much of `text` no stop string can take back any more."""
        if finished or self._longest_stop <= 1 or self._params.include_stop_str_in_output:
            return len(self.text)
        return max(0, len(self.text) - self._longest_stop + 1)

    def _find_stop(self, before: int) -> bool:
        """Look for the first stop string that ends in the text after `before`; cut there."""
        start = max(self._begin, before - self._longest_stop + 1)
        found = [
            (place, stop) for stop in self._stops if (place := self.text.find(stop, start)) >= 0
        ]
        if not found:
            return False
        place, self.stop_string = min(found)
        if self._params.include_stop_str_in_output:
            place += len(self.stop_string)
        self.text = self.text[:place]
        return True
