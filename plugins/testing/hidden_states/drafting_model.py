"""Sequences of a random model, for speculators that open a model in the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from hardpoint.plugins import AttentionStep, ForwardBatch, ModelError
from hardpoint.plugins.model import Attend
from hardpoint.toolkit.workers.sequences import LoadedSequences

_BLOCK_SIZE = 16
_ROWS = 997  # of different logits


class ModelOfTests:
    """A model with logits that depend on the last two tokens; opens sequences of itself."""

    version = 0

    def __init__(
        self, vocab_size: int, max_model_len: int, num_layers: int, device: torch.device
    ) -> None:
        """Draw the logits."""
        generator = torch.Generator().manual_seed(2)
        self._logits = 3 * torch.randn(_ROWS, vocab_size, generator=generator).to(device)
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._num_layers, self._device = num_layers, device

    def open(
        self,
        model: Any,
        num_tokens: int,
        *,
        vocab_size: int | None = None,
        same_tokens: bool = False,  # noqa: ARG002
        num_layers: int | None = None,
    ) -> LoadedSequences:
        """Return sequences of the model, as `ModelOpener`, whatever its name.

        Raises:
            ModelError: it has another vocabulary, or fewer layers.
        """
        if vocab_size not in (None, self._vocab_size):
            raise ModelError(
                f"model: {model!r} has a vocabulary of {self._vocab_size} tokens, expected "
                f"{vocab_size}"
            )
        if num_layers is not None and not 1 <= num_layers <= self._num_layers:
            raise ModelError(f"num_layers: expected 1..{self._num_layers}, got {num_layers}")
        return LoadedSequences(
            self,
            _TokensOfSlots(self._device),
            -(-num_tokens // _BLOCK_SIZE),
            lambda: None,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            block_size=_BLOCK_SIZE,
            device=self._device,
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return a number for the last two tokens, [tokens, 1]."""
        ids = batch.token_ids
        return batch.attend(0, ids, ids, ids).unsqueeze(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of numbers."""
        logits: torch.Tensor = self._logits[hidden[:, 0] % _ROWS]
        return logits


class _TokensOfSlots:
    """The tokens of each slot of a cache, instead of keys and values."""

    bytes_per_block = _BLOCK_SIZE * 8
    groups = (None,)
    states = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_blocks: int) -> list[Any]:
        """Return the cache of one layer."""
        size = num_blocks * _BLOCK_SIZE
        return [torch.zeros(size, dtype=torch.int64, device=self._device)]

    def of_step(self, caches: Sequence[Any], steps: Sequence[AttentionStep]) -> Attend:
        """Return a function that mixes the last two tokens of each position."""
        (cache,), (step,) = caches, steps

        def attend(
            layer: int,  # noqa: ARG001
            q: torch.Tensor,
            k: torch.Tensor,  # noqa: ARG001
            v: torch.Tensor,  # noqa: ARG001
            angles: torch.Tensor | None = None,  # noqa: ARG001
        ) -> torch.Tensor:
            cache[step.slots] = q
            before = []
            bounds = pairwise(step.query_starts.tolist())
            for row, (start, end) in enumerate(bounds):
                length = int(step.seq_lens[row])
                places = torch.arange(length - (end - start), length, device=self._device) - 1
                blocks = step.block_table[row][places.clamp_min(0) // _BLOCK_SIZE]
                before.append(blocks * _BLOCK_SIZE + places.clamp_min(0) % _BLOCK_SIZE)
            mixed: torch.Tensor = 31 * q + cache[torch.cat(before)]
            return mixed

        return attend
