"""The worker half of the KV canary: writes and checks an entry for each slot of each layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hardpoint.plugins import SchedulerOutput
from hardpoint.plugins.step_part import CacheObserver, ForwardWrapper, HiddenStates, WorkerStep
from hardpoint.plugins.worker_half import WorkerHalfContext

from .chains import Ints, KnownChains, TokenChain, entries_of
from .messages import Finding

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.forward import Forward, ForwardStep, PackedInputs
    from hardpoint.plugins.step_part.worker_data import AllocatedCache, StepRows


@dataclass
class _Sequence:
    """A request of a step, as planned.

    Attributes:
        chain: its tokens.
        start, end: first position of the step, and the one after the last.
        entries: expected entries of all positions up to the last one of the step, as far as tokens
            are known.
    """

    chain: TokenChain
    start: int
    end: int
    entries: Ints


class CanaryWorker(WorkerStep, HiddenStates, ForwardWrapper, CacheObserver):
    """Follows the tokens of requests by plans and samples, and compares the cache with them.

    Entries are written from the inputs that the attention gets, before the layers write keys and
    values; they are read through its block tables, after the layers have read keys and values.
    """

    packs = True

    def __init__(self, context: WorkerHalfContext) -> None:
        self._device = context.device
        self._cache: AllocatedCache | None = None
        self._entries: list[torch.Tensor] = []  # per group, int64 [layers, slots]
        self._chains = KnownChains(0, 0)  # until there is a cache
        self._step: list[_Sequence] = []  # in the order of the attention
        self._packed: PackedInputs | None = None
        self._findings: dict[str, Finding] = {}

    # The cache

    def cache_allocated(self, cache: AllocatedCache) -> None:
        """Allocate an entry per slot and layer."""
        import torch  # noqa: PLC0415 - features load without it

        self._cache, self._chains = cache, KnownChains(cache.max_model_len, cache.num_groups)
        slots = cache.num_blocks * cache.block_size
        self._entries = [
            torch.zeros(cache.group_of.count(group), slots, dtype=torch.int64, device=self._device)
            for group in range(cache.num_groups)
        ]

    def cache_released(self) -> None:
        """Forget the entries with the keys and values."""
        self._cache, self._entries = None, []

    def block_memory(self) -> Sequence[torch.Tensor]:
        """Return the entries of each layer by block, for parts that move blocks."""
        import torch  # noqa: PLC0415 - features load without it

        assert self._cache is not None, "cache_allocated() comes first"
        rows = [iter(entries) for entries in self._entries]
        size = self._cache.block_size
        return [next(rows[g]).view(-1, size).view(torch.uint8) for g in self._cache.group_of]

    # Tokens, by plans and samples

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:  # noqa: ARG002
        """Take the requests of the step, with the tokens that they should have."""
        self._step, self._packed, self._findings = [], None, {}
        self._chains.begin(plan)
        step, computed = [], plan.num_computed_tokens()
        # Sequences with a single token come first. The model runs in no step of requests that no
        # plan had in full.
        for request_id, count in sorted(plan.num_scheduled_tokens.items(), key=_is_longer):
            if (chain := self._chains.get(request_id)) is None:
                return
            start, drafts = computed[request_id], plan.draft_token_ids.get(request_id, ())
            end = start + count
            step.append(_Sequence(chain, start, end, chain.entries(drafts)[:end]))
        self._step = step  # last, so that nothing is written if this fails

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Append the tokens of the step."""
        self._chains.sampled(token_ids)

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        self._chains.finished(request_ids)

    # Entries

    def around_model(self, forward: Forward) -> Forward:
        """Return `forward` with the entries written before it."""

        def run(step: ForwardStep) -> torch.Tensor:
            if step.packed is not None and self._step and self._entries:
                self._write(step.packed)
                self._packed = step.packed
            return forward(step)

        return run

    def _write(self, packed: PackedInputs) -> None:
        spans = pairwise(packed.starts.tolist())
        tokens, lens = packed.token_ids.cpu().numpy(), packed.lens.tolist()
        written = np.zeros_like(tokens)
        for sequence, (first, end), length in zip(self._step, spans, lens, strict=False):
            assert self._cache is not None, "cache_allocated() comes first"
            released = sequence.chain.num_released * self._cache.block_size
            start = length + released - (end - first)  # `hidden` checks it
            known = min(start, sequence.chain.length)
            sums = sequence.chain.sums_of(tokens[first:end], known)
            written[first:end] = entries_of(sums, start)
        values = packed.positions.new_tensor(written)
        for entries, slots in zip(self._entries, packed.slots, strict=True):
            entries[:, slots] = values

    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> None:  # noqa: ARG002
        """Compare the reads of the attention with the plan.

        Raises:
            RuntimeError: the step has other sequences than the plan.
        """
        if (packed := self._packed) is None:
            return
        names = [sequence.chain.request_id for sequence in self._step]
        if names != list(rows.request_ids):
            raise RuntimeError(f"the step has {list(rows.request_ids)}, expected {names}")
        lens = packed.lens.tolist()
        for group in range(len(self._entries)):
            table = packed.tables[group].cpu().numpy()
            for row, sequence in enumerate(self._step):
                if sequence.chain.request_id not in self._findings:
                    self._check(sequence, group, table[row], lens[row])

    def _check(self, sequence: _Sequence, group: int, table: Ints, length: int) -> None:
        """Compare the entries of a sequence with the entries that the plan implies.

        Args:
            sequence: as planned.
            group: KV cache group.
            table: block table of the attention, [blocks].
            length: tokens of the sequence as the attention sees it.
        """
        import torch  # noqa: PLC0415 - features load without it

        cache, chain = self._cache, sequence.chain
        assert cache is not None, "cache_allocated() comes first"
        window, size = cache.windows[group], cache.block_size
        first = 0 if window is None else max(0, sequence.start - window + 1)
        released = chain.num_released * size
        rows = np.arange(first, min(len(sequence.entries) - released, len(table) * size))
        columns, offsets = rows // size, rows % size
        positions = np.asarray(chain.places, dtype=np.int64)[columns] * size + offsets
        slots = table[columns] * size + offsets
        planned = np.asarray(chain.block_ids[group], dtype=np.int64)[columns]
        actual = self._entries[group][:, torch.from_numpy(slots).to(self._device)].cpu().numpy()
        expected = sequence.entries[positions]
        wrong = (actual != expected).any(axis=0) | (planned != table[columns])
        if wrong.any():
            at = int(wrong.argmax())
            column = actual[:, at]
            other = column[column != expected[at]]
            block = int(table[columns[at]])
            where = f"block {block} of request {chain.request_id!r}"
            if len(self._entries) > 1:
                where += f" in KV cache group {group}"
            if block != planned[at]:
                where += f", in place of block {planned[at]},"
            position = int(positions[at])
            cause = (
                self._chains.describe(int(other[0]), chain, position) if len(other) else "its own"
            )
            text = f"{where} has keys and values at position {position} that are {cause}"
        elif length + released != sequence.end:
            block = int(table[(sequence.end - released - 1) // size])
            text = (
                f"block {block} of request {chain.request_id!r} is filled up to position "
                f"{length + released - 1}, expected {sequence.end - 1}, as planned"
            )
        else:
            return
        self._findings[chain.request_id] = Finding(text, block)

    def report(self) -> bytes | None:
        """Return the findings of the step."""
        self._step, self._packed = [], None
        return msgspec.msgpack.encode(self._findings) if self._findings else None


def _is_longer(scheduled: tuple[str, int]) -> bool:
    return scheduled[1] > 1
