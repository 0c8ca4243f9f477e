"""DRY ("don't repeat yourself") for Hardpoint: punish going on with what was already said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from hardpoint import plugins
from hardpoint.plugins import (
    Edits,
    LogitsRequest,
    Meta,
    Op,
    Phase,
    PrepareContext,
    Rows,
    SparseLogitsProcessor,
)

# Longer matches are not told apart, as in the original; it also keeps the power in range.
LONGEST = 50


class Dry(SparseLogitsProcessor):
    """Punish each token that would extend a repetition, the more the longer it already is.

    A token that once followed the last n tokens loses multiplier * base ** (n - allowed_length), if
    n >= allowed_length.

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677
    """

    contract = 1
    phase = Phase.PENALTY
    after = ("penalties",)

    class Arguments(plugins.Arguments):
        """What a request asks for.

        Attributes:
            multiplier: the penalty of a repetition of `allowed_length`; 0 is off.
            base: how it grows with each further token.
            allowed_length: shorter repetitions cost nothing.
            sequence_breakers: strings that no repetition reaches across, names in a chat format
                for example; the last token of each counts.
            breaker_ids: the same as token ids; `sequence_breakers` are resolved into it.
            range: so many of the newest tokens are looked at; 0 is all.
        """

        multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.8
        base: Annotated[float, Meta(ge=1, le=4)] = 1.75
        allowed_length: Annotated[int, Meta(ge=1)] = 2
        sequence_breakers: list[Annotated[str, Meta(min_length=1)]] = msgspec.field(
            default_factory=lambda: ["\n", ":", '"', "*"]
        )
        breaker_ids: list[Annotated[int, Meta(ge=0)]] = []
        range: Annotated[int, Meta(ge=0)] = 0

    @classmethod
    def prepare(cls, arguments: Dry.Arguments, context: PrepareContext) -> Dry.Arguments:
        """Resolve the strings to token ids. ValueError if there is no tokenizer for them."""
        ids = dict.fromkeys(arguments.breaker_ids)
        for text in arguments.sequence_breakers:
            if context.tokenizer is None:
                raise ValueError(
                    f"sequence_breakers: {text!r} needs a tokenizer, and there is none; "
                    f"give [] here and token ids as breaker_ids"
                )
            # A letter before it, so that it is spelt as inside a text, not as at its beginning.
            ids[context.tokenizer.encode(f"a{text}", add_special_tokens=False)[-1]] = None
        return msgspec.structs.replace(arguments, breaker_ids=list(ids))

    def start(self, request: LogitsRequest) -> History:
        """Read prompt and outputs."""
        arguments = request.arguments[self.name]
        history = History(frozenset(arguments.breaker_ids))
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        for token in tokens[:-LONGEST]:  # too old for the matches that end now
            history.record(token)
        for token in tokens[-LONGEST:]:
            history.add(token)
        return history

    def advance(self, state: History, token: int) -> History:
        """Add one more token, in place."""
        state.add(token)
        return state

    def fork(self, state: History) -> History:
        """Return a copy."""
        return state.copy()

    def edits(self, rows: Rows) -> Edits | None:
        """Lower the logits of the tokens that would extend a repetition."""
        found = []
        for index, (state, asked) in enumerate(zip(rows.states(), rows.arguments(), strict=True)):
            for follower, length in state.repetitions(asked.range).items():
                if length >= asked.allowed_length:
                    penalty = asked.multiplier * asked.base ** (length - asked.allowed_length)
                    found.append((index, follower, -penalty))
        if not found:
            return None
        row, token, value = zip(*found, strict=True)
        return Edits(row, token, value, Op.ADD)


@dataclass
class History:
    """All tokens of a request, and what the newest of them repeat.

    Attributes:
        breakers: tokens that no repetition contains.
        tokens: all so far.
        earlier: for each position, the last one before it with the same token, or -1.
        latest: each token's last position.
        matches: position to n: the n tokens that end there are the newest n.
    """

    breakers: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    latest: dict[int, int] = field(default_factory=dict)
    matches: dict[int, int] = field(default_factory=dict)

    def copy(self) -> History:
        """Return a copy that may grow by itself."""
        return History(
            self.breakers,
            self.tokens.copy(),
            self.earlier.copy(),
            self.latest.copy(),
            self.matches,  # never changed, only replaced
        )

    def record(self, token: int) -> None:
        """Append a token without looking for repetitions."""
        self.earlier.append(self.latest.get(token, -1))
        self.latest[token] = len(self.tokens)
        self.tokens.append(token)

    def add(self, token: int) -> None:
        """Append a token. A match goes on where the same token followed it before."""
        self.record(token)
        before, self.matches = self.matches, {}
        if token in self.breakers:
            return
        at = self.earlier[-1]
        while at >= 0:
            self.matches[at] = min(before.get(at - 1, 0) + 1, LONGEST)
            at = self.earlier[at]

    def repetitions(self, size: int) -> dict[int, int]:
        """Return which tokens would extend a repetition, and its longest length.

        Args:
            size: only so many of the newest tokens count; 0 is all.
        """
        first = max(len(self.tokens) - size, 0) if size else 0
        longest: dict[int, int] = {}
        for at, length in self.matches.items():
            token = self.tokens[at + 1]
            inside = min(length, at - first + 1)
            if token not in self.breakers and inside > longest.get(token, 0):
                longest[token] = inside
        return longest
