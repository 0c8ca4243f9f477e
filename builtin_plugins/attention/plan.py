"""The plan of a step for attention in torch: groups of sequences and their inputs.

Sequences of similar size are attended together, padded to the same numbers of queries and keys. A
prefix that several sequences share is attended once for all of them (as in Juravsky et al.,
arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from hardpoint.plugins import AttentionStep
from hardpoint.plugins.device import to_device

# A further group costs some calls per layer; it saves time from about this many padded tokens on.
_SPLIT_TOKENS = 2048
# Tokens that a group gathers on a CPU, and its scores per head: they stay near the cache, and
# the kept buffers small.
_GROUP_TOKENS = 1 << 14
_GROUP_SCORES = 1 << 17
# Attending a prefix apart costs some calls per layer; it saves time from about this many tokens on
# that need not be read.
_SHARED_TOKENS = 4096
_QUERIES = 128  # queries that are attended at once in float32

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Rows = slice | torch.Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive queries of a sequence, and the keys that any of them sees.

    Attributes:
        queries: range of the group's queries.
        keys: range of the group's keys.
        mask: additive, float32 [queries, columns], for the last so many keys; None if each query
            sees all keys.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class PaddedSequences:
    """Sequences that are attended together, padded to the same numbers of queries and keys.

    Attributes:
        rows: indices of the queries among the step's tokens, [count * queries].
        valid: which of them are not padding; None is all.
        targets: where the results of rows that are not padding belong.
        blocks: ids of the blocks to read, [count * width], sequence after sequence; None if the
            keys and values of `rows` are all that is read.
        count: number of sequences.
        queries: number of queries per sequence.
        skip: leading tokens of each sequence's first block that no query sees.
        length: number of tokens per sequence to use after those, padding included.
        mask: additive, [count or 1, 1, queries, length]; None if all is visible or, with several
            queries, causal.
        pieces: pieces of the computation in float32; empty to use scaled_dot_product_attention.
        folded_masks: results of `folded_mask`, by number of heads.
    """

    rows: Rows
    valid: torch.Tensor | None
    targets: Rows
    blocks: torch.Tensor | None
    count: int
    queries: int
    skip: int
    length: int
    mask: torch.Tensor | None
    pieces: tuple[Piece, ...]
    folded_masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def folded_mask(self, heads: int) -> torch.Tensor | None:
        """Return the mask of so many heads with all queries each, [..., heads * queries, length].

        It is made by the first layer that needs it.
        """
        if self.mask is None or self.queries == 1:
            return self.mask
        if heads not in self.folded_masks:
            self.folded_masks[heads] = self.mask.repeat(1, 1, heads, 1)
        return self.folded_masks[heads]


@dataclass(frozen=True, eq=False)
class Prefix:
    """Blocks that begin the tables of several sequences, or continue a prefix that these share.

    Attributes:
        rows: indices of the sequences' queries within `WindowPlan.merged`.
        blocks: ids of the blocks to read; every query sees all of their tokens.
    """

    rows: Rows
    blocks: torch.Tensor


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The attention plan of the layers with one sliding window.

    Attributes:
        decodes: groups of sequences with one query.
        chunks: groups of sequences with several queries.
        merged: rows of the sequences that share prefixes; None if there are none.
        only: the group of all rows, in order, if there is just one, of one query each.
        own: inputs besides the prefixes; `targets` are positions in `merged`.
        prefixes: each is merged with the attention over earlier columns.
    """

    decodes: tuple[PaddedSequences, ...]
    chunks: tuple[PaddedSequences, ...]
    merged: Rows | None
    only: PaddedSequences | None
    own: tuple[PaddedSequences, ...]
    prefixes: tuple[Prefix, ...]


@dataclass(frozen=True, eq=False)
class _QueryLayout:
    """Where the queries of a step belong: rows of the step, or positions in `WindowPlan.merged`.

    Attributes:
        begins: the first row of each sequence, [seqs].
        targets: the first target of each sequence, [seqs].
        own_starts: the first token of each sequence that is not of a shared prefix, [seqs].
    """

    begins: IntArray
    targets: IntArray
    own_starts: IntArray


class AttentionPlan:
    """The attention plan of a step; layers with the same window share indices and masks."""

    def __init__(self, step: AttentionStep, dtype: torch.dtype) -> None:
        """`dtype`: dtype of the queries and of the masks."""
        self.slots = step.slots
        self._step = step
        self._dtype = dtype
        self._device = step.block_table.device
        self._on_cpu = self._device.type == "cpu"
        self._counts = np.diff(step.query_starts)
        self._max_seq_len = int(step.seq_lens.max(initial=0))
        self._windows: dict[int | None, WindowPlan] = {}

    def for_window(self, window: int | None) -> WindowPlan:
        """Return the plan of layers with this window; computed once per window and step."""
        effective = None if window is None or window >= self._max_seq_len else window
        if effective not in self._windows:
            self._windows[effective] = self._plan(effective)
        return self._windows[effective]

    def _plan(self, window: int | None) -> WindowPlan:
        step, counts = self._step, self._counts
        prefixes = self._find_prefixes(window)
        own_starts = np.zeros_like(step.seq_lens)
        for sequences, _, end in prefixes:
            own_starts[sequences] = end * step.block_size
        shares = own_starts > 0
        begins = step.query_starts[:-1]
        layout = _QueryLayout(begins, begins, own_starts)
        single = np.arange(len(counts)) < step.num_single
        decodes = self._groups(np.flatnonzero(single & ~shares), window, layout)
        chunks = self._groups(np.flatnonzero(~single & ~shares), window, layout)
        if not prefixes:
            in_order = len(decodes) == 1 and not chunks and isinstance(decodes[0].rows, slice)
            return WindowPlan(decodes, chunks, None, decodes[0] if in_order else None, (), ())
        merged = np.flatnonzero(np.repeat(shares, counts))
        targets = np.cumsum(np.where(shares, counts, 0)) - counts
        layout = _QueryLayout(begins, targets, own_starts)
        suffixes = self._groups(np.flatnonzero(single & shares), window, layout)
        suffixes += self._groups(np.flatnonzero(~single & shares), window, layout)
        return WindowPlan(
            decodes,
            chunks,
            self._index(merged),
            None,
            suffixes,
            tuple(self._prefix(*prefix, targets) for prefix in prefixes),
        )

    def _find_prefixes(self, window: int | None) -> list[tuple[IntArray, int, int]]:
        """Return (sequences, first block, end) of each prefix to attend apart, outer ones first."""
        step = self._step
        # Elsewhere the table would have to come back from the device, and the host would wait.
        if not self._on_cpu or len(self._counts) < 2:
            return []
        visible = (step.seq_lens - self._counts) // step.block_size
        if window is not None:
            visible = np.where(step.seq_lens <= window, visible, 0)
        return _shared_prefixes(step.block_table.numpy(), visible, step.block_size)

    def _prefix(self, sequences: IntArray, first: int, end: int, targets: IntArray) -> Prefix:
        rows = _ranges(targets[sequences], self._counts[sequences])
        return Prefix(self._index(rows), self._step.block_table[int(sequences[0]), first:end])

    def _groups(
        self, sequences: IntArray, window: int | None, layout: _QueryLayout
    ) -> tuple[PaddedSequences, ...]:
        if not len(sequences):
            return ()
        queries = self._counts[sequences]
        lengths = self._step.seq_lens[sequences]
        oldest = layout.own_starts[sequences]
        if window is not None:
            oldest = np.maximum(oldest, lengths - queries + 1 - window)
        groups = _groups(lengths - oldest, queries, bounded=self._on_cpu)
        return tuple(
            self._group(sequences if group is None else sequences[group], window, layout)
            for group in groups
        )

    def _group(
        self, sequences: IntArray, window: int | None, layout: _QueryLayout
    ) -> PaddedSequences:
        step, size = self._step, self._step.block_size
        counts, totals = self._counts[sequences], step.seq_lens[sequences]
        queries = int(counts.max())
        # Padding repeats a sequence's own last query and last block, so that no block of another
        # sequence is read.
        offsets = np.minimum(np.arange(queries), counts[:, None] - 1)
        rows = layout.begins[sequences][:, None] + offsets
        positions = (totals - counts)[:, None] + offsets
        high = positions if step.sees is None else step.sees[rows]
        window = self._max_seq_len if window is None else window
        low = np.maximum(layout.own_starts[sequences][:, None], positions + (1 - window))
        first, last = low[:, 0] // size, (totals - 1) // size
        origin = first * size
        skip = int((low[:, 0] - origin).min())
        low, high = low - (origin + skip)[:, None], high - (origin + skip)[:, None]
        length = int(high.max()) + 1
        padded = int(counts.min()) < queries
        valid = np.arange(queries) < counts[:, None]
        targets = layout.targets[sequences][:, None] + offsets
        apart = layout.targets is not layout.begins
        in_pieces = not apart and self._in_pieces(counts)
        fresh = len(sequences) == 1 and queries > 1 and queries == totals[0]
        return PaddedSequences(
            rows=self._index(rows.ravel()),
            valid=self._tensor(np.flatnonzero(valid)) if padded else None,
            targets=self._index(targets[valid].ravel()),
            blocks=None if fresh else self._blocks(sequences, first, last),
            count=len(sequences),
            queries=queries,
            skip=skip,
            length=length,
            mask=None if in_pieces else self._mask(low, high, length, apart=apart),
            pieces=self._pieces(low[0], high[0]) if in_pieces else (),
        )

    def _blocks(self, sequences: IntArray, first: IntArray, last: IntArray) -> torch.Tensor:
        """Return blocks `first` to `last` of some sequences, [count * width], padded."""
        width = int((last - first).max()) + 1
        columns = np.minimum(first[:, None] + np.arange(width), last[:, None])
        table, rows = self._step.block_table, sequences[:, None]
        if self._on_cpu:  # numpy is three times as fast
            return torch.from_numpy(table.numpy()[rows, columns].ravel())
        return table[self._tensor(rows), self._tensor(columns)].flatten()

    def _in_pieces(self, counts: IntArray) -> bool:
        """Return whether a group is computed in float32, in pieces."""
        # On a CPU without instructions for them, 16 bits cost scaled_dot_product_attention more
        # than a conversion; on a CPU with such instructions, it still makes little use of them.
        long = len(counts) == 1 and int(counts[0]) >= _QUERIES
        return long and self._on_cpu and self._dtype.itemsize == 2

    def _mask(
        self, low: IntArray, high: IntArray, length: int, *, apart: bool
    ) -> torch.Tensor | None:
        """Return the mask of a group.

        Args:
            low: the first key that each query sees, [count, queries].
            high: the last one.
            length: number of keys.
            apart: whether the group's sequences share prefixes; a causal mask is made then.
        """
        count, queries = low.shape
        if not low.any():
            if (high == length - 1).all() and (apart or queries == 1):
                return None
            is_causal = count == 1 and queries == length and not apart
            if is_causal and (high == np.arange(length)).all():
                return None
        if (low == low[0]).all() and (high == high[0]).all():
            low, high = low[:1], high[:1]
        return self._additive(low, high, slice(0, length), self._dtype)[:, None]

    def _pieces(self, low: IntArray, high: IntArray) -> tuple[Piece, ...]:
        pieces = []
        for start in range(0, len(low), _QUERIES):
            part = slice(start, min(start + _QUERIES, len(low)))
            first, last = low[part], high[part]
            # All queries of the piece see the keys from first[-1] to last[0].
            begin, end, seen = int(first[0]), int(last[-1]) + 1, int(last[0]) + 1
            masked = slice(seen if first[-1] == begin else begin, end)
            mask = (
                self._additive(first, last, masked, torch.float32) if masked.start < end else None
            )
            pieces.append(Piece(part, slice(begin, end), mask))
        return tuple(pieces)

    def _additive(
        self, low: IntArray, high: IntArray, keys: slice, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the additive mask of some keys, [..., queries, keys]."""
        key = torch.arange(keys.start, keys.stop, device=self._device)
        hidden = key < self._tensor(low)[..., None]
        hidden |= key > self._tensor(high)[..., None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _index(self, rows: IntArray) -> Rows:
        """Return an index of rows; a slice if they are consecutive, which copies nothing."""
        if len(rows) == rows[-1] - rows[0] + 1 and (rows[1:] > rows[:-1]).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return self._tensor(rows)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return to_device(np.require(array, requirements=("C", "W")), self._device)


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Return start, start + 1, ... of each range, one after the other."""
    ends = np.cumsum(counts)
    ranges: IntArray = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return ranges


class _Box(NamedTuple):
    """The size of a group: its members are padded to `max_queries` and `max_length` tokens."""

    members: int
    max_length: int
    min_length: int
    max_queries: int
    min_queries: int
    used: int  # tokens times queries, without padding

    def add(self, length: int, queries: int) -> _Box:
        return _Box(
            self.members + 1,
            max(self.max_length, length),
            min(self.min_length, length),
            max(self.max_queries, queries),
            min(self.min_queries, queries),
            self.used + length * queries,
        )

    @property
    def padding(self) -> int:
        return self.members * self.max_length * self.max_queries - self.used

    @property
    def is_small(self) -> bool:
        tokens = self.members * self.max_length
        few_scores = self.max_queries == 1 or tokens * self.max_queries <= _GROUP_SCORES
        return self.members == 1 or (tokens <= _GROUP_TOKENS and few_scores)

    @property
    def is_dense(self) -> bool:
        similar = 2 * self.min_length >= self.max_length
        similar &= 2 * self.min_queries >= self.max_queries
        return similar and self.padding <= max(_SPLIT_TOKENS // 2, self.used // 8)


def _groups(
    lengths: IntArray, queries: IntArray | None = None, *, bounded: bool = True
) -> Sequence[IntArray | None]:
    """Split sequences into groups of similar size, to limit padding.

    Args:
        lengths: number of tokens that each sequence reads.
        queries: number of queries of each sequence; None is one.
        bounded: whether groups have a maximum size.

    Returns:
        Row indices of each group; [None] is one group of all rows in the given order. In a group
        the shortest is at least half the longest, and padding is limited.
    """
    if not len(lengths):
        return []
    queries = np.ones_like(lengths) if queries is None else queries
    largest = int(lengths.max()), int(lengths.min()), int(queries.max()), int(queries.min())
    whole = _Box(len(lengths), *largest, int((lengths * queries).sum()))
    if whole.padding <= _SPLIT_TOKENS and (whole.is_small or not bounded):
        return [None]
    order = np.lexsort((-lengths, -queries))
    empty = _Box(0, 0, 1 << 62, 0, 1 << 62, 0)
    box, borders = empty, [0]
    for position, row in enumerate(order.tolist()):
        length, number = int(lengths[row]), int(queries[row])
        box = box.add(length, number)
        if position and not (box.is_dense and (box.is_small or not bounded)):
            borders.append(position)
            box = empty.add(length, number)
    return [order[a:b] for a, b in pairwise([*borders, len(order)])]


def _shared_prefixes(
    table: IntArray, visible: IntArray, block_size: int
) -> list[tuple[IntArray, int, int]]:
    """Find the blocks that begin several sequences and that are worth attending apart.

    Args:
        table: the blocks of each sequence, [seqs, width].
        visible: the number of its blocks that all queries of the step see whole, [seqs].
        block_size: tokens per block.

    Returns:
        (sequences, first column, last column + 1) of each; a continuation comes later.
    """
    prefixes = []
    # Sequences that share the columns before `depth`; the columns before `done` are known.
    waiting = [(np.flatnonzero(visible), 0, 0)]
    while waiting:
        sequences, done, depth = waiting.pop()
        sequences = sequences[visible[sequences] > depth]
        reach = int(visible[sequences].max(initial=0)) - done
        if (len(sequences) - 1) * reach * block_size < _SHARED_TOKENS:
            continue
        for members in _equal(sequences, table[sequences, depth]):
            end = int(visible[members].min())
            equal = (table[members, depth:end] == table[members[0], depth:end]).all(0)
            end = end if equal.all() else depth + int(equal.argmin())
            pays = (len(members) - 1) * (end - done) * block_size >= _SHARED_TOKENS
            if pays:
                prefixes.append((members, done, end))
            waiting.append((members, end if pays else done, end))
    return prefixes


def _equal(sequences: IntArray, blocks: IntArray) -> Iterator[IntArray]:
    order = np.argsort(blocks, kind="stable")
    borders = np.flatnonzero(np.diff(blocks[order], prepend=-1, append=-1))
    for index in np.flatnonzero(np.diff(borders) > 1):
        yield sequences[order[borders[index] : borders[index + 1]]]
