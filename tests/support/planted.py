"""Plugins that misbehave, each in a phase of its own, for traces that find them."""

from __future__ import annotations

import math

import numpy as np

from hardpoint import plugins
from hardpoint.plugins import (
    Edits,
    EngineHalf,
    GrammarBitmask,
    LogitsProcessor,
    Op,
    Phase,
    SparseLogitsProcessor,
    StepPart,
)

WANTED, FORCED = ord("x") - 33, ord("z") - 33
"""Tokens of the scripted model, whose ids are those of GPT-2."""


class WrongSign(SparseLogitsProcessor):
    """Is to make a token likelier, and makes it less likely."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        amount: float

    def edits(self, rows):
        amounts = [-arguments.amount for arguments in rows.arguments()]
        return Edits(range(len(amounts)), [WANTED] * len(amounts), amounts, Op.ADD)


class NoArguments(plugins.Arguments):
    pass


class Harsh(LogitsProcessor):
    """Is to penalise repeated tokens a little, and makes them impossible in effect."""

    contract = 1
    phase = Phase.PENALTY
    Arguments = NoArguments

    def apply(self, logits, rows):
        for row, request in enumerate(rows.requests):
            for token in request.output_token_ids:
                logits[row, token] -= 1000.0
        return logits


class Inverted(LogitsProcessor):
    """Multiplies by a negative temperature."""

    contract = 1
    phase = Phase.TEMPERATURE
    Arguments = NoArguments

    def apply(self, logits, rows):
        return -logits


class KeepsOne(LogitsProcessor):
    """Keeps the second token in place of all likely ones."""

    contract = 1
    phase = Phase.TRUNCATE
    Arguments = NoArguments

    def apply(self, logits, rows):
        second = logits.topk(2).indices[:, 1:]
        return logits.new_full(logits.shape, -math.inf).scatter(1, second, logits.gather(1, second))


class Forces(SparseLogitsProcessor):
    """Forces a token that nobody asked for."""

    contract = 1
    phase = Phase.FORCE
    Arguments = NoArguments

    def edits(self, rows):
        return Edits(range(len(rows)), [FORCED] * len(rows), [], Op.KEEP_ONLY)


class Bans(SparseLogitsProcessor):
    """Forbids the only token that is left."""

    contract = 1
    phase = Phase.MASK
    Arguments = NoArguments

    def edits(self, rows):
        size = self.context.vocab_size
        pairs = [(row, token) for row in range(len(rows)) for token in range(size)]
        row, token = zip(*pairs, strict=True)
        return Edits(row, token, [-math.inf] * len(pairs), Op.SET)


class Raises(LogitsProcessor):
    """Fails for rows with an output of a certain length, together with all others."""

    contract = 1
    phase = Phase.BIAS
    Arguments = NoArguments

    def apply(self, logits, rows):
        if any(len(request.output_token_ids) == 2 for request in rows.requests):
            raise ValueError("two is too many")
        return logits + 1.0


class Digits(StepPart):
    """Masks everything but digits for requests with a tag."""

    contract = 1

    def engine_half(self, context):
        return DigitMasks(context.vocab_size)


class DigitMasks(EngineHalf):
    def __init__(self, vocab_size):
        self.row = np.zeros((-(-vocab_size // 32),), dtype=np.int32)
        self.row[0] = 0x03FF << (ord("0") - 33)
        self.users = set()

    def uses(self, request):
        return request.tags.get("only") == "digits"

    def gate(self, request):
        self.users.add(request.request_id)

    def mask(self, plan):
        names = [name for name in plan.num_scheduled_tokens if name in self.users]
        return GrammarBitmask(names, np.stack([self.row] * len(names))) if names else None
