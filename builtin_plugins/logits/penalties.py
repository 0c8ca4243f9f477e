"""penalties: repetition, frequency and presence penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, LogitsRequest, Meta, Phase, PrepareContext, Rows
from hardpoint.plugins.device import to_device

Penalty = Annotated[float, Meta(ge=-2, le=2)]

# Beyond these, a product of a logit and the penalty may exceed float32.
_SMALLEST, _LARGEST = 1e-30, 1e30


class TokenCounts:
    """The distinct tokens of a request, with their numbers of occurrences in its output.

    Attributes:
        size: number of distinct tokens.
    """

    __slots__ = ("_counts", "_indices", "_tokens", "size")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count the tokens so far; `add` counts further ones."""
        counted: dict[Any, int] = dict.fromkeys(prompt, 0)
        counted.pop(None, None)  # embeddings, which are no token
        counted |= Counter(output)
        self.size = len(counted)
        self._indices = {token: index for index, token in enumerate(counted)}
        self._tokens = np.fromiter(counted.keys(), np.int64, self.size)
        self._counts = np.fromiter(counted.values(), np.float32, self.size)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, [size]."""
        return self._tokens[: self.size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences in the output, [size]; 0 for tokens of the prompt alone."""
        return self._counts[: self.size]

    def add(self, token: int) -> None:
        """Count one more output token."""
        index = self._indices.setdefault(token, self.size)
        if index == self.size:
            if self.size == len(self._tokens):
                capacity = max(64, 2 * self.size)
                self._tokens = np.resize(self._tokens, capacity)
                self._counts = np.resize(self._counts, capacity)
            self._tokens[index], self._counts[index] = token, 0
            self.size += 1
        self._counts[index] += 1


class Penalties(LogitsProcessor):
    """Repetition penalty on prompt and output, then frequency and presence penalties on the output.

    Repetition divides positive logits and multiplies negative ones (CTRL, Keskar et al.,
    arXiv:1909.05858). Frequency is subtracted once per occurrence and presence once, as OpenAI's
    API reference defines them.
    """

    contract = 1
    phase = Phase.PENALTY
    params_fields = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    class Arguments(plugins.Arguments):
        """The three penalties.

        Attributes:
            presence_penalty: subtracted once from the logit of every token in the output.
            frequency_penalty: subtracted for every occurrence in the output.
            repetition_penalty: divides positive and multiplies negative logits of tokens in prompt
                or output; 1 disables it.
        """

        presence_penalty: Penalty = 0.0
        frequency_penalty: Penalty = 0.0
        repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:  # noqa: ARG003
        """Raise ValueError if the products of a repetition penalty exceed float32."""
        if not _SMALLEST <= arguments.repetition_penalty <= _LARGEST:
            raise ValueError(
                f"expected a repetition_penalty from {_SMALLEST} to {_LARGEST}, "
                f"got {arguments.repetition_penalty}"
            )
        return arguments

    def start(self, request: LogitsRequest) -> TokenCounts:
        """Count the request's tokens; prompt tokens only for a repetition penalty."""
        repetition = request.arguments[self.name].repetition_penalty
        prompt = request.prompt_token_ids if repetition != 1 else ()
        return TokenCounts(prompt, request.output_token_ids)

    def advance(self, state: TokenCounts, token: int) -> TokenCounts:
        """Count one more token."""
        state.add(token)
        return state

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Apply the penalties to the logits of the counted tokens, in place."""
        states: Sequence[TokenCounts] = rows.states()
        lengths = [state.size for state in states]
        rows_of = np.repeat(np.arange(len(states)), lengths)
        token = np.concatenate([state.tokens for state in states])
        device = logits.device
        row = to_device(rows_of, device)
        # An index into the flattened logits: half as much work as a pair of indices.
        index = to_device(rows_of * logits.shape[1] + token, device)
        count = to_device(np.concatenate([state.counts for state in states]), device)
        repetition, frequency, presence = (
            rows.tensor(name).squeeze(1).index_select(0, row)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        )
        value = logits.take(index)
        value = torch.where(value > 0, value / repetition, value * repetition)
        value -= frequency * count + presence * (count > 0)
        return logits.put_(index, value)
