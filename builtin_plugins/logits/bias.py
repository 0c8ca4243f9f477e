"""logit_bias: add a bias to the logits of given tokens."""

from __future__ import annotations

from typing import Annotated, Any

from hardpoint import plugins
from hardpoint.plugins import (
    Edits,
    LogitsContext,
    Meta,
    Op,
    Phase,
    PrepareContext,
    Reads,
    Rows,
    SparseLogitsProcessor,
)

from .row_cache import RowCache

_BAN = -100  # as OpenAI's API reference defines it


class LogitBias(SparseLogitsProcessor):
    """Adds biases in [-100, 100] to the logits of given tokens. A masked token stays masked.

    Ids outside the vocabulary are rejected.
    """

    contract = 1
    phase = Phase.BIAS
    params_fields = ("logit_bias",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """Biases by token.

        Attributes:
            logit_bias: bias by token id.
        """

        logit_bias: dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100, le=100)]] = {}

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._cache = RowCache[Edits]()

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Check one request's biases.

        Raises:
            ValueError: an id is outside the vocabulary, or every allowed token is biased away.
        """
        biases, allowed = arguments.logit_bias, context.params.allowed_token_ids
        if allowed and all(biases.get(token, 0) <= _BAN for token in allowed):
            raise ValueError(
                f"each of allowed_token_ids is biased by {_BAN}, which leaves no token"
            )
        for token in arguments.logit_bias:
            if token >= context.vocab_size:
                raise ValueError(
                    f"expected token ids under {context.vocab_size} (the vocabulary), got {token}"
                )
        return arguments

    def edits(self, rows: Rows) -> Edits:
        """Add the biases of each row; the same object until the rows change."""
        return self._cache.get(rows, lambda: self._build(rows))

    def _build(self, rows: Rows) -> Edits:
        triples = [
            (row, token, bias)
            for row, arguments in enumerate(rows.arguments())
            for token, bias in arguments.logit_bias.items()
        ]
        row, token, bias = zip(*triples, strict=True) if triples else ((), (), ())
        return Edits(row, token, bias, Op.ADD)
