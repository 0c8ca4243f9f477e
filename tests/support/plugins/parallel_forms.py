"""A logits processor of each form with an effect that depends on earlier tokens."""

from __future__ import annotations

import torch

from hardpoint import plugins
from hardpoint.plugins import (
    BatchLogitsProcessor,
    Edits,
    LogitsProcessor,
    Phase,
    RowMap,
    SparseLogitsProcessor,
)


class Waves(LogitsProcessor):
    """Adds a pattern that moves with each token; raises after `fail_after` tokens."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        width: int = 7
        fail_after: int | None = None

    def start(self, request):
        return len(request.output_token_ids)

    def advance(self, state, token):
        return state + 1

    def apply(self, logits, rows):
        columns = torch.arange(logits.shape[1])
        shifted = logits.clone()
        for row, (count, arguments) in enumerate(zip(rows.states(), rows.arguments(), strict=True)):
            if arguments.fail_after is not None and count >= arguments.fail_after:
                logits.fill_(torch.nan)  # damages the rows of other requests, too
                raise RuntimeError("the wave broke")
            shifted[row] += ((columns + count) % arguments.width).float()
        return shifted


class NotAgain(SparseLogitsProcessor):
    """Forbids the last token, and prefers its successor."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        bonus: float = 1.0

    def edits(self, rows):
        edits: list[tuple[int, int, float]] = []
        for row, (request, arguments) in enumerate(
            zip(rows.requests, rows.arguments(), strict=True)
        ):
            for token in request.output_token_ids[-1:]:
                edits += [(row, token, -100.0), (row, (token + 1) % 256, arguments.bonus)]
        return Edits(*map(list, zip(*edits, strict=True))) if edits else None


class Tide(BatchLogitsProcessor):
    """Raises the logits of even and odd tokens in turns, for requests that ask."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        height: float = 2.0

    def __init__(self, context):
        super().__init__(context)
        self.rows = RowMap(
            lambda added: (
                (added.params.plugin_args["tide"].height, added.output_token_ids)
                if "tide" in added.params.plugin_args
                else None
            )
        )

    @classmethod
    def uses(cls, params):
        return False

    def update_state(self, update):
        self.rows.apply(update)

    def apply(self, logits):
        for row in self.rows:
            if (state := self.rows[row]) is not None:
                height, outputs = state
                logits[row, len(outputs) % 2 :: 2] += height
        return logits
