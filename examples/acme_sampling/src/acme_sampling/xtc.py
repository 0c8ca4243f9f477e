"""XTC ("exclude top choices") for Hardpoint: sometimes mask the most likely tokens."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, LogitsRequest, Meta, Phase, PrepareContext, Rows
from hardpoint.plugins.device import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence


class Xtc(LogitsProcessor):
    """With some probability, masks all tokens above a threshold but the least likely of them.

    A position where that would mask a line break or a stop token is left unchanged, so that the
    text keeps its layout and its end.

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335
    """

    contract = 1
    phase = Phase.TRUNCATE
    after = ("top_k", "top_p", "min_p")

    class Arguments(plugins.Arguments):
        """Arguments of a request.

        Attributes:
            threshold: probability that makes a token a top choice; above 0.5 there is only one.
            probability: how often top choices are masked.
            protected: token ids that are never masked; line break and stop tokens are added.
        """

        threshold: Annotated[float, Meta(gt=0, le=1)] = 0.1
        probability: Annotated[float, Meta(ge=0, le=1)] = 0.5
        protected: list[Annotated[int, Meta(ge=0)]] = []

    @classmethod
    def prepare(cls, arguments: Xtc.Arguments, context: PrepareContext) -> Xtc.Arguments:
        """Add the protected tokens; raise ValueError for one outside the vocabulary."""
        for token in arguments.protected:
            if token >= context.vocab_size:
                raise ValueError(
                    f"protected: expected token ids under {context.vocab_size} (the vocabulary), "
                    f"got {token}"
                )
        ids = dict.fromkeys((*arguments.protected, *context.stop_token_ids))
        if context.tokenizer is not None:
            ids[context.tokenizer.encode("a\n", add_special_tokens=False)[-1]] = None
        inside = [token for token in ids if token < context.vocab_size]
        return msgspec.structs.replace(arguments, protected=inside)

    def start(self, request: LogitsRequest) -> Position:
        """Return the position of the request's next output token."""
        seed = request.params.seed or 0
        return Position(seed, request.child_index, len(request.output_token_ids))

    def advance(self, state: Position, token: int) -> Position:  # noqa: ARG002
        """Return the next position."""
        return state._replace(output=state.output + 1)

    def fork(self, state: Position) -> Position:
        """Return the position itself, which is immutable."""
        return state

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits of top choices to -inf. `logits` is [rows, vocab]."""
        chosen = [
            row
            for row, (state, row_arguments) in enumerate(
                zip(rows.states(), rows.arguments(), strict=True)
            )
            if coin(state) < row_arguments.probability
        ]
        if chosen:
            arguments = rows.arguments()
            index = to_device(chosen, logits.device)
            logits[index] = exclude_top_choices(
                logits[index],
                rows.tensor("threshold")[index],
                [arguments[row].protected for row in chosen],
            )
        return logits


class Position(NamedTuple):
    """All that the random number of an output depends on."""

    seed: int
    child: int
    output: int


def coin(position: Position) -> float:
    """Return a random number in [0, 1), always the same for a position."""
    # A generator would have to be rewound after preemption and for rejected drafts; a hash has no
    # state.
    data = struct.pack("<3q", *position)
    return int.from_bytes(hashlib.blake2b(data, digest_size=6, person=b"xtc").digest()) / 2**48


def exclude_top_choices(
    logits: torch.Tensor, threshold: torch.Tensor, protected: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return logits with all top choices masked but the least likely and its ties.

    Args:
        logits: [rows, vocab].
        threshold: [rows, 1].
        protected: token ids of each row.
    """
    probs = logits.softmax(-1)
    least = probs.masked_fill(probs < threshold, math.inf).amin(-1, keepdim=True)
    masked = probs > least  # none where no token reaches the threshold
    row = [row for row, tokens in enumerate(protected) for _ in tokens]
    token = [token for tokens in protected for token in tokens]
    if token:
        rows, tokens = to_device([row, token], logits.device)
        hits = torch.zeros_like(threshold).index_add_(0, rows, masked[rows, tokens, None].float())
        masked &= hits == 0
    return logits.masked_fill(masked, -math.inf)
