"""Sequences of tokens of a loaded model, with a KV cache of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from hardpoint.plugins import AttentionStep, ForwardBatch, ModelError
from hardpoint.plugins.device import to_device
from hardpoint.plugins.model import Attend

__all__ = ["LoadedSequences", "main_sequences"]


_RECOMPUTED = 512
"""Tokens of a step that computes sequences again, of all of them together."""


class SequencesModel(Protocol):
    """A loaded model with attention in all layers."""

    @property
    def version(self) -> int:
        """Number of times that its weights were replaced."""

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


@dataclass
class _Sequence:
    """A sequence, or room that is reserved for one.

    Attributes:
        tokens: tokens with keys and values in the cache.
        blocks: blocks of the cache, for these tokens and reserved ones.
        version: version of the weights of the keys and values.
    """

    version: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


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
        self._sequences: dict[str, _Sequence] = {}

    def sleep(self) -> None:
        """Release the cache."""
        self._caches = []

    def length(self, name: str) -> int:
        """Return the number of tokens of a sequence; 0 if there is none."""
        sequence = self._sequences.get(name)
        return 0 if sequence is None else len(sequence.tokens)

    def reserve(self, name: str, count: int) -> bool:
        """Return whether a sequence can get so many more tokens; the room is its own then."""
        if count > self._room(name):
            return False
        sequence = self._sequences.setdefault(name, _Sequence(self._model.version))
        num_blocks = -(-(len(sequence.tokens) + count) // self._block_size)
        missing = max(0, num_blocks - len(sequence.blocks))
        sequence.blocks.extend(self._free.pop() for _ in range(missing))
        return True

    def cut(self, name: str, length: int) -> None:
        """Forget the tokens of a sequence after the first `length`; all of them with 0."""
        if (sequence := self._sequences.get(name)) is None:
            return
        length = max(length, 0)
        num_blocks = -(-length // self._block_size)
        self._free += sequence.blocks[num_blocks:][::-1]
        del sequence.tokens[length:], sequence.blocks[num_blocks:]
        if not sequence.blocks:
            del self._sequences[name]

    def _room(self, name: str) -> int:
        """Return how many more tokens a sequence can get."""
        sequence = self._sequences.get(name) or _Sequence(0)
        num_blocks = len(sequence.blocks) + len(self._free)
        return min(num_blocks * self._block_size, self.max_model_len) - len(sequence.tokens)

    @torch.inference_mode()
    def extend(
        self, token_ids: Mapping[str, Sequence[int]], *, all_rows: bool = False
    ) -> torch.Tensor:
        """Append tokens to sequences; return the logits after each, float32 [sequences, vocab].

        Keys and values of replaced weights are computed again before.

        Args:
            token_ids: new tokens, by the name of the sequence.
            all_rows: whether to return the logits after each token, [tokens, vocab].

        Raises:
            ValueError: no tokens for a sequence, or more than there is room for.
        """
        for name, tokens in token_ids.items():
            if not len(tokens) or not self.reserve(name, len(tokens)):
                raise ValueError(
                    f"token_ids[{name!r}]: expected 1 to {self._room(name)} tokens, as many as the "
                    f"cache has room for, got {len(tokens)}"
                )
        sequences, new = [self._sequences[name] for name in token_ids], [*token_ids.values()]
        self._recompute(sequences)
        hidden, ends = self._forward(sequences, [len(s.tokens) for s in sequences], new)
        for sequence, tokens in zip(sequences, new, strict=True):
            sequence.tokens += tokens
        rows = [end - 1 for end in ends]
        if all_rows:
            spans = zip(ends, new, strict=True)
            rows = [row for end, tokens in spans for row in range(end - len(tokens), end)]
        chosen = hidden[to_device(rows, self._device)]
        return self._model.compute_logits(chosen).to(torch.float32, copy=True)

    def _recompute(self, sequences: Sequence[_Sequence]) -> None:
        """Compute keys and values again, if the weights were replaced."""
        version = self._model.version
        stale = [item for item in sequences if item.version != version]
        longest = max((len(item.tokens) for item in stale), default=0)
        size = max(1, _RECOMPUTED // max(1, len(stale)))
        for first in range(0, longest, size):
            parts = [item for item in stale if len(item.tokens) > first]
            tokens = [item.tokens[first : first + size] for item in parts]
            self._forward(parts, [first] * len(parts), tokens)
        for sequence in stale:
            sequence.version = version

    def _forward(
        self,
        sequences: Sequence[_Sequence],
        firsts: Sequence[int],
        token_ids: Sequence[Sequence[int]],
    ) -> tuple[torch.Tensor, list[int]]:
        """Compute tokens of sequences, and their keys and values.

        Args:
            sequences: sequences with room for the tokens.
            firsts: position of the first token of each.
            token_ids: tokens of each, at least one.

        Returns:
            Hidden states, and for each sequence the row after its last one.
        """
        size, place = self._block_size, self._device
        counts = np.asarray([len(tokens) for tokens in token_ids], dtype=np.int64)
        order = np.argsort(counts > 1, kind="stable")  # attention has single tokens first
        starts = np.concatenate(([0], np.cumsum(counts[order])))
        lens = (np.asarray(firsts, dtype=np.int64) + counts)[order]
        table = np.zeros((len(order), -(-int(lens.max()) // size)), dtype=np.int64)
        positions = np.empty(int(starts[-1]), dtype=np.int64)
        slots = np.empty_like(positions)
        for row, (number, (start, end)) in enumerate(zip(order, pairwise(starts), strict=True)):
            blocks = np.asarray(sequences[number].blocks, dtype=np.int64)
            table[row, : len(blocks)] = blocks[: table.shape[1]]  # more of them may be reserved
            new_positions = np.arange(firsts[number], lens[row])
            positions[start:end] = new_positions
            slots[start:end] = blocks[new_positions // size] * size + new_positions % size
        step = AttentionStep(
            query_starts=starts,
            seq_lens=lens,
            num_single=int((counts == 1).sum()),
            block_table=to_device(table, place),
            slots=to_device(slots, place),
            block_size=size,
        )
        attend = self._attention.of_step(self._caches, [step] * len(self._attention.groups))
        ids = to_device([i for number in order for i in token_ids[number]], place, torch.int64)
        hidden = self._model.forward(ForwardBatch(ids, to_device(positions, place), attend))
        ends = np.empty(len(order), dtype=np.int64)
        ends[order] = starts[1:]
        return hidden, ends.tolist()

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
    if num_blocks > (limit := available // attention.bytes_per_block):
        raise ModelError(
            f"num_tokens: expected at most {limit * block_size}, for which memory has room, got "
            f"{num_tokens}"
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

    @property
    def version(self) -> int:
        return self._model.version

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
                    f"num_layers: expected None for a model that ignores ForwardBatch.num_layers "
                    f"and computes layer {layer}, got {self._num_layers}"
                )
            return batch.attend(layer, q, k, v, angles)

        return self._model.forward(replace(batch, attend=attend, num_layers=self._num_layers))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)
