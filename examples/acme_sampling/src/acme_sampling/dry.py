"""DRY ("don't repeat yourself") for Hardpoint: penalise tokens that extend a repetition."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hardpoint import plugins
from hardpoint.plugins import Edits, LogitsRequest, Meta, Op, Phase, PrepareContext, Rows

# Longer matches count as this long, as in the original; this also limits the power.
LONGEST = 50


class Dry(plugins.SparseLogitsProcessor):
    """Penalises each token that would extend a repetition, the more the longer it is.

    A token that has followed the last n tokens before gets the penalty
    multiplier * base ** (n - allowed_length), if n >= allowed_length.

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677
    """

    contract = 1
    phase = Phase.PENALTY
    after = ("penalties",)

    class Arguments(plugins.Arguments):
        """Arguments of a request.

        Attributes:
            multiplier: penalty of a repetition of `allowed_length`; 0 disables it.
            base: growth of the penalty with each further token.
            allowed_length: shorter repetitions have no penalty.
            sequence_breakers: strings at which repetitions end, such as names in a chat format;
                the last token of each string is used.
            breaker_ids: the same as token ids.
            range: number of newest tokens to search; 0 is all.
        """

        multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.8
        base: Annotated[float, Meta(ge=1, le=4)] = 1.75
        allowed_length: Annotated[int, Meta(ge=1)] = 2
        sequence_breakers: tuple[Annotated[str, Meta(min_length=1)], ...] = ("\n", ":", '"', "*")
        breaker_ids: list[Annotated[int, Meta(ge=0)]] = []
        range: Annotated[int, Meta(ge=0)] = 0

    @classmethod
    def prepare(cls, arguments: Arguments, context: PrepareContext) -> Arguments:
        """Turn the strings into token ids; raise ValueError if there is no tokenizer."""
        ids = list(arguments.breaker_ids)
        for text in arguments.sequence_breakers:
            if context.tokenizer is None:
                raise ValueError(
                    f"sequence_breakers: {text!r} needs a tokenizer, and there is none; "
                    f"give [] here and token ids as breaker_ids"
                )
            # With a letter before it: the encoding inside a text, not at its beginning.
            ids.append(context.tokenizer.encode(f"a{text}", add_special_tokens=False)[-1])
        return msgspec.structs.replace(arguments, sequence_breakers=(), breaker_ids=ids)

    def start(self, request: LogitsRequest) -> History:
        """Return the history of prompt and outputs."""
        history = History(frozenset(request.arguments[self.name].breaker_ids))
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        for token in tokens[:-LONGEST]:  # too old for a match at the end
            history.record(token)
        for token in tokens[-LONGEST:]:
            history.add(token)
        return history

    def advance(self, state: History, token: int) -> History:
        """Add one more token, in place."""
        state.add(token)
        return state

    def fork(self, state: History) -> History:
        """Return a copy; `matches` is replaced, and never changed."""
        copies = {name: getattr(state, name).copy() for name in ("tokens", "earlier", "latest")}
        return msgspec.structs.replace(state, **copies)

    def edits(self, rows: Rows[Arguments, History]) -> Edits | None:
        """Lower the logits of the tokens that would extend a repetition."""
        penalties: list[tuple[int, int, float]] = []
        for index, (state, arguments) in enumerate(
            zip(rows.states(), rows.arguments(), strict=True)
        ):
            for follower, length in state.repetitions(arguments.range).items():
                if length >= arguments.allowed_length:
                    penalty = arguments.multiplier * arguments.base ** (
                        length - arguments.allowed_length
                    )
                    penalties.append((index, follower, -penalty))
        if not penalties:
            return None
        row, token, value = zip(*penalties, strict=True)
        return Edits(row, token, value, Op.ADD)


class History(msgspec.Struct):
    """All tokens of a request, and the repetitions at its end.

    Attributes:
        breakers: tokens that no repetition contains.
        tokens: all tokens so far.
        earlier: for each position, the previous one with the same token, or -1.
        latest: last position of each token.
        matches: by position, the number n of tokens ending there that equal the last n tokens.
    """

    breakers: frozenset[int]
    tokens: list[int] = []
    earlier: list[int] = []
    latest: dict[int, int] = {}
    matches: dict[int, int] = {}

    def record(self, token: int) -> None:
        """Append a token without looking for repetitions."""
        self.earlier.append(self.latest.get(token, -1))
        self.latest[token] = len(self.tokens)
        self.tokens.append(token)

    def add(self, token: int) -> None:
        """Append a token; a match continues where it was followed by the same token."""
        position = self.latest.get(token, -1)
        self.record(token)
        before, self.matches = self.matches, {}
        while position >= 0 and token not in self.breakers:
            self.matches[position] = min(before.get(position - 1, 0) + 1, LONGEST)
            position = self.earlier[position]

    def repetitions(self, size: int) -> dict[int, int]:
        """Return the tokens that would extend a repetition, with the longest length.

        Args:
            size: number of newest tokens to search; 0 is all.
        """
        first = max(len(self.tokens) - size, 0) if size else 0
        longest: dict[int, int] = {}
        for position, length in self.matches.items():
            if (token := self.tokens[position + 1]) not in self.breakers:
                inside = min(length, position - first + 1)
                longest[token] = max(inside, longest.get(token, 0))
        return longest
