"""thinking_budget: limit the number of thinking tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from hardpoint import plugins
from hardpoint.plugins import (
    Edits,
    LogitsRequest,
    Meta,
    Op,
    Phase,
    PrepareContext,
    ReasoningMarkers,
    Rows,
    SparseLogitsProcessor,
)

TokenId = Annotated[int, Meta(ge=0)]

# So far above every other logit that the probability is exactly 1 in float32; infinity would make
# the softmax NaN.
_CERTAIN = 1e9


class ThinkingBudget(SparseLogitsProcessor):
    """Forces the end marker once a thinking block has used up its budget.

    As "budget forcing" (Muennighoff et al., arXiv:2501.19393) and vLLM's thinking_token_budget do.
    The marker is forced one token at a time, continuing one that the model has begun. When it is
    complete, the budget is renewed for a further block.

    A forced token overrides all other processors, masks included.
    """

    contract = 1
    phase = Phase.FORCE
    params_fields = ("thinking_token_budget",)

    class Arguments(plugins.Arguments):
        """The budget, and the markers around a thinking block.

        Attributes:
            thinking_token_budget: limit of tokens of a thinking block; None is no limit.
            start: token ids of the start marker; the reasoning parser's if neither marker is
                given.
            end: token ids of the end marker.
        """

        thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
        start: list[TokenId] = []
        end: list[TokenId] = []

    class Prepared(Arguments):
        """The arguments, and the markers to look for.

        Attributes:
            opening: `start`, or the reasoning parser's start marker.
            closing: `end`, or the reasoning parser's end marker.
        """

        opening: list[TokenId] = []
        closing: list[TokenId] = []

    @classmethod
    def prepare(cls, arguments: Arguments, context: PrepareContext) -> Prepared:
        """Add the reasoning parser's markers where the request has none.

        Raises:
            ValueError: there is no reasoning parser, the markers are outside the vocabulary
                or equal, or the request does not allow the end marker.
        """
        if arguments.thinking_token_budget is None:
            return cls.Prepared(**msgspec.structs.asdict(arguments))
        start, end = arguments.start, arguments.end
        if not start and not end:
            if context.reasoning is None:
                raise ValueError(
                    f"a budget of {arguments.thinking_token_budget} needs to know where thinking "
                    f'starts and ends; set reasoning.parser ("think_tags", for example)'
                )
            markers = context.reasoning.markers()
            start, end = list(markers.start), list(markers.end)
        for token in (*start, *end):
            if token >= context.vocab_size:
                raise ValueError(
                    f"expected markers of token ids under {context.vocab_size} (the vocabulary), "
                    f"got {token}"
                )
        if start and start == end:
            raise ValueError(f"expected an end marker other than the start marker, got {end}")
        allowed = context.params.allowed_token_ids
        if allowed is not None and not set(end) <= set(allowed):
            raise ValueError(f"its end marker {end} is not among allowed_token_ids {allowed}")
        given = msgspec.structs.asdict(arguments)
        return cls.Prepared(**given, opening=start, closing=end)

    def start(self, request: LogitsRequest) -> ThinkingState | None:
        """Return the state after prompt and outputs; None if no token can ever be forced."""
        arguments = request.arguments[self.name]
        budget = arguments.thinking_token_budget
        if budget is None or not arguments.opening or not arguments.closing:
            return None
        state = _after_prompt(
            _Rules(budget, _marker(arguments.opening), _marker(arguments.closing)),
            request.prompt_token_ids,
        )
        for token in request.output_token_ids:
            state = _after(state, token)
        return state

    def advance(self, state: ThinkingState | None, token: int) -> ThinkingState | None:
        """Return the state after one more token."""
        return None if state is None else _after(state, token)

    def fork(self, state: ThinkingState | None) -> ThinkingState | None:
        """Return the state itself: it never changes."""
        return state

    def edits(self, rows: Rows) -> Edits | None:
        """Force the next token of the end marker where the budget is used up."""
        forced = [
            (row, state.forced)
            for row, state in enumerate(rows.states())
            if state is not None and state.forced is not None
        ]
        if not forced:
            return None
        row, token = zip(*forced, strict=True)
        return Edits(row, token, (_CERTAIN,) * len(row), Op.SET)


@dataclass(frozen=True, slots=True)
class _Marker:
    """Finds a marker in a stream of tokens (Knuth, Morris and Pratt, 1977).

    Attributes:
        tokens: the marker, never empty.
        steps: transitions; `steps[matched][token]` is the number of matched tokens after `token`,
            0 where it has no entry.
        border: number of matched tokens of a next marker right after a whole one.
    """

    tokens: tuple[int, ...]
    steps: tuple[dict[int, int], ...]
    border: int

    def __len__(self) -> int:
        return len(self.tokens)


def _marker(tokens: Sequence[int]) -> _Marker:
    steps: list[dict[int, int]] = []
    border = 0
    for length, token in enumerate(tokens):
        back = steps[border] if length else {}
        steps.append({**back, token: length + 1})
        border = back.get(token, 0)
    return _Marker(tuple(tokens), tuple(steps), border)


class _Rules(NamedTuple):
    budget: int
    start: _Marker
    end: _Marker


class ThinkingState(NamedTuple):
    """The state of a request; immutable.

    Attributes:
        rules: the same for a request's whole life.
        left: tokens left in the budget of this thinking block; None outside of one.
        started: matched tokens of the start marker.
        ended: matched tokens of the end marker.
        forced: the token to force next; None if none.
    """

    rules: _Rules
    left: int | None
    started: int
    ended: int
    forced: int | None


def _after(state: ThinkingState, token: int) -> ThinkingState:
    """Return the state after one more output token."""
    rules, left, started, ended, _ = state
    start, end = rules.start, rules.end
    started = start.steps[started].get(token, 0)
    ended = end.steps[ended].get(token, 0)
    if left is None and started == state.started and ended == state.ended:
        return state
    if (
        left is not None and left > 1 and not started and not ended
    ):  # the common case while thinking
        return ThinkingState(rules, left - 1, 0, 0, None)
    opens, closes = started == len(start), ended == len(end)
    if opens:
        started = start.border
    if closes:
        ended = end.border
    if opens and closes:  # one marker ends with the other: the longer one counts
        opens = len(start) > len(end)
        closes = not opens
    if closes:
        left = None
    elif left is not None:  # a start marker inside thinking does not renew the budget
        left = max(left - 1, 0)
    elif opens:
        left = rules.budget
    return _state(rules, left, started, ended)


def _after_prompt(rules: _Rules, prompt: Sequence[int]) -> ThinkingState:
    """Return the state after the prompt, in which the last marker decides."""
    # A prompt may quote the markers, so a further start marker renews the budget here, unlike in
    # the output.
    start, end = rules.start, rules.end
    thinking_start = ReasoningMarkers(start.tokens, end.tokens).thinking_since(prompt)
    left = None
    if thinking_start is not None:
        left = max(rules.budget - (len(prompt) - thinking_start), 0)
    return _state(rules, left, _num_matched(start, prompt), _num_matched(end, prompt))


def _state(rules: _Rules, left: int | None, started: int, ended: int) -> ThinkingState:
    return ThinkingState(
        rules, left, started, ended, rules.end.tokens[ended] if left == 0 else None
    )


def _num_matched(marker: _Marker, tokens: Sequence[int]) -> int:
    """Return how many tokens of an incomplete marker are matched at the end of `tokens`."""
    matched = 0
    for token in tokens[max(len(tokens) - len(marker) + 1, 0) :]:
        matched = marker.steps[matched].get(token, 0)
    return matched
