"""The answer in a request's output: where it begins, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hardpoint.plugins import ReasoningMarkers, ReasoningTracker, Request
from hardpoint.plugins.requests import SchedulerOutput
from hardpoint.toolkit.bitmasks import allow_tokens

if TYPE_CHECKING:
    from hardpoint.plugins.requests.markers import ReasoningPosition
    from hardpoint.plugins.text.grammars import GrammarState


class _AnswerText:
    """A grammar's state, and how many tokens have advanced it."""

    def __init__(self, compiled: GrammarState) -> None:
        self.state = compiled.fork()
        self.num_advanced = 0

    def advance(self, token: int) -> bool:
        allowed = self.state.advance(token)
        self.num_advanced += allowed
        return allowed

    def return_to(self, num_advanced: int) -> None:
        if (count := self.num_advanced - num_advanced) > 0:
            self.state.rollback(count)
            self.num_advanced = num_advanced


class _At(NamedTuple):
    """Where an output is.

    Attributes:
        position: among the markers of reasoning.
        starts: the rest of each marker that may begin reasoning here.
        prefix: tokens that are left before the text of the answer; None where it has not begun.
        text: text of the answer, with `num_advanced` tokens here.
    """

    position: ReasoningPosition
    starts: tuple[tuple[int, ...], ...]
    prefix: tuple[int, ...] | None
    text: _AnswerText
    num_advanced: int


class ConstrainedAnswer:
    """The answer in the output of one request: after the reasoning, its grammar constrains it.

    Reasoning may begin where the output does. The prefix of the markers comes before the answer.

    Attributes:
        request: owner of the output.
        structured: constraint on the answer.
        num_followed: output tokens that were taken.
    """

    def __init__(
        self,
        request: Request,
        compiled: GrammarState,
        vocab_size: int,
        describe_fault: Callable[[BaseException], str],
    ) -> None:
        """Begin after the prompt.

        Args:
            compiled: its grammar's state before the first token.
            vocab_size: vocabulary size of the model.
            describe_fault: see `EngineHalfContext`.
        """
        self._describe_fault = describe_fault
        # Bits of a row's last number that stand for tokens; 0 is all.
        self._last_bits = np.int32((1 << vocab_size % 32) - 1)
        source = request.source
        assert source.params.structured is not None
        self.structured = source.params.structured
        self.request, self._compiled = request, compiled
        # A tokenizer may end texts with tokens that the model does not have: it can sample none.
        eos, stops = source.eos_token_ids, source.params.stop_token_ids
        self._ends = _within(vocab_size, eos) or _within(vocab_size, stops)
        markers = source.reasoning_markers or ReasoningMarkers()
        self._tracker = ReasoningTracker(markers)
        self._prefix = markers.message_prefix + markers.content_prefix
        prompt = source.known_prompt_ids
        position = self._tracker.after(prompt)
        starts: tuple[tuple[int, ...], ...] = ()
        prefix = None
        if not position.inside:
            starts = tuple(filter(None, markers.start))
            prefix = self._prefix[_overlap(prompt, self._prefix) :]
        self._at = _At(position, starts, prefix, _AnswerText(compiled), 0)
        self.num_followed = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is one of the reasoning."""
        return self._at.position.inside

    def fill(self, rows: np.ndarray, drafts: Sequence[int] = ()) -> None:
        """Set the bits of the tokens that may come next, and after each draft.

        Args:
            rows: int32 [1 + drafts, columns], all zero. Rows after a draft that the grammar forbids
                allow everything, because no token is chosen there. The row after a draft with which
                the grammar cannot go on allows nothing: a request that takes this token gets none
                after it, and the next call raises the error.
            drafts: tokens after the output so far.

        Raises:
            ValueError: the grammar forbids the output, or allows no token after it.
        """
        self.follow()
        before = self._at
        self._fill(rows[0])
        try:
            for index, token in enumerate(drafts, 1):
                if (
                    token == SchedulerOutput.NO_DRAFT
                    or not _is_allowed(rows[index - 1], token)
                    or token in self._ends  # the output ends there
                ):
                    rows[index:] = -1
                    break
                try:
                    if self.advance(token):
                        self._fill(rows[index])
                except BaseException as cause:
                    self._describe_fault(cause)  # raises if it is no fault
                    rows[index] = 0
        finally:
            self._return_to(before)

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of the first drafts the answer may go on with.

        None of them ends the output: where that is allowed, it needs no draft.

        Raises:
            ValueError: the grammar forbids the output.
        """
        self.follow()
        before, count = self._at, 0
        try:
            for token in drafts:
                if token in self._ends or not self.advance(token):
                    break
                count += 1
        except BaseException as cause:  # it is raised again if the request takes this token
            self._describe_fault(cause)  # raises if it is no fault
        finally:
            self._return_to(before)
        return count

    def follow(self) -> None:
        """Accept the new tokens of the output; stop before a token that cannot be accepted.

        Raises:
            ValueError: the grammar forbids one.
        """
        outputs = self.request.output_token_ids
        while self.num_followed < len(outputs):
            token, number = outputs[self.num_followed], self.num_followed + 1
            if not self.advance(token):
                raise ValueError(
                    f"it does not allow the token {token}, the output's number {number}"
                )
            self.num_followed = number

    def advance(self, token: int) -> bool:
        """Follow one more token; return False if the grammar does not allow it.

        Raises:
            ValueError: the grammar cannot go on.
        """
        position, starts, prefix, text, count = self._at
        if position.inside:
            if token in self._tracker.markers.calls:
                return False
            position = self._tracker.advance(position, token)
            if not position.inside:
                prefix = self._prefix
            self._at = _At(position, (), prefix, text, count)
            return True
        if starts:
            position = self._tracker.advance(position, token)
            if position.inside:
                # The answer begins again after the reasoning.
                self._at = _At(position, (), None, _AnswerText(self._compiled), 0)
                return True
            starts = tuple(rest for marker in starts if marker[0] == token and (rest := marker[1:]))
        if prefix:
            prefix = prefix[1:] if prefix[0] == token else None
        elif prefix is not None:
            if text.advance(token):
                count += 1
            else:
                prefix = None
        if prefix is None and not starts:
            return token in self._ends
        self._at = _At(position, starts, prefix, text, count)
        return True

    def _fill(self, row: np.ndarray) -> None:
        at = self._at
        if at.position.inside:
            row[:] = -1
            # A grammar's answer begins behind an end marker: it may be no call, or only some.
            _forbid(row, (*self._ends, *self._tracker.markers.calls))
            return
        if at.prefix == ():
            can_end = at.text.state.fill_bitmask(row)
            if self._last_bits:
                row[-1] &= self._last_bits
            (allow_tokens if can_end else _forbid)(row, self._ends)
        elif at.prefix:
            allow_tokens(row, at.prefix[:1])
        if at.starts:
            allow_tokens(row, [marker[0] for marker in at.starts if self._begins(marker)])
        if not np.count_nonzero(row):  # quicker than any()
            raise ValueError("it allows no token after the output so far")

    def _begins(self, rest: tuple[int, ...]) -> bool:
        """Return whether the rest of a start marker leads to reasoning.

        It does not where a longer end marker, which the prompt began, ends with it.
        """
        position = self._at.position
        for token in rest:
            position = self._tracker.advance(position, token)
        return position.inside

    def _return_to(self, before: _At) -> None:
        """Undo tokens, because drafts are not accepted yet."""
        before.text.return_to(before.num_advanced)
        self._at = before


def _overlap(prompt: Sequence[int], prefix: Sequence[int]) -> int:
    longest = min(len(prompt), len(prefix))
    ends = (n for n in range(longest, 0, -1) if tuple(prompt[-n:]) == tuple(prefix[:n]))
    return next(ends, 0)


def _within(vocab_size: int, tokens: Iterable[int]) -> tuple[int, ...]:
    return tuple(token for token in tokens if 0 <= token < vocab_size)


def _forbid(row: np.ndarray, tokens: Iterable[int]) -> None:
    bits = row.view(np.uint32)
    for token in tokens:
        bits[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF


def _is_allowed(row: np.ndarray, token: int) -> bool:
    return bool(row.view(np.uint32)[token // 32] >> token % 32 & 1)
