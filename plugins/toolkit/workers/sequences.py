"""Sequences of tokens of a loaded model, with a KV cache of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from hardpoint.plugins import AttentionStep, ForwardBatch, ModelError
from hardpoint.plugins.device import to_device
from hardpoint.plugins.model import Attend

__all__ = ["LoadedSequences", "main_sequences"]


class SequencesModel(Protocol):
    """A loaded model with attention in all layers."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states, as `Model.forward`."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, as `Model.compute_logits`."""


class SequencesAttention(Protocol):
    """The attention of the layers of a model.

    Attributes:
        bytes_per_block: bytes of a block in all layers together.
        groups: groups of layers with block tables of their own.
        states: keeps the states of layers without attention; None if there are none.
    """

    bytes_per_block: int

    @property
    def groups(self) -> Sequence[Any]:
        """Groups of layers with block tables of their own."""

    @property
    def states(self) -> Any:
        """Keeps the states of layers without attention; None if there are none."""

    def allocate(self, num_blocks: int) -> list[Any]:
        """Return the KV cache of each layer."""

    def of_step(self, caches: Sequence[Any], steps: Sequence[AttentionStep]) -> Attend:
        """Return the attention of a step."""


class LoadedSequences:
    """Sequences of a model by name; see `SequenceModel`."""

    def __init__(
        self,
        model: SequencesModel,
        attention: SequencesAttention,
        num_blocks: int,
        close: Callable[[], None],
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Allocate the cache; there are no sequences.

        Args:
            close: closes the model and its backends.
        """
        self._model, self._attention, self._close = model, attention, close
        self._num_blocks, self._block_size, self._device = num_blocks, block_size, device
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.cache_bytes = num_blocks * attention.bytes_per_block
        self.wake_up()

    def wake_up(self) -> None:
        """Allocate the cache; there are no sequences."""
        self._caches = self._attention.allocate(self._num_blocks)
        self._free = list(range(self._num_blocks))[::-1]
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def sleep(self) -> None:
        """Release the cache."""
        self._caches = []

    def length(self, name: str) -> int:
        """Return the number of tokens of a sequence; 0 if there is none."""
        return self._lengths.get(name, 0)

    def reserve(self, name: str, count: int) -> bool:
        """Return whether a sequence can get so many more tokens; the room is its own then."""
        length, held = self.length(name) + count, len(self._blocks.get(name, ()))
        missing = max(0, -(-length // self._block_size) - held)
        if length > self.max_model_len or missing > len(self._free):
            return False
        self._blocks.setdefault(name, []).extend(self._free.pop() for _ in range(missing))
        return True

    def cut(self, name: str, length: int) -> None:
        """Forget the tokens of a sequence after the first `length`; all of them with 0."""
        if length <= 0:
            self._lengths.pop(name, None)
        elif name in self._lengths:
            self._lengths[name] = min(length, self._lengths[name])
        held = self._blocks.get(name, [])
        num_kept = -(-max(length, 0) // self._block_size)
        self._free += held[num_kept:][::-1]
        del held[num_kept:]
        if not held:
            self._blocks.pop(name, None)

    @torch.inference_mode()
    def extend(
        self, token_ids: Mapping[str, Sequence[int]], *, all_rows: bool = False
    ) -> torch.Tensor:
        """Append tokens to sequences; return the logits after each, float32 [sequences, vocab].

        Args:
            token_ids: new tokens, by the name of the sequence.
            all_rows: whether to return the logits after each token, [tokens, vocab].

        Raises:
            ValueError: no tokens for a sequence, or more than there is room for.
        """
        names = sorted(token_ids, key=lambda name: len(token_ids[name]) > 1)  # one token first
        starts = np.zeros(len(names) + 1, dtype=np.int64)
        lens = np.zeros(len(names), dtype=np.int64)
        for row, name in enumerate(names):
            count = len(token_ids[name])
            if not count or not self.reserve(name, count):
                raise ValueError(f"{name}: {count} tokens, for which there is no room")
            lens[row] = self._lengths[name] = self.length(name) + count
            starts[row + 1] = starts[row] + count
        batch = self._batch(names, token_ids, starts, lens)
        hidden = self._model.forward(batch)
        order = {name: row for row, name in enumerate(names)}
        ends = [int(starts[order[name] + 1]) for name in token_ids]
        if all_rows:
            counts = [len(token_ids[name]) for name in token_ids]
            spans = zip(ends, counts, strict=True)
            rows = [row for end, count in spans for row in range(end - count, end)]
        else:
            rows = [end - 1 for end in ends]
        chosen = hidden[to_device(rows, self._device)]
        return self._model.compute_logits(chosen).to(torch.float32, copy=True)

    def _batch(
        self,
        names: Sequence[str],
        token_ids: Mapping[str, Sequence[int]],
        starts: np.ndarray[Any, np.dtype[np.int64]],
        lens: np.ndarray[Any, np.dtype[np.int64]],
    ) -> ForwardBatch:
        """Return the inputs of a step.

        Args:
            names: sequences, with single tokens first.
            token_ids: new tokens of each.
            starts: first token of each sequence, and the number of all tokens.
            lens: length of each sequence, the new tokens included.
        """
        size = self._block_size
        table = np.zeros((len(names), -(-int(lens.max()) // size)), dtype=np.int64)
        positions = np.empty(int(starts[-1]), dtype=np.int64)
        slots = np.empty_like(positions)
        for row, (name, (start, end)) in enumerate(zip(names, pairwise(starts), strict=True)):
            held = np.asarray(self._blocks[name], dtype=np.int64)
            table[row, : len(held)] = held[: table.shape[1]]  # more of them may be reserved
            new_positions = np.arange(lens[row] - (end - start), lens[row])
            positions[start:end] = new_positions
            slots[start:end] = held[new_positions // size] * size + new_positions % size
        ids = [token for name in names for token in token_ids[name]]
        step = AttentionStep(
            query_starts=starts,
            seq_lens=lens,
            num_single=sum(len(token_ids[name]) == 1 for name in names),
            block_table=to_device(table, self._device),
            slots=to_device(slots, self._device),
            block_size=size,
        )
        attend = self._attention.of_step(self._caches, [step] * len(self._attention.groups))
        place = self._device
        return ForwardBatch(to_device(ids, place, torch.int64), to_device(positions, place), attend)

    def close(self) -> None:
        """Close the model and its backends."""
        self._close()


def main_sequences(
    model: SequencesModel,
    attention: SequencesAttention,
    num_tokens: int,
    *,
    num_ranks: int,
    available: int,
    block_size: int,
    num_layers: int | None,
    max_layers: int,
    **sizes: Any,
) -> LoadedSequences:
    """Return sequences of the model of a worker, with a KV cache for so many tokens.

    Args:
        num_ranks: number of ranks that share the model.
        available: bytes for the cache.
        num_layers: number of layers to compute, which `attention` has; None is all.
        max_layers: number of layers of the model.
        sizes: as for `LoadedSequences`.

    Raises:
        ModelError: the model cannot have any, or their cache does not fit.
    """
    if num_ranks > 1:
        raise ModelError(
            f"model: expected one rank for sequences of the engine's own model, got {num_ranks}"
        )
    if attention.states is not None:
        raise ModelError("model: expected attention in all layers, the engine's has states in some")
    if num_layers is not None and not 1 <= num_layers <= max_layers:
        raise ModelError(f"num_layers: expected 1..{max_layers}, got {num_layers}")
    num_blocks = -(-num_tokens // block_size)
    if (needed := num_blocks * attention.bytes_per_block) > available:
        raise ModelError(
            f"model: the cache of {num_tokens} tokens needs {needed} bytes, "
            f"{available} are available"
        )
    sizes["block_size"] = block_size
    if num_layers is None:
        return LoadedSequences(model, attention, num_blocks, lambda: None, **sizes)
    first = _FirstLayers(model, num_layers)
    sequences = LoadedSequences(first, attention, num_blocks, lambda: None, **sizes)
    sequences.extend({"trial": [0]})
    sequences.cut("trial", 0)
    return sequences


class _FirstLayers:
    """The first layers of a model, its last norm and its output layer."""

    def __init__(self, model: SequencesModel, num_layers: int) -> None:
        self._model, self._num_layers = model, num_layers

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            angles: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if layer >= self._num_layers:
                raise ModelError(
                    f"num_layers: expected a model that computes {self._num_layers} layers if "
                    f"ForwardBatch.num_layers says so, it computes layer {layer}"
                )
            return batch.attend(layer, q, k, v, angles)

        return self._model.forward(replace(batch, attend=attend, num_layers=self._num_layers))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)
