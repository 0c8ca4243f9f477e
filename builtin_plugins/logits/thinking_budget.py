"""thinking_budget: limit the number of thinking tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

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
    ReasoningTracker,
    Rows,
    SparseLogitsProcessor,
)

if TYPE_CHECKING:
    from hardpoint.plugins.requests.markers import ReasoningPosition

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

    Without `start` and `end`, the request needs a reasoning parser. Tokens before the thinking
    block do not count; if the prompt ends inside one, its tokens after the start marker count.
    An end marker outside `allowed_token_ids` is rejected. An empty end marker forces nothing.
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
            markers: markers of `start` and `end`, or the reasoning parser's.
        """

        markers: ReasoningMarkers = ReasoningMarkers()

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
        if start or end:
            markers = ReasoningMarkers(
                start=(tuple(start),) if start else (), end=(tuple(end),) if end else ()
            )
        elif context.reasoning is None:
            raise ValueError(
                f"a budget of {arguments.thinking_token_budget} needs to know where thinking "
                f'starts and ends; set reasoning.parser ("think_tags", for example)'
            )
        else:
            markers = context.reasoning
        if context.params.structured is not None and markers != context.reasoning:
            raise ValueError(
                "expected no markers of its own together with `structured`: the structured answer "
                "begins after the markers of the reasoning parser"
            )
        for token in itertools.chain(*markers.start, *markers.end):
            if token >= context.vocab_size:
                raise ValueError(
                    f"expected markers of token ids under {context.vocab_size} (the vocabulary), "
                    f"got {token}"
                )
        for same in set(markers.start) & set(markers.end):
            raise ValueError(
                f"expected an end marker other than the start marker, got {list(same)}"
            )
        allowed = context.params.allowed_token_ids
        if allowed is not None and markers.end and not set(markers.end[0]) <= set(allowed):
            raise ValueError(
                f"its end marker {list(markers.end[0])} is not among allowed_token_ids {allowed}"
            )
        return cls.Prepared(**msgspec.structs.asdict(arguments), markers=markers)

    def start(self, request: LogitsRequest) -> ThinkingState | None:
        """Return the state after prompt and outputs; None if no token can ever be forced."""
        arguments = request.arguments[self.name]
        budget, markers = arguments.thinking_token_budget, arguments.markers
        if budget is None or not markers.end or not (markers.start or markers.begins_open):
            return None
        rules = _Rules(budget, ReasoningTracker(markers))
        state = _after_prompt(rules, request.prompt_token_ids)
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


@dataclass(frozen=True)
class _Rules:
    """The constants of a request's whole life."""

    budget: int
    tracker: ReasoningTracker


class ThinkingState(NamedTuple):
    """The state of a request; immutable.

    Attributes:
        rules: the same for a request's whole life.
        position: position among the markers that its tokens have led to.
        left: tokens left in the budget of this thinking block.
        forced: the token to force next; None if none.
    """

    rules: _Rules
    position: ReasoningPosition
    left: int
    forced: int | None


def _after(state: ThinkingState, token: int) -> ThinkingState:
    rules, before, left, _ = state
    position = rules.tracker.advance(before, token)
    if not position.inside:
        if position is before:
            return state
        left = rules.budget
    elif before.inside:  # a start marker inside thinking does not renew the budget
        left = max(left - 1, 0)
    return _state(rules, position, left)


def _after_prompt(rules: _Rules, prompt: Sequence[int]) -> ThinkingState:
    # A prompt may quote the markers, so a further start marker renews the budget here, unlike in
    # the output.
    since = rules.tracker.markers.thinking_since(prompt)
    spent = 0 if since is None else len(prompt) - since
    return _state(rules, rules.tracker.after(prompt), max(rules.budget - spent, 0))


def _state(rules: _Rules, position: ReasoningPosition, left: int) -> ThinkingState:
    force = position.inside and left == 0
    forced = rules.tracker.next_of_end(position) if force else None
    return ThinkingState(rules, position, left, forced)
