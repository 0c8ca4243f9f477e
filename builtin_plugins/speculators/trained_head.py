"""Base of trained drafting heads: chains of drafts from the hidden states of verified tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch

from hardpoint.builtin_plugins.models.heads.layer import HeadLayer
from hardpoint.plugins import (
    AttentionStep,
    ConfigError,
    DraftRequest,
    ForwardBatch,
    ModelError,
    Speculator,
    SpeculatorContext,
)
from hardpoint.plugins.device import to_device

from .drawing import draw

_ARRAYS = 12  # of the hidden size, of a token in a step


@dataclass(frozen=True)
class HeadTokens:
    """The tokens of a request in a step of a head.

    Attributes:
        block_ids: [blocks], int64; blocks of the request.
        cache_start: first position that the head sees, where a block begins.
        start: position of the first hidden state.
        token_ids: the token after each hidden state.
    """

    block_ids: np.ndarray
    cache_start: int
    start: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        """Position after the last hidden state."""
        return self.start + len(self.token_ids)


@dataclass
class _Draft:
    """A request that is drafted for.

    Attributes:
        tokens: its tokens in the step.
        hidden: hidden state before each of these tokens.
        drafts: drafted tokens.
    """

    request: DraftRequest
    tokens: HeadTokens
    hidden: torch.Tensor
    drafts: list[int] = field(default_factory=list)


class TrainedHead(Speculator):
    """Drafts with a layer over the hidden states of the engine's model.

    After each step, the layer reads the hidden states of the tokens that were computed, with the
    token after each. Its keys and values are in the engine's blocks, so that a cached prefix has
    them, and a rejected draft is overwritten. Then it drafts one token after the other.
    """

    contract = 1
    needs_hidden = True
    has_kv_cache = True

    def __init__(self, context: SpeculatorContext) -> None:
        """Load the head.

        Raises:
            ConfigError: it cannot be loaded, or does not fit the engine's model.
        """
        super().__init__(context)
        if context.open_head is None or context.loaded is None:
            raise ConfigError(f"plugin.{self.name}: its context was made by hand: no open_head")
        self._embed, self._model = context.loaded.model.embed, context.loaded.model
        try:
            opened = self.open()
        except ModelError as error:
            text = str(error).removeprefix("model: ")
            raise ConfigError(f"plugin.{self.name}.model: {text}") from error
        self.head, self._first_layer = cast(HeadLayer, opened.model), opened.first_layer
        sizes = {
            "hidden size": (self.head.hidden_size, context.hidden_size),
            "vocabulary size": (self.head.context.config.vocab_size, context.vocab_size),
        }
        for name, (size, expected) in sizes.items():
            if size != expected:
                raise ConfigError(
                    f"plugin.{self.name}.model: expected the {name} {expected} of the engine's "
                    f"model, got {size}"
                )
        self._cache: Any = None

    @abstractmethod
    def open(self) -> Any:
        """Return the loaded head, a `DraftingHead`.

        Raises:
            ModelError: it cannot be loaded.
        """

    @abstractmethod
    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocab_size] of results of the head."""

    def cache_allocated(self, cache: Any) -> None:
        """Take the engine's KV cache."""
        self._cache = cache

    def cache_released(self) -> None:
        """Drop the KV cache."""
        self._cache = None

    def start(self, request: DraftRequest) -> bool:
        """Return whether the head drafts for a request: not with prompt embeddings."""
        return None not in request.prompt_token_ids

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[list[int]]:
        """Write keys and values of the new hidden states, and return drafts."""
        drafts = [draft for draft in map(self._begin, requests) if draft is not None]
        drafts.sort(key=lambda draft: len(draft.tokens.token_ids) > 1)  # single tokens first
        by_id = {draft.request.request_id: draft.drafts for draft in drafts}
        active = drafts
        while active:
            output = self._run(active)
            ends = accumulate(len(draft.tokens.token_ids) for draft in active)
            last = list(zip(active, ends, strict=True))
            last = [(d, end - 1) for d, end in last if len(d.drafts) < self._limit(d)][:budget]
            if not last:
                break
            rows = output[to_device([row for _, row in last], output.device)]
            active = [draft for draft, _ in last]
            budget -= self._draw(rows, active)
            following = self.head.following(rows)
            for index, draft in enumerate(active):
                draft.hidden = following[index : index + 1]
                draft.tokens = replace(
                    draft.tokens, start=draft.tokens.end, token_ids=draft.drafts[-1:]
                )
            active = [draft for draft in active if len(draft.drafts) < self._limit(draft)]
            active = active[: max(budget, 0)]
        return [by_id.get(request.request_id, []) for request in requests]

    def _begin(self, request: DraftRequest) -> _Draft | None:
        """Return the new tokens of a request; None without any."""
        if not request.state or request.hidden is None or self._cache is None:
            return None
        prompt, output = request.prompt_token_ids, request.output_token_ids
        first = max(request.hidden_start, request.cache_start)
        room = len(request.block_ids) * self._cache.block_size
        end = min(request.hidden_start + len(request.hidden), len(prompt) + len(output) - 1, room)
        if first >= end:
            return None
        token_ids = [*prompt[first + 1 : end + 1], *output[max(0, first + 1 - len(prompt)) :]]
        blocks = np.asarray(request.block_ids, dtype=np.int64)  # once for all drafts
        tokens = HeadTokens(blocks, request.cache_start, first, token_ids[: end - first])
        rows = request.hidden[first - request.hidden_start : end - request.hidden_start]
        return _Draft(request, tokens, self.head.combine(rows))

    def _limit(self, draft: _Draft) -> int:
        """Return the most drafts of a request: all but the last are written to its blocks."""
        room: int = len(draft.tokens.block_ids) * self._cache.block_size - draft.tokens.end
        return min(draft.request.limit, len(draft.drafts) + 1 + room)

    def _run(self, drafts: Sequence[_Draft]) -> torch.Tensor:
        """Return the results of the head for the tokens of a step, [tokens, hidden_size]."""
        device, first = self.context.device, self._first_layer
        step, positions = plan_step([d.tokens for d in drafts], self._cache.block_size, device)
        steps = [replace(step, group=group) for group in range(self._cache.num_groups)]
        attend_all = self._cache.attend(steps)

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            angles: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return cast(torch.Tensor, attend_all(first + layer, q, k, v, angles))

        ids = [token for draft in drafts for token in draft.tokens.token_ids]
        token_ids = to_device(ids, device, torch.int64)
        hidden = torch.cat([draft.hidden for draft in drafts])
        inputs = torch.cat([self._embed(token_ids), hidden], -1)
        return self.head.forward(ForwardBatch(token_ids, positions, attend, inputs))

    def _draw(self, rows: torch.Tensor, drafts: Sequence[_Draft]) -> int:
        requests = [draft.request for draft in drafts]
        positions = [len(d.request.output_token_ids) + len(d.drafts) for d in drafts]
        tokens = draw(self.context.ops, self.logits(rows), requests, positions)
        for draft, token in zip(drafts, tokens, strict=True):
            draft.drafts.append(token)
        return len(tokens)

    def memory(self) -> int:
        """Return the bytes of the arrays of a step."""
        size = self.head.hidden_size * self.head.context.dtype.itemsize
        return self.context.max_step_tokens * size * (_ARRAYS + len(self.hidden_layers))

    def close(self) -> None:
        """Close the head."""
        self.head.close()


def plan_step(
    sequences: Sequence[HeadTokens], block_size: int, device: torch.device
) -> tuple[AttentionStep, torch.Tensor]:
    """Return the attention of a step, and the position of each token.

    Args:
        sequences: sequences with a single token first.
        block_size: tokens per block.
        device: device of the head.
    """
    counts = [len(sequence.token_ids) for sequence in sequences]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    lens = np.array([s.end - s.cache_start for s in sequences], dtype=np.int64)
    table = np.zeros((len(sequences), -(-int(lens.max()) // block_size)), dtype=np.int64)
    positions = np.empty(int(starts[-1]), dtype=np.int64)
    slots = np.empty_like(positions)
    for row, sequence in enumerate(sequences):
        rows = slice(starts[row], starts[row + 1])
        blocks = sequence.block_ids
        positions[rows] = places = np.arange(sequence.start, sequence.end)
        slots[rows] = blocks[places // block_size] * block_size + places % block_size
        seen = blocks[sequence.cache_start // block_size :][: table.shape[1]]
        table[row, : len(seen)] = seen
    step = AttentionStep(
        query_starts=starts,
        seq_lens=lens,
        num_single=counts.count(1),
        block_table=to_device(table, device),
        slots=to_device(slots, device),
        block_size=block_size,
    )
    return step, to_device(positions, device)
