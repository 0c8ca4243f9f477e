"""Attention that detects wrong contents in slots of the KV cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from hardpoint.plugins import AttentionStep, KVSpec
from hardpoint.testing.scripted import HISTORY_BASE, HISTORY_MODULUS, HistoryAttention

_TOKEN_BITS = 32


@dataclass
class SlotWitness:
    """The records of `WitnessAttention` in this process.

    Attributes:
        mismatches: wrong reads of steps that have ended.
    """

    mismatches: list[str] = field(default_factory=list)
    _step: list[tuple[int, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget everything."""
        self.mismatches, self._step = [], []

    def note(self, block: int, mismatch: str) -> None:
        """Keep a mismatch of the running step."""
        self._step.append((block, mismatch))

    def drop_step(self) -> None:
        """Drop the running step because its result is lost."""
        self._step = []

    def end_step(self, failed: Collection[int]) -> None:
        """Record the wrong reads of the step, except permitted ones.

        Args:
            failed: blocks that the connector reports as not loaded; their results are dropped.
        """
        self.mismatches += [text for block, text in self._step if block not in failed]
        self._step = []


WITNESS = SlotWitness()
"""Of the engine in this process."""


class WitnessAttention(HistoryAttention):
    """Stores with each token the hash of the history that it saw, as keys of a real model depend.

    All contents read must have been computed from the tokens before it. Otherwise a mismatch is
    recorded, and all later results differ. Correct results are the same as of `HistoryAttention`.
    """

    contract = 1
    kv_layout = "history hash and token id, [blocks, block_size]"
    devices = ("cpu",)

    def attend(
        self,
        spec: KVSpec,  # noqa: ARG002
        cache: torch.Tensor,
        plan: AttentionStep,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """Read each sequence's history, check it, and append the step's tokens."""
        tokens, slots = k[:, 0, 0].long().tolist(), plan.slots.tolist()
        starts, lengths = plan.query_starts.tolist(), plan.seq_lens.tolist()
        flat, result = cache.view(-1), torch.empty_like(q)
        unwritten = set(slots)
        pending = list(range(len(lengths)))
        while pending:
            waiting = []
            for index in pending:
                first, end = starts[index], starts[index + 1]
                old = lengths[index] - (end - first)
                read = _slots(plan, index, old)
                if unwritten.intersection(read):  # another sequence of the step computes them
                    waiting.append(index)
                    continue
                value = self._read(flat[read].tolist(), read)
                for query in range(first, end):
                    value = _next(value, tokens[query])
                    flat[slots[query]] = (value << _TOKEN_BITS) | tokens[query]
                    result[query, 0, 0], result[query, 0, 1] = value >> 16, value & 0xFFFF
                unwritten.difference_update(slots[first:end])
            if len(waiting) == len(pending):
                unwritten.clear()  # sequences that wait for each other read what is there
            pending = waiting
        return result

    def _read(self, history: list[int], slots: list[int]) -> int:
        """Return the hash of a history; note the first slot that is not of this history."""
        value, is_right = 0, True
        for position, held in enumerate(history):
            known, token = held >> _TOKEN_BITS, held & ((1 << _TOKEN_BITS) - 1)
            value = _next(value, token)
            if known == value:
                continue
            if is_right:
                block, offset = divmod(slots[position], self.context.block_size)
                WITNESS.note(block, _mismatch(position, block, offset, held))
                is_right = False
            value = (value + known) % HISTORY_MODULUS
        return value


def _mismatch(position: int, block: int, offset: int, held: int) -> str:
    content = "nothing" if not held else "keys and values of another history"
    return (
        f"for position {position} a request read slot {offset} of block {block}, it holds {content}"
    )


def _next(value: int, token: int) -> int:
    return (value * HISTORY_BASE + token + 1) % HISTORY_MODULUS


def _slots(plan: AttentionStep, index: int, count: int) -> list[int]:
    size = plan.block_size
    blocks = plan.block_table[index, : -(-count // size)].tolist()
    return [blocks[position // size] * size + position % size for position in range(count)]
