"""Processors that mask tokens: allowed_token_ids, bad_words and min_tokens."""

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
    """Masks all tokens of a request but its `allowed_token_ids`.

    End-of-sequence tokens are masked unless they are named. Ids outside the vocabulary are
    rejected. So is a request whose `min_tokens` or `thinking_token_budget` needs a token that
    is not allowed.
    """

    contract = 1
    phase = Phase.MASK
    params_fields = ("allowed_token_ids",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """The allowed tokens.

        Attributes:
            allowed_token_ids: the only tokens that may be generated.
        """

        allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)]

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._cache = RowCache[Edits]()

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Raise ValueError for ids outside the vocabulary."""
        _check_vocabulary(arguments.allowed_token_ids, context.vocab_size)
        return arguments

    def edits(self, rows: Rows) -> Edits:
        """Keep the allowed tokens of each row; the same object until the rows change."""
        return self._cache.get(rows, lambda: self._build(rows))

    def _build(self, rows: Rows) -> Edits:
        allowed = [arguments.allowed_token_ids for arguments in rows.arguments()]
        return _edits(enumerate(allowed), Op.KEEP_ONLY)


class MinTokens(SparseLogitsProcessor):
    """Masks all stop tokens until a request has `min_tokens` output tokens.

    A stop string or a forced stop token does not end the request earlier, and
    `repetition_detection` waits for as many tokens.
    """

    contract = 1
    phase = Phase.MASK
    params_fields = ("min_tokens",)

    class Arguments(plugins.Arguments):
        """The minimum length.

        Attributes:
            min_tokens: number of output tokens before the first stop token.
        """

        min_tokens: Annotated[int, Meta(ge=0)] = 0

    context: LogitsContext

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._plan: _Plan | None = None

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Raise ValueError if all allowed tokens of a request are stop tokens."""
        allowed = context.params.allowed_token_ids
        if arguments.min_tokens and allowed and set(allowed) <= set(context.stop_token_ids):
            raise ValueError(
                f"{arguments.min_tokens} tokens cannot be produced, because each of "
                f"allowed_token_ids {allowed} ends the request"
            )
        return arguments

    def edits(self, rows: Rows) -> Edits | None:
        """Mask the stop tokens of the rows that are still too short."""
        plan = self._plan
        if plan is None or plan.version != rows.version or len(plan.output) >= plan.until:
            self._plan = plan = self._make_plan(rows)
        return plan.edits

    def _make_plan(self, rows: Rows) -> _Plan:
        """Build the edits, which are valid until the next row is long enough."""
        # All rows grow by the same number of tokens, so the first output shows how many were added.
        outputs = [request.output_token_ids for request in rows.requests]
        missing = [
            arguments.min_tokens - len(output)
            for output, arguments in zip(outputs, rows.arguments(), strict=True)
        ]
        soonest = min((count for count in missing if count > 0), default=None)
        if soonest is None:
            return _Plan(rows.version, outputs[0], math.inf, None)
        # An id outside the vocabulary can never be sampled and has no logit to mask.
        size = self.context.vocab_size
        edits = _edits(
            (row, [t for t in dict.fromkeys(rows.requests[row].stop_token_ids) if t < size])
            for row, count in enumerate(missing)
            if count > 0
        )
        return _Plan(rows.version, outputs[0], len(outputs[0]) + soonest, edits)


class _Plan(NamedTuple):
    """Edits for one version of the rows, valid until the first row's output is `until` long."""

    version: int
    output: Sequence[int]
    until: float
    edits: Edits | None


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Forbidden sequences of a request, indexed for look-up.

    Attributes:
        single: tokens that are always forbidden.
        by_last: by the last token of a prefix, (the whole prefix, the token forbidden after it).
    """

    single: tuple[int, ...]
    by_last: dict[int, list[tuple[list[int], int]]]

    def forbidden_after(self, output: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            token
            for prefix, token in self.by_last.get(output[-1], ())
            if list(output[-len(prefix) :]) == prefix
        )


class BadWords(SparseLogitsProcessor):
    """Masks tokens that would complete a forbidden string, given as token sequences.

    As in vLLM, a word is encoded as it is and after a space, and the last token of a longer
    sequence is masked while the output ends with the tokens before it. Unlike in vLLM, the encoding
    after a space is used whatever its length. Other token sequences of a word are not forbidden.

    Without a tokenizer, only token ids (`sequences`) are accepted.
    """

    contract = 1
    phase = Phase.MASK
    params_fields = ("bad_words",)

    class Arguments(plugins.Arguments):
        """The forbidden strings.

        Attributes:
            bad_words: strings that must not be generated.
            sequences: the same as token ids.
        """

        bad_words: list[Annotated[str, Meta(min_length=1)]] = []
        sequences: list[Annotated[list[TokenId], Meta(min_length=1)]] = []

    class Prepared(Arguments):
        """The arguments, and `encoded`: the token ids of `bad_words`."""

        encoded: list[list[TokenId]] = []

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._prefix_rows = RowCache[list[_PrefixRow]]()
        self._cache = RowCache[Edits]()

    @classmethod
    def prepare(cls, arguments: Arguments, context: PrepareContext) -> Prepared:
        """Encode each word.

        Raises:
            ValueError: there is no tokenizer, a token is outside the vocabulary, or every allowed
                token is forbidden.
        """
        encoded: list[list[int]] = []
        for word in arguments.bad_words:
            if context.tokenizer is None:
                raise ValueError(
                    f"{word!r} needs a tokenizer, and there is none; give token ids "
                    f"as plugin_args bad_words.sequences"
                )
            encoded += _encodings(word, context.tokenizer)
        sequences = [*arguments.sequences, *encoded]
        for sequence in sequences:
            _check_vocabulary(sequence, context.vocab_size)
        forbidden = {sequence[0] for sequence in sequences if len(sequence) == 1}
        allowed = context.params.allowed_token_ids
        if allowed and forbidden.issuperset(allowed):
            raise ValueError(f"each of allowed_token_ids {allowed} is forbidden")
        return cls.Prepared(**msgspec.structs.asdict(arguments), encoded=encoded)

    def start(self, request: LogitsRequest) -> _Sequences:
        """Index the request's sequences; the result never changes."""
        single: list[int] = []
        by_last: dict[int, list[tuple[list[int], int]]] = {}
        arguments = request.arguments[self.name]
        for sequence in (*arguments.sequences, *arguments.encoded):
            if len(sequence) == 1:
                single.append(sequence[0])
            else:
                by_last.setdefault(sequence[-2], []).append((sequence[:-1], sequence[-1]))
        return _Sequences(tuple(dict.fromkeys(single)), by_last)

    def edits(self, rows: Rows) -> Edits | None:
        """Mask the tokens that complete a sequence; the same object until they change."""
        prefix_rows = self._prefix_rows.get(rows, lambda: _prefix_rows(rows))
        completing = tuple(
            [
                (row, state.forbidden_after(output))
                for row, output, last, state in prefix_rows
                if output and output[-1] in last
            ]
        )
        edits = self._cache.get(
            rows, lambda: self._build(rows.states(), dict(completing)), extra=completing
        )
        return edits if edits.row else None

    def _build(self, states: Sequence[_Sequences], completing: dict[int, tuple[int, ...]]) -> Edits:
        return _edits(
            (row, list(dict.fromkeys((*state.single, *completing.get(row, ())))))
            for row, state in enumerate(states)
        )


_PrefixRow = tuple[int, Sequence[int], Container[int], _Sequences]


def _prefix_rows(rows: Rows) -> list[_PrefixRow]:
    """Return (row, live output, last tokens of prefixes, state) of each row that has prefixes."""
    pairs: Iterable[tuple[LogitsRequest, _Sequences]] = zip(
        rows.requests, rows.states(), strict=True
    )
    return [
        (row, request.output_token_ids, state.by_last.keys(), state)
        for row, (request, state) in enumerate(pairs)
        if state.by_last
    ]


def _encodings(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    bare = word.lstrip()
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}")]
    return [s for index, s in enumerate(encoded) if s and s not in encoded[:index]]


def _edits(tokens_by_row: Iterable[tuple[int, Sequence[int]]], op: Op = Op.SET) -> Edits:
    pairs = [(row, token) for row, tokens in tokens_by_row for token in tokens]
    row, token = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Edits(row, token, [-math.inf] * len(pairs) if op is Op.SET else (), op)


def _check_vocabulary(token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise ValueError(f"expected token ids under {vocab_size} (the vocabulary), got {token}")
