"""The race by which `LogitsOps.draw` chooses a token: noise by seed, position and token id.

It is the reference that kernels are compared with, so every number of it is stated here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["mixed_seed", "token_noise"]

# Multipliers of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) and of lowbias32 (Wellons, "hash
# prospector"), as the signed numbers that torch's integers hold.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MIX_32 = (0x7FEB352D, 0x846CA68B - 2**32)

# Scales (whole number + 0.5) to (0, 1 - 2**-24]: float32 would round the largest ones up to 1.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)


def listed(logits: torch.Tensor, unmasked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unmasked logits of each row and their tokens, [rows, most of them in a row].

    Tokens are ascending; shorter rows end with -inf and token 0.
    """
    counts = unmasked.sum(-1)
    row, token = unmasked.nonzero(as_tuple=True)
    column = unmasked.new_ones(len(row)).cumsum(0) - 1 - (counts.cumsum(0) - counts)[row]
    shape = len(logits), max(int(counts.max()), 1)
    values = logits.new_full(shape, -math.inf)
    values[row, column] = logits[row, token]
    tokens = row.new_zeros(shape).int()
    tokens[row, column] = token.int()
    return values, tokens


def race(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
) -> torch.Tensor:
    """Return the column of each row's winner, int64 [rows]; `tokens` are the columns' token ids."""
    key = _mix_64(_mix_64(seeds) + positions)
    bits = _noise(tokens, key.int(), (key >> 32).int())
    best = logits.amax(-1, keepdim=True)
    best.masked_fill_(~best.isfinite(), 0)
    # float32 finds the two best, and float64 decides between them.
    unit = bits.float()
    unit += 0.5
    unit *= -_TO_UNIT
    scores = unit.log1p_().neg_().log_().masked_fill_(greedy[:, None], 0).neg_()
    scores += logits - best
    first = scores.argmax(-1, keepdim=True)
    second = scores.scatter_(1, first, -math.inf).argmax(-1, keepdim=True)
    pair = first.minimum(second), first.maximum(second)
    low, high = (
        _score(logits.gather(1, index), best, bits.gather(1, index), greedy) for index in pair
    )
    is_high = (high > low) | (high.isnan() & ~low.isnan())
    return pair[1].where(is_high, pair[0]).squeeze(1)


def _score(
    logits: torch.Tensor, best: torch.Tensor, bits: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """Return the tokens' scores in the race, float64 [rows, 1]."""
    noise = (-(bits.double() + 0.5) * 2.0**-31).log1p_().neg_().log_()
    return (logits.double() - best) - noise.masked_fill_(greedy[:, None], 0)


def token_noise(tokens: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the exponential random numbers of the race, float64; the least E / p wins.

    Args:
        tokens: int32 [n].
        seeds: as `mixed_seed` gives them, int64 [n].
        positions: output positions, int64 [n].
    """
    key = _mix_64(_mix_64(seeds) + positions)
    bits = _noise(tokens[:, None], key.int(), (key >> 32).int())[:, 0]
    return -(-(bits.double() + 0.5) * 2.0**-31).log1p()


def _noise(tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return hashes of 31 bits, int32 [rows, columns].

    Args:
        tokens: int32 [columns] or [rows, columns].
        low, high: the halves of the rows' keys, int32 [rows].
    """
    bits = _mix_32(tokens ^ 0x5BD1E995) ^ low[:, None]
    bits *= _MIX_32[0]
    bits ^= _shift(bits, 15)
    bits ^= high[:, None]
    bits *= _MIX_32[1]
    bits ^= _shift(bits, 16)
    bits &= 0x7FFFFFFF
    return bits


def _mix_64(value: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of int64 values; products wrap."""
    value = value + _GOLDEN
    value = (value ^ _shift(value, 30)) * _MIX_64[0]
    value = (value ^ _shift(value, 27)) * _MIX_64[1]
    return value ^ _shift(value, 31)


def _mix_32(value: torch.Tensor) -> torch.Tensor:
    """Return lowbias32 of int32 values; products wrap."""
    value = (value ^ _shift(value, 16)) * _MIX_32[0]
    value = (value ^ _shift(value, 15)) * _MIX_32[1]
    return value ^ _shift(value, 16)


def _shift(value: torch.Tensor, places: int) -> torch.Tensor:
    """Return a logical right shift; torch's own shift copies the sign."""
    width = 8 * value.element_size()
    return (value >> places) & ((1 << (width - places)) - 1)


def mixed_seed(seed: int | None, child_index: int) -> int:
    """Return the seed of a completion as a signed 64-bit int; each of a request has another."""
    mixed = ((seed or 0) + child_index * (_GOLDEN + 2**64)) & (2**64 - 1)
    return mixed - 2**64 if mixed >= 2**63 else mixed
