"""Sequences of tokens: their blocks in a KV cache, and plain attention over them."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from hardpoint.plugins import AttentionStep, KVSpec
from hardpoint.toolkit.kv_codes import CODE_DTYPES, dequantize_heads, quantize_heads, rotate_heads

Counts = Sequence[tuple[str, int]]
"""The sequences of a step and how many tokens each has in it; those with a single token first."""

QueryAttention = Callable[[KVSpec, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one query: `(spec, query, keys, values) -> output`.

`query` and output are [num_heads, head_size], `keys` and `values` [visible, num_kv_heads,
head_size], all float64.
"""


def softmax_attention(
    spec: KVSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return softmax(scale * q . k) . v of one query, capped, with sinks; see `QueryAttention`."""
    # Query heads that share a key head are neighbors.
    grouped = query.view(spec.num_kv_heads, -1, spec.head_size)
    scores = grouped @ keys.permute(1, 2, 0) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores).view(*scores.shape[:2], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return (weights @ values.transpose(0, 1)).view(spec.num_heads, spec.head_size)


def ordered(counts: Counts) -> Counts:
    """Return a step's sequences in the order of the engine: single tokens first."""
    return sorted(counts, key=lambda item: item[1] != 1)


class SequenceBlocks:
    """Hands out blocks of a cache to sequences, and lays out steps."""

    def __init__(
        self, num_blocks: int, block_size: int, device: torch.device, *, shuffled: bool
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._free = list(range(num_blocks))
        if shuffled:
            random.Random(0).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self._num_passed: dict[str, int] = {}  # blocks, from the first, that were handed out again
        self._group, self._window = 0, sys.maxsize

    def groups(self, windows: Sequence[int | None]) -> list[SequenceBlocks]:
        """Return one for each group of layers; all hand out these blocks.

        Args:
            windows: windows of the groups. Blocks that a window has passed are handed out again.
        """
        result = [copy.copy(self) for _ in windows]
        for group, (blocks, window) in enumerate(zip(result, windows, strict=True)):
            blocks._tables, blocks._lengths, blocks._num_passed = {}, {}, {}
            blocks._group, blocks._window = group, window or sys.maxsize
        return result

    def release(self, name: str) -> None:
        """Forget a sequence; its blocks are the next that are handed out."""
        self._free[:0] = self._tables.pop(name, [])[self._num_passed.pop(name, 0) :]
        self._lengths.pop(name, None)

    def rewind(self, name: str, length: int) -> None:
        """Forget the tokens of a sequence after the first ones; it keeps its blocks."""
        self._lengths[name] = length

    def _release_passed(self, name: str) -> None:
        """Release the blocks that no token of the next step sees; the table still names them."""
        passed = max(self._lengths.get(name, 0) - self._window + 1, 0) // self._block_size
        before = self._num_passed.get(name, 0)
        self._free[:0] = self._tables.get(name, [])[before:passed]
        self._num_passed[name] = max(before, passed)

    def step(self, counts: Counts, ahead: Sequence[int] = ()) -> AttentionStep:
        """Return the step in which each sequence gets so many tokens more.

        Args:
            counts: the sequences and their tokens.
            ahead: how many later tokens each token sees; empty: none does.
        """
        starts, lengths, slots, positions = [0], [], [], list[int]()
        size = self._block_size
        for name, _ in counts:
            self._release_passed(name)
        for name, count in counts:
            old = self._lengths.get(name, 0)
            self._lengths[name] = old + count
            table = self._tables.setdefault(name, [])
            while len(table) * size < old + count:
                table.append(self._free.pop(0))
            slots += [table[p // size] * size + p % size for p in range(old, old + count)]
            positions += range(old, old + count)
            starts.append(starts[-1] + count)
            lengths.append(old + count)
        tables = [self._tables[name] for name, _ in counts]
        block_table = torch.zeros(len(counts), max(map(len, tables)), dtype=torch.int64)
        for row, table in enumerate(tables):
            block_table[row, : len(table)] = torch.tensor(table)
        return AttentionStep(
            query_starts=np.array(starts),
            seq_lens=np.array(lengths),
            num_single=sum(count == 1 for _, count in counts),
            block_table=block_table.to(self._device),
            slots=torch.tensor(slots, device=self._device),
            block_size=size,
            group=self._group,
            sees=np.array(positions) + np.array(ahead) if ahead else None,
        )


Read = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""How keys and values are read: `(keys, values, num_new) -> keys, values`, all of the shape
[tokens, num_kv_heads, head_size]; the last `num_new` tokens are those of the step."""


def read_uncoded(
    keys: torch.Tensor, values: torch.Tensor, _num_new: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as they are; see `Read`."""
    return keys, values


def read_coded(cache_dtype: str) -> Read:
    """Return how keys and values are read from a cache of `kv_cache.dtype`."""

    def read(
        keys: torch.Tensor, values: torch.Tensor, _num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decoded = (
            dequantize_heads(*quantize_heads(side, cache_dtype), torch.float64)
            for side in (rotate_heads(keys), values)
        )
        return rotate_heads(next(decoded)).double(), next(decoded)

    return read


def mistaken_sinks(spec: KVSpec) -> Iterator[tuple[str, KVSpec]]:
    """Yield common mistakes with the sinks of a layer, if it has some, and their specs."""
    if spec.sinks is None:
        return
    yield "the result without the sinks", replace(spec, sinks=None)
    scaled = replace(spec, sinks=spec.sinks * spec.scale)
    yield "the result with sinks that are scaled as scores are", scaled
    reverse = replace(spec, sinks=spec.sinks.flip(0))
    yield "the result with the sinks of the heads in reverse order", reverse


def misread_codes(cache_dtype: str) -> Iterator[tuple[str, Read]]:
    """Yield common mistakes in caches of codes, with their descriptions."""
    if cache_dtype not in CODE_DTYPES:
        return
    read = read_coded(cache_dtype)
    yield "the result for keys and values without codes", read_uncoded

    def read_own_uncoded(
        keys: torch.Tensor, values: torch.Tensor, num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old, new = len(keys) - num_new, (keys, values)
        sides = read(keys, values, num_new)
        keys, values = (torch.cat((a[:old], b[old:])) for a, b in zip(sides, new, strict=True))
        return keys, values

    yield (
        "the result for codes of earlier steps, and for this step's keys and values without codes",
        read_own_uncoded,
    )

    def read_whole_tokens(
        keys: torch.Tensor, values: torch.Tensor, _num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = (
            dequantize_heads(
                *quantize_heads(side.flatten(1)[:, None], cache_dtype), torch.float64
            ).view_as(side)
            for side in (rotate_heads(keys), values)
        )
        return rotate_heads(next(whole)).double(), next(whole)

    yield "the result for one scale for all heads of a token", read_whole_tokens

    def read_swapped(
        keys: torch.Tensor, values: torch.Tensor, _num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = zip(
            *(quantize_heads(side, cache_dtype) for side in (rotate_heads(keys), values)),
            strict=True,
        )
        misread = rotate_heads(dequantize_heads(codes[0], scales[1], torch.float64)).double()
        return misread, read(keys, values, 0)[1]

    def read_unrotated(
        keys: torch.Tensor, values: torch.Tensor, _num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        unrotated = dequantize_heads(*quantize_heads(keys, cache_dtype), torch.float64)
        return unrotated, read(keys, values, 0)[1]

    yield "the result for keys that are not rotated before they are coded", read_unrotated

    yield "the result for keys with the scales of values", read_swapped


class WholeHistory:
    """One layer's keys and values of each sequence, whole and in float64, and plain attention."""

    def __init__(self, spec: KVSpec, attention: QueryAttention, cache_dtype: str = "auto") -> None:
        """Start without sequences; `cache_dtype` is `kv_cache.dtype`."""
        self.spec = spec
        self._cache_dtype = cache_dtype
        self._read = read_coded(cache_dtype) if cache_dtype in CODE_DTYPES else read_uncoded
        self._attention = attention
        self._ahead: Sequence[int] = ()
        self._keys: dict[str, torch.Tensor] = {}
        self._values: dict[str, torch.Tensor] = {}

    def release(self, name: str) -> None:
        """Forget a sequence."""
        self._keys.pop(name, None)
        self._values.pop(name, None)

    def append(
        self, counts: Counts, k: torch.Tensor, v: torch.Tensor, ahead: Sequence[int] = ()
    ) -> None:
        """Append the keys and values of a step, [tokens, num_kv_heads, head_size].

        Args:
            counts: the sequences and their tokens.
            k: keys.
            v: values.
            ahead: how many later tokens each token sees; empty: none does.
        """
        self._ahead = ahead
        for side, tensor in ((self._keys, k), (self._values, v)):
            rows, start = tensor.detach().double().cpu(), 0
            for name, count in counts:
                part = rows[start : start + count]
                side[name] = torch.cat((side[name], part)) if name in side else part.clone()
                start += count

    def attend(self, counts: Counts, q: torch.Tensor) -> torch.Tensor:
        """Return float64 [tokens, num_heads, head_size] of a step that was appended.

        With `KVSpec.value_size`, that of heads.
        """
        return self._attend(counts, q, self.spec)

    def with_mistakes(self, counts: Counts, q: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the results of common mistakes, with their descriptions."""
        right, spec, all_later = self.attend(counts, q), self.spec, [sys.maxsize // 2] * len(q)
        yield "the rows of the step in reverse order", right.flip(0)
        yield "the heads in reverse order", right.flip(1)
        yield (
            "the result with later tokens too (not causal)",
            self._attend(counts, q, spec, ahead=all_later),
        )
        if self._ahead:
            yield (
                "the result for tokens that see no later ones",
                self._attend(counts, q, spec, ahead=()),
            )
            moved = self._attend(counts, q, spec, moves=True)
            yield "the result for windows that begin later, with the last token in sight", moved
        if spec.window is not None:
            yield (
                "the result for an unlimited window",
                self._attend(counts, q, replace(spec, window=None)),
            )
            for window, description in (
                (spec.window + 1, "one more"),
                (spec.window - 1, "one less"),
            ):
                if window:
                    mistaken = self._attend(counts, q, replace(spec, window=window))
                    yield f"the result for a window of {description} than spec.window", mistaken
        step_only = self._attend(counts, q, spec, cached=False)
        yield "the result for this step's tokens alone, without earlier steps", step_only
        for scale, description in (
            (1.0, "no scale"),
            (spec.head_size**-0.5, "the scale of head_size"),
        ):
            mistaken = self._attend(counts, q, replace(spec, scale=scale))
            yield f"the result with {description} instead of spec.scale", mistaken
        if spec.softcap is not None:
            uncapped = self._attend(counts, q, replace(spec, softcap=None))
            yield "the result of scores without the soft cap", uncapped
            # Of softcap * tanh(s / softcap) * scale, where s is the score that is not scaled.
            cap = replace(spec, softcap=spec.softcap * spec.scale)
            yield (
                "the result of a soft cap on scores that are not scaled",
                self._attend(counts, q, cap),
            )
        for description, other in mistaken_sinks(spec):
            yield description, self._attend(counts, q, other)
        for description, read in misread_codes(self._cache_dtype):
            yield description, self._attend(counts, q, spec, read=read)
        if 1 < spec.num_kv_heads < spec.num_heads:
            heads = [head % spec.num_kv_heads for head in range(spec.num_heads)]
            mistaken = self._attend(counts, q, spec, kv_heads=heads)
            yield (
                "the result for query head i with key head i % num_kv_heads, not with i // group",
                mistaken,
            )

    def _attend(
        self,
        counts: Counts,
        q: torch.Tensor,
        spec: KVSpec,
        *,
        cached: bool = True,
        kv_heads: Sequence[int] | None = None,
        read: Read | None = None,
        ahead: Sequence[int] | None = None,
        moves: bool = False,
    ) -> torch.Tensor:
        """Return the attention of a step, with the mistakes that the arguments ask for.

        Args:
            q: its queries.
            cached: whether it sees the tokens of earlier steps.
            kv_heads: the key head of each query head.
            ahead: how many later tokens each token sees; None: those of the step.
            moves: whether windows move with the last token that is seen.
        """
        further = iter((self._ahead if ahead is None else ahead) or [0] * len(q))
        outputs, queries = [], iter(q.detach().double().cpu())
        for name, count in counts:
            keys, values = (read or self._read)(self._keys[name], self._values[name], count)
            total = len(keys)
            if kv_heads is not None:
                keys, values = keys[:, kv_heads], values[:, kv_heads]
                spec = replace(spec, num_kv_heads=spec.num_heads)
            for length in range(total - count + 1, total + 1):
                end = length + next(further)
                last = end if moves else length
                first = 0 if spec.window is None else max(last - spec.window, 0)
                seen = slice(first if cached else max(first, total - count), end)
                outputs.append(self._attention(spec, next(queries), keys[seen], values[seen]))
        attended, size = torch.stack(outputs), spec.value_size
        return attended if size is None else attended[..., -size:]
