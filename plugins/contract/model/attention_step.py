"""Layers with attention, and the tokens of a step for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["AttentionStep", "KVSpec"]


@dataclass(frozen=True)
class KVSpec:
    """One attention layer.

    Layers with specs that differ in windows and sinks only have caches of one shape: layers of
    several windows may share a cache with different blocks. Specs are compared without sinks.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_size: elements of a head.
        scale: multiplies the scores.
        window: sliding window in tokens, the token itself included; None is unlimited.
        softcap: a score s, scaled, becomes softcap * tanh(s / softcap) before it is masked; None
            leaves it. Backends without `softcaps` cannot run such a layer.
        sinks: float32 [num_heads] on the device, weights of the model: a score per head of a key
            that every query sees, with the value 0, neither scaled nor capped (attention
            sinks, arXiv:2309.17453, as gpt-oss learns them). The tensor stays where it is; its
            elements come with the weights, and may change with them. None is without. Backends
            without `has_sinks` cannot run such a layer.
        value_size: values are the last so many elements of the keys, as in multi-head latent
            attention (arXiv:2405.04434): `attend` gets the keys as values too, and each head of its
            result has so many elements. None: values are of their own, of `head_size`.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False, repr=False)
    value_size: int | None = None


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Positions of the tokens of one step. Sequences with a single query come first.

    Layers with a sliding window may have blocks of their own. They are a group then, and a step has
    one of these for each group, which differ in `block_table`, `slots` and `group` alone. Blocks
    that the group's window has passed are no longer the sequence's: they may have been written to.

    Blocks that a step part has released (`Request.releases`) are left out of `block_table` and of
    `seq_lens`: the sequence is as long as its other blocks. Keys were rotated by their positions.

    A step that `Ops.record` records for later ones, of the sizes in `Ops.record_sizes`, has one
    query per sequence. Its `seq_lens` are the most that such steps may have; its tensors stay where
    they are, and have the values of the step that runs. Some of its sequences may be padding, of
    length 0 in `lens`: their slot is -1, where nothing is written, and their result is not read.
    Its `block_table` has room for the longest sequence; unused entries are any blocks.

    Attributes:
        query_starts: int [seqs + 1]; tokens of sequence i are query_starts[i]:query_starts[i+1].
        seq_lens: int [seqs]; length of each sequence, the step's tokens included.
        num_single: number of sequences with exactly one query.
        block_table: int64 [seqs, maximum blocks of a sequence]; unused entries are 0.
        slots: int64 [tokens]; cache position of each token's K and V, block * block_size + offset.
        block_size: tokens per block.
        group: index of the group.
        sees: int [tokens]; position of the last token that each token sees: its own, or a later one
            of its sequence in this step, never before the preceding token's. None: its own.
        arguments: arguments of each sequence's request for the backend, of its `Arguments` or
            `Prepared`. Empty: no sequence has any, so all have the defaults.
        on_device: `starts` and `lens`; None: they are copied when they are needed.
    """

    query_starts: np.ndarray[Any, np.dtype[np.int64]]
    seq_lens: np.ndarray[Any, np.dtype[np.int64]]
    num_single: int
    block_table: torch.Tensor
    slots: torch.Tensor
    block_size: int
    group: int = 0
    sees: np.ndarray[Any, np.dtype[np.int64]] | None = None
    arguments: Sequence[Any] = ()
    on_device: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    @property
    def starts(self) -> torch.Tensor:
        """`query_starts` on the device, int64."""
        return self._tensors[0]

    @property
    def lens(self) -> torch.Tensor:
        """`seq_lens` on the device, int64."""
        return self._tensors[1]

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.on_device is not None:
            return self.on_device
        from hardpoint.plugins.process.device import to_device  # noqa: PLC0415 - the contract is imported without torch

        device = self.block_table.device
        return to_device(self.query_starts, device), to_device(self.seq_lens, device)
