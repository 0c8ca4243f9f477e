"""Processors that forbid tokens: allowed_token_ids, bad_words and min_tokens."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from hardpoint import plugins
from hardpoint.plugins import (
    Edits,
    LogitsContext,
    LogitsRequest,
    Meta,
    Op,
    Phase,
    PrepareContext,
    Reads,
    Rows,
    SparseLogitsProcessor,
    Tokenizer,
)

from .row_cache import RowCache

TokenId = Annotated[int, Meta(ge=0)]


class AllowedTokenIds(SparseLogitsProcessor):
    """Leaves a request only the tokens of its `allowed_token_ids`."""

    contract = 1
    phase = Phase.MASK
    params_fields = ("allowed_token_ids",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """A choice of tokens.

        Attributes:
            allowed_token_ids: the only tokens that may be produced.
        """

        allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)]

    def __init__(self, context: LogitsContext) -> None:
        """Start with nothing cached."""
        super().__init__(context)
        self._cache = RowCache[Edits]()

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Refuse ids outside the vocabulary with a ValueError."""
        _check_vocabulary(arguments.allowed_token_ids, context.vocab_size)
        return arguments

    def edits(self, rows: Rows) -> Edits:
        """Keep the allowed tokens of each row; the same object until the rows change."""
        return self._cache.get(rows, lambda: self._build(rows))

    def _build(self, rows: Rows) -> Edits:
        allowed = [arguments.allowed_token_ids for arguments in rows.arguments()]
        return _edits(enumerate(allowed), Op.KEEP_ONLY)


class MinTokens(SparseLogitsProcessor):
    """Forbids every stop token until a request has `min_tokens` output tokens."""

    contract = 1
    phase = Phase.MASK
    params_fields = ("min_tokens",)

    class Arguments(plugins.Arguments):
        """A length.

        Attributes:
            min_tokens: no stop token before so many output tokens.
        """

        min_tokens: Annotated[int, Meta(ge=0)] = 0

    context: LogitsContext

    def __init__(self, context: LogitsContext) -> None:
        """Start with nothing cached."""
        super().__init__(context)
        self._plan: _Plan | None = None

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Refuse a request that could produce nothing but stop tokens, with a ValueError."""
        allowed = context.params.allowed_token_ids
        if arguments.min_tokens and allowed and set(allowed) <= set(context.stop_token_ids):
            raise ValueError(
                f"{arguments.min_tokens} tokens cannot be produced, because each of "
                f"allowed_token_ids {allowed} ends the request"
            )
        return arguments

    def edits(self, rows: Rows) -> Edits | None:
        """Forbid the stop tokens of the rows that are still too short."""
        plan = self._plan
        if plan is None or plan.version != rows.version or len(plan.output) >= plan.until:
            self._plan = plan = self._make_plan(rows)
        return plan.edits

    def _make_plan(self, rows: Rows) -> _Plan:
        """Forbid; the rows grow alike, so the first tells when another one is done."""
        outputs = [request.output_token_ids for request in rows.requests]
        missing = [
            arguments.min_tokens - len(output)
            for output, arguments in zip(outputs, rows.arguments(), strict=True)
        ]
        soonest = min((count for count in missing if count > 0), default=None)
        if soonest is None:
            return _Plan(rows.version, outputs[0], math.inf, None)
        # An id outside the vocabulary can never be chosen, so there is nothing to forbid.
        size = self.context.vocab_size
        edits = _edits(
            (row, [t for t in dict.fromkeys(rows.requests[row].stop_token_ids) if t < size])
            for row, count in enumerate(missing)
            if count > 0
        )
        return _Plan(rows.version, outputs[0], len(outputs[0]) + soonest, edits)


class _Plan(NamedTuple):
    """What holds for one version of the rows, until the first row's output is so long."""

    version: int
    output: Sequence[int]
    until: float
    edits: Edits | None


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Forbidden sequences, arranged for look-up.

    Attributes:
        single: tokens that are always forbidden.
        by_last: last token of the output to (the whole prefix, the token forbidden after it).
    """

    single: tuple[int, ...]
    by_last: dict[int, list[tuple[list[int], int]]]

    def forbidden_after(self, output: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that would complete a longer sequence after an output, not empty."""
        return tuple(
            token
            for prefix, token in self.by_last.get(output[-1], ())
            if list(output[-len(prefix) :]) == prefix
        )


class BadWords(SparseLogitsProcessor):
    """Forbids strings, as the token sequences that spell them.

    As in vLLM, a word is spelt as it stands and after a space, and a longer sequence forbids its
    last token while the output ends with the ones before. Unlike there, the spelling after a space
    counts whatever its length. Other ways to spell a word in tokens are not forbidden.
    """

    contract = 1
    phase = Phase.MASK
    params_fields = ("bad_words",)

    class Arguments(plugins.Arguments):
        """What must not be said.

        Attributes:
            bad_words: strings that must not be produced.
            sequences: the same as token ids; `bad_words` are resolved into it.
        """

        bad_words: list[Annotated[str, Meta(min_length=1)]] = []
        sequences: list[Annotated[list[TokenId], Meta(min_length=1)]] = []

    def __init__(self, context: LogitsContext) -> None:
        """Start with nothing cached."""
        super().__init__(context)
        self._watched = RowCache[list[_Watched]]()
        self._cache = RowCache[Edits]()

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Resolve the words to token ids.

        Raises:
            ValueError: there is no tokenizer, a token is outside the vocabulary, or every allowed
                token is forbidden.
        """
        sequences = list(arguments.sequences)
        for word in arguments.bad_words:
            if context.tokenizer is None:
                raise ValueError(
                    f"{word!r} needs a tokenizer, and there is none; give token ids "
                    f"as plugin_args bad_words.sequences"
                )
            sequences += _spellings(word, context.tokenizer)
        for sequence in sequences:
            _check_vocabulary(sequence, context.vocab_size)
        forbidden = {sequence[0] for sequence in sequences if len(sequence) == 1}
        allowed = context.params.allowed_token_ids
        if allowed and forbidden.issuperset(allowed):
            raise ValueError(f"each of allowed_token_ids {allowed} is forbidden")
        return msgspec.structs.replace(arguments, sequences=sequences)

    def start(self, request: LogitsRequest) -> _Sequences:
        """Arrange the request's sequences; the result never changes."""
        single: list[int] = []
        by_last: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in request.arguments[self.name].sequences:
            if len(sequence) == 1:
                single.append(sequence[0])
            else:
                by_last.setdefault(sequence[-2], []).append((sequence[:-1], sequence[-1]))
        return _Sequences(tuple(dict.fromkeys(single)), by_last)

    def edits(self, rows: Rows) -> Edits | None:
        """Forbid what completes a sequence; the same object while that stays the same."""
        watched = self._watched.get(rows, lambda: _watched(rows))
        now = tuple(
            [
                (row, state.forbidden_after(output))
                for row, output, last, state in watched
                if output and output[-1] in last
            ]
        )
        edits = self._cache.get(rows, lambda: self._build(rows.states(), dict(now)), extra=now)
        return edits if edits.row else None

    def _build(self, states: Sequence[_Sequences], now: dict[int, tuple[int, ...]]) -> Edits:
        return _edits(
            (row, list(dict.fromkeys((*state.single, *now.get(row, ())))))
            for row, state in enumerate(states)
        )


_Watched = tuple[int, Sequence[int], Container[int], _Sequences]


def _watched(rows: Rows) -> list[_Watched]:
    """Return row, output (it grows), the last tokens of prefixes and all, where there are any."""
    pairs: Iterable[tuple[LogitsRequest, _Sequences]] = zip(
        rows.requests, rows.states(), strict=True
    )
    return [
        (row, request.output_token_ids, state.by_last.keys(), state)
        for row, (request, state) in enumerate(pairs)
        if state.by_last
    ]


def _spellings(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    bare = word.lstrip()
    spelt = [tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}")]
    return [s for index, s in enumerate(spelt) if s and s not in spelt[:index]]


def _edits(tokens_by_row: Iterable[tuple[int, Sequence[int]]], op: Op = Op.SET) -> Edits:
    """Return edits that keep only, or set to -inf, each row's tokens."""
    pairs = [(row, token) for row, tokens in tokens_by_row for token in tokens]
    row, token = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Edits(row, token, [-math.inf] * len(pairs) if op is Op.SET else (), op)


def _check_vocabulary(token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise ValueError(f"expected token ids under {vocab_size} (the vocabulary), got {token}")
