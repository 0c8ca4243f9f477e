"""Choices and masks of logits, float32 [rows, vocab]; `Ops` of the plugin API says what is right.

argmax:  logits.argmax(-1)
draw:    (logits - best - (-(-(noise + 0.5) / 2**31).log1p()).log()).argmax(-1), in float64
top k:   logits[logits < logits.topk(k).values[-1]] = -inf, for each row
top p:   the same for the logit at which the sum of (exp(logit - best) * 2**40).round() gets to p
min p:   logits[logits < best + log(p)] = -inf

A program handles a part of a row, so that one row keeps many processors busy; what the parts found
is joined by the programs of the next launch. Logits are compared as whole numbers in their order,
where zeros are equal and NaN is above all. A threshold is found by its bits, a few per launch, from
how much is at or above each of the values that the bits may have: sums of whole numbers, which
depend on no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Variant, power_of_2

__all__ = [
    "VARIANTS",
    "add_to_tokens",
    "argmax",
    "divide",
    "draw",
    "keep_min_p",
    "keep_places",
    "keep_tokens",
    "keep_top_k",
    "keep_top_p",
    "set_tokens",
]

# Logits per program and its warps: where each logit is read once, and where it is looked at in
# parts of _CHUNK for each of the 2 ** _DIGIT values of the bits in question.
_READ = {"BLOCK": 2048}, 4
_SELECT = {"BLOCK": 2048, "CHUNK": 512, "DIGIT": 4}, 8
_JOIN_WARPS = 4
_EDITS = {"BLOCK": 256}, 4

_PASSES = 32 // _SELECT[0]["DIGIT"]

_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_INF_KEY = tl.constexpr(0x7F800000)  # of +inf
_LOWEST_KEY = tl.constexpr(-0x7F800001)  # of -inf
_NAN_KEY_64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NONE = tl.constexpr(-0x8000000000000000)

# Of splitmix64 and lowbias32, as in `Ops.draw`.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_64_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_64_B = tl.constexpr(0x94D049BB133111EB)
_MIX_32_A = tl.constexpr(0x7FEB352D)
_MIX_32_B = tl.constexpr(0x846CA68B)
_TOKENS = tl.constexpr(0x5BD1E995)


@triton.jit
def _key(x):
    """Return whole numbers in the order of float32 ones, which argmax and `<` go by."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # As bits: comparisons of subnormal numbers may take them for zeros.
    key = tl.where((bits & 0x7FFFFFFF) == 0, 0, key)
    return tl.where((bits & 0x7FFFFFFF) > _INF_KEY, _NAN_KEY, key)


@triton.jit
def _key_64(x):
    """Return the same of float64 ones."""
    bits = x.to(tl.int64, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, _NAN_KEY_64, key)


@triton.jit
def _value(key):
    """Return the float32 number of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _best(best_ptr, row, parts, PARTS: tl.constexpr):
    """Return the key and the token of a row's largest logit, from those of its parts."""
    part = tl.arange(0, PARTS)
    packed = tl.max(tl.load(best_ptr + row * parts + part, part < parts, other=_NONE), 0)
    return (packed >> 32).to(tl.int32), (packed & 0xFFFFFFFF) ^ _NAN_KEY


@triton.jit
def _is_finite(key):
    return (key > _LOWEST_KEY) & (key < _INF_KEY)


@triton.jit
def _best_kernel(logits_ptr, row_stride, vocab, best_ptr, BLOCK: tl.constexpr):
    """Write, for each part of a row, the largest logit's key and, below it, its token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + token, token < vocab, other=-float("inf"))
    # Of equal keys, the lowest token makes the largest number.
    packed = (_key(logits).to(tl.int64) << 32) | (token ^ _NAN_KEY)
    packed = tl.where(token < vocab, packed, _NONE)
    tl.store(best_ptr + row * tl.num_programs(1) + part, tl.max(packed, 0))


@triton.jit
def _argmax_kernel(best_ptr, parts, tokens_ptr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, token = _best(best_ptr, row, parts, PARTS)
    tl.store(tokens_ptr + row, token)


@triton.jit
def _splitmix_64(value):
    value += _GOLDEN
    value = (value ^ (value >> 30)) * _MIX_64_A
    value = (value ^ (value >> 27)) * _MIX_64_B
    return value ^ (value >> 31)


@triton.jit
def _noise(token, key):
    """Return log(E) of tokens, float64."""
    bits = token.to(tl.uint32) ^ _TOKENS
    bits = (bits ^ (bits >> 16)) * _MIX_32_A
    bits = (bits ^ (bits >> 15)) * _MIX_32_B
    bits = bits ^ (bits >> 16)
    bits = (bits ^ (key & 0xFFFFFFFF).to(tl.uint32)) * _MIX_32_A
    bits = (bits ^ (bits >> 15)) ^ (key >> 32).to(tl.uint32)
    bits = bits * _MIX_32_B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    # 1 - u is exact.
    return tl.log(-tl.log(1.0 - (bits.to(tl.float64) + 0.5) * (1.0 / 2147483648.0)))


@triton.jit
def _race_kernel(
    logits_ptr, row_stride, vocab, best_ptr, seeds_ptr, positions_ptr, greedy_ptr,
    scores_ptr, winners_ptr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write, for each part of a row, the key of the largest score, and its token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, _ = _best(best_ptr, row, tl.num_programs(1), PARTS)
    largest = tl.where(_is_finite(best), _value(best), 0.0).to(tl.float64)
    token = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + token, token < vocab, other=-float("inf"))
    score = logits.to(tl.float64) - largest
    if tl.load(greedy_ptr + row) == 0:
        seed = tl.load(seeds_ptr + row).to(tl.uint64)
        position = tl.load(positions_ptr + row).to(tl.uint64)
        score -= _noise(token, _splitmix_64(_splitmix_64(seed) + position))
    key = tl.where(token < vocab, _key_64(score), _NONE)
    most = tl.max(key, 0)
    place = row * tl.num_programs(1) + part
    tl.store(scores_ptr + place, most)
    tl.store(winners_ptr + place, tl.min(tl.where(key == most, token, _NAN_KEY), 0))


@triton.jit
def _winner_kernel(scores_ptr, winners_ptr, parts, tokens_ptr, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    key = tl.load(scores_ptr + row * parts + part, part < parts, other=_NONE)
    winner = tl.load(winners_ptr + row * parts + part, part < parts, other=_NAN_KEY)
    tl.store(tokens_ptr + row, tl.min(tl.where(key == tl.max(key, 0), winner, _NAN_KEY), 0))


@triton.jit
def _mask_below(logits_ptr, row_stride, vocab, row, part, threshold, BLOCK: tl.constexpr):
    token = part * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row * row_stride + token
    key = _key(tl.load(pointers, token < vocab, other=float("nan")))
    tl.store(pointers, -float("inf"), (token < vocab) & (key < threshold))


@triton.jit
def _min_p_kernel(
    logits_ptr, row_stride, vocab, best_ptr, log_p_ptr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, _ = _best(best_ptr, row, tl.num_programs(1), PARTS)
    threshold = _value(best) + tl.load(log_p_ptr + row)
    # The logarithm of less than 0 is NaN.
    if _is_finite(best) & (threshold == threshold):
        _mask_below(logits_ptr, row_stride, vocab, row, part, _key(threshold), BLOCK)


def _parts(logits: torch.Tensor, block: int) -> tuple[int, dict[str, int]]:
    parts = triton.cdiv(logits.shape[1], block)
    return parts, {"PARTS": power_of_2(parts)}


def _bests(logits: torch.Tensor) -> torch.Tensor:
    """Return the key and token of the largest logit of each part of each row, int64."""
    constants, num_warps = _READ
    parts, _ = _parts(logits, constants["BLOCK"])
    best = torch.empty((len(logits), parts), dtype=torch.int64, device=logits.device)
    _best_kernel[(len(logits), parts)](
        logits, logits.stride(0), logits.shape[1], best, **constants, num_warps=num_warps
    )
    return best


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's largest token, int64 [rows]; of equals, the lowest; NaN is the largest.

    Args:
        logits: float32 [rows, vocab] with contiguous rows, as for the functions below.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        best = _bests(logits)
        parts, joined = best.shape[1], power_of_2(best.shape[1])
        _argmax_kernel[(len(logits),)](best, parts, tokens, PARTS=joined, num_warps=_JOIN_WARPS)
    return tokens


def draw(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """Return a token of each row, int64 [rows], with the probabilities of its logits.

    Args:
        seeds: int64 [rows].
        positions: int64 [rows].
        greedy: bool [rows]; rows that get what `argmax` returns.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if not len(logits):
        return tokens
    constants, num_warps = _READ
    best = _bests(logits)
    parts, joined = _parts(logits, constants["BLOCK"])
    scores, winners = torch.empty_like(best), torch.empty_like(best, dtype=torch.int32)
    _race_kernel[(len(logits), parts)](
        logits, logits.stride(0), logits.shape[1], best, seeds.contiguous(),
        positions.contiguous(), greedy.contiguous().view(torch.uint8), scores, winners,
        **constants, **joined, num_warps=num_warps,
    )  # fmt: skip
    _winner_kernel[(len(logits),)](
        scores, winners, parts, tokens, **joined, num_warps=_JOIN_WARPS
    )
    return tokens


def keep_min_p(logits: torch.Tensor, p: torch.Tensor) -> None:
    """Set logits below each row's largest one + log(p) to -inf, in place.

    Args:
        p: float32 [rows, 1].
    """
    if not len(logits):
        return
    constants, num_warps = _READ
    best = _bests(logits)
    parts, joined = _parts(logits, constants["BLOCK"])
    _min_p_kernel[(len(logits), parts)](
        logits, logits.stride(0), logits.shape[1], best, p.float().log(), **constants, **joined,
        num_warps=num_warps,
    )  # fmt: skip


def _variants() -> tuple[Variant, ...]:
    """Return what is compiled for the vocabularies of Llama 3 and Qwen."""
    read, num_warps = _READ
    rows = {"logits_ptr": "*fp32", "row_stride": "i64:16", "vocab": "i32:16"}
    best, parts = {"best_ptr": "*i64"}, {"parts": "i32"}
    variants = []
    for vocab in (128256, 151936):
        joined = {"PARTS": power_of_2(triton.cdiv(vocab, read["BLOCK"]))}
        columns = {"seeds_ptr": "*i64", "positions_ptr": "*i64", "greedy_ptr": "*u8"}
        results = {"scores_ptr": "*i64", "winners_ptr": "*i32"}
        variants += [
            Variant(f"best logits, {vocab}", _best_kernel, rows | best, read, num_warps),
            Variant(f"argmax, {vocab}", _argmax_kernel,
                best | parts | {"tokens_ptr": "*i64"}, joined, _JOIN_WARPS),
            Variant(f"race, {vocab}", _race_kernel, rows | best | columns | results,
                read | joined, num_warps),
            Variant(f"winner, {vocab}", _winner_kernel,
                results | parts | {"tokens_ptr": "*i64"}, joined, _JOIN_WARPS),
            Variant(f"min-p, {vocab}", _min_p_kernel, rows | best | {"log_p_ptr": "*fp32"},
                read | joined, num_warps),
        ]  # fmt: skip
    return tuple(variants)


VARIANTS = _variants()
