"""Choices and masks of logits, float32 [rows, vocab]; `Ops` of the plugin API defines the results.

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

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Variant, power_of_2

__all__ = [
    "VARIANTS",
    "argmax",
    "divide",
    "draw",
    "keep_min_p",
    "keep_tokens",
    "keep_top_k",
    "keep_top_p",
    "put",
    "put_only",
]

# Logits of a program and its warps: where a logit is looked at once, and where it is once for each
# of the 2 ** DIGIT values of the bits in question.
_READ = {"BLOCK": 2048}, 4
_SELECT = {"BLOCK": 2048, "DIGIT": 4}, 8
_JOIN_WARPS = 4
_EDITS = {"BLOCK": 256}, 4

_TAKE = {"TAKE": True, "ADD": False}
_SET = {"TAKE": False, "ADD": False}
_ADD = {"TAKE": False, "ADD": True}

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
    """Return the key and the token of a row's largest logit, from the results of its parts."""
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


@triton.jit
def _is_on(best, setting, vocab, WEIGHTED: tl.constexpr):
    """Return whether a row is changed: its k or p asks for that, and its largest is finite."""
    if WEIGHTED:
        return _is_finite(best) & ((setting >= 1.0) == 0)
    return _is_finite(best) & (setting >= 1) & (setting < vocab)


@triton.jit
def _found(
    sums_ptr, found_ptr, goals_ptr, setting, row, parts, first, number,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, DIGIT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the threshold's bits that the passes before this one have found, in 0..2**32 - 1.

    Those of the last pass are kept for the next one by one program of the row, the first.

    Args:
        number: index of this pass.
        KIND: 0 or 1 for the first and the second pass, 2 for later ones.
    """
    if KIND == 0:
        return tl.zeros([], tl.int64)
    part, digit = tl.arange(0, PARTS)[:, None], tl.arange(0, 1 << DIGIT)
    rows = tl.num_programs(0)
    sums_ptr += ((number - 1) * rows + row) * parts << DIGIT
    sums = tl.load(sums_ptr + (part << DIGIT) + digit[None, :], part < parts, other=0)
    reached = tl.sum(sums, 0)
    goal = setting
    if WEIGHTED:
        if KIND == 1:
            total = tl.max(reached, 0)  # that of digit 0
            share = (setting.to(tl.float64) - 1e-6) * total.to(tl.float64)
            goal = tl.maximum(share.to(tl.int64), 1)
            if first:
                tl.store(goals_ptr + row, goal)
        else:
            goal = tl.load(goals_ptr + row)
    # They descend; that of digit 0 is all that is at or above the bits found before.
    last = tl.sum((reached >= goal).to(tl.int64), 0) - 1
    bits = last << (32 - number * DIGIT)
    if KIND > 1:
        bits += tl.load(found_ptr + (number - 2) * rows + row)
    if first:
        tl.store(found_ptr + (number - 1) * rows + row, bits)
    return bits


@triton.jit(do_not_specialize=["number"])
def _select_kernel(
    logits_ptr, row_stride, vocab, best_ptr, settings_ptr, sums_ptr, found_ptr, goals_ptr, number,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Write the sums at or above the thresholds with each of the values of the next bits.

    That is the number of a part's logits, or the sum of their weights.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    best, _ = _best(best_ptr, row, parts, PARTS)
    setting = tl.load(settings_ptr + row)
    if _is_on(best, setting, vocab, WEIGHTED):
        bits = _found(
            sums_ptr, found_ptr, goals_ptr, setting, row, parts, part == 0,
            number, KIND, WEIGHTED, DIGIT, PARTS,
        )  # fmt: skip
        token = part * BLOCK + tl.arange(0, BLOCK)
        pointers = logits_ptr + row * row_stride + token
        logits = tl.load(pointers, token < vocab, other=-float("inf"))
        if WEIGHTED:
            weight = tl.exp((logits - _value(best)).to(tl.float64)) * 1099511627776.0
            # To the nearest whole number, and to the even one of two.
            weight = ((weight + 4503599627370496.0) - 4503599627370496.0).to(tl.int64)
        else:
            weight = (token < vocab).to(tl.int32)
        key = _key(logits)
        digit = tl.arange(0, 1 << DIGIT)
        threshold = bits + (digit.to(tl.int64) << (32 - (number + 1) * DIGIT)) - 0x80000000
        # With the logits in the last dimension, no two threads have the same one.
        is_above = key[None, :] >= threshold.to(tl.int32)[:, None]
        sums = tl.sum(tl.where(is_above, weight[None, :], 0), 1)
        place = (number * tl.num_programs(0) + row) * parts + part
        tl.store(sums_ptr + (place << DIGIT) + digit, sums)


@triton.jit
def _mask_kernel(
    logits_ptr, row_stride, vocab, best_ptr, settings_ptr, sums_ptr, found_ptr, goals_ptr,
    PASSES: tl.constexpr, WEIGHTED: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    best, _ = _best(best_ptr, row, parts, PARTS)
    setting = tl.load(settings_ptr + row)
    if _is_on(best, setting, vocab, WEIGHTED):
        bits = _found(
            sums_ptr, found_ptr, goals_ptr, setting, row, parts, False,
            PASSES, 2, WEIGHTED, DIGIT, PARTS,
        )  # fmt: skip
        threshold = (bits - 0x80000000).to(tl.int32)
        _mask_below(logits_ptr, row_stride, vocab, row, part, threshold, BLOCK)


@triton.jit
def _keep_tokens_kernel(
    logits_ptr, row_stride, vocab, rows_ptr, masks_ptr, mask_stride, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks_ptr + index * mask_stride + token // 32, token < vocab, other=-1)
    is_masked = (word >> (token % 32)) & 1 == 0
    tl.store(logits_ptr + row * row_stride + token, -float("inf"), (token < vocab) & is_masked)


@triton.jit(do_not_specialize=["count"])
def _put_kernel(
    logits_ptr, row_stride, vocab, places_ptr, values_ptr, count, TAKE: tl.constexpr,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add or set values; with TAKE, read the logits instead."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + index, index < count, other=0)
    pointers = logits_ptr + place // vocab * row_stride + place % vocab
    if TAKE:
        tl.store(values_ptr + index, tl.load(pointers, index < count), index < count)
    else:
        value = tl.load(values_ptr + index, index < count)
        if ADD:
            value += tl.load(pointers, index < count)
        tl.store(pointers, value, index < count)


@triton.jit
def _fill_kernel(logits_ptr, row_stride, vocab, rows_ptr, BLOCK: tl.constexpr):
    row = tl.load(rows_ptr + tl.program_id(0))
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(logits_ptr + row * row_stride + token, -float("inf"), token < vocab)


@triton.jit
def _divide_kernel(logits_ptr, row_stride, vocab, divisors_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row * row_stride + token
    divisor = tl.load(divisors_ptr + row)
    logits = tl.load(pointers, token < vocab, other=0.0)
    tl.store(pointers, tl.div_rn(logits, tl.broadcast_to(divisor, [BLOCK])), token < vocab)


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
    _winner_kernel[(len(logits),)](scores, winners, parts, tokens, **joined, num_warps=_JOIN_WARPS)
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
        logits, logits.stride(0), logits.shape[1], best, p.float().contiguous().log(),
        **constants, **joined, num_warps=num_warps,
    )  # fmt: skip


def keep_top_k(logits: torch.Tensor, k: torch.Tensor) -> None:
    """Set the logits below each row's k-th largest one to -inf, in place.

    Args:
        k: int64 [rows, 1]; a row with another number than 1 to vocab - 1 stays as it is.
    """
    _keep_largest(logits, k.contiguous(), {"WEIGHTED": False})


def keep_top_p(logits: torch.Tensor, p: torch.Tensor) -> None:
    """Set the logits below each row's nucleus to -inf, in place.

    Args:
        p: float32 [rows, 1]; a row with 1 or more stays as it is.
    """
    _keep_largest(logits, p.float().contiguous(), {"WEIGHTED": True})


def _keep_largest(logits: torch.Tensor, settings: torch.Tensor, kind: dict[str, bool]) -> None:
    if not len(logits):
        return
    rows, vocab = logits.shape
    best = _bests(logits)
    select, num_warps = _SELECT
    parts, joined = _parts(logits, select["BLOCK"])
    assert parts == best.shape[1]
    shape = _PASSES, rows, parts, 1 << select["DIGIT"]
    sums = torch.empty(shape, dtype=torch.int64, device=logits.device)
    bits = torch.empty((_PASSES, rows), dtype=torch.int64, device=logits.device)
    goals = torch.empty(rows, dtype=torch.int64, device=logits.device)
    arguments = logits, logits.stride(0), vocab, best, settings, sums, bits, goals
    constants = select | joined | kind
    for step in range(_PASSES):
        _select_kernel[(rows, parts)](
            *arguments, step, KIND=min(step, 2), **constants, num_warps=num_warps
        )
    _mask_kernel[(rows, parts)](*arguments, PASSES=_PASSES, **constants, num_warps=num_warps)


def keep_tokens(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set the logits of some rows to -inf, in place, but for the tokens of a bitmask.

    Args:
        rows: int64 [n], each once.
        bitmask: int32 [n, ceil(vocab / 32)] with contiguous rows.
    """
    if len(rows):
        constants, num_warps = _READ
        parts, _ = _parts(logits, constants["BLOCK"])
        _keep_tokens_kernel[(len(rows), parts)](
            logits, logits.stride(0), logits.shape[1], rows.contiguous(), bitmask,
            bitmask.stride(0), **constants, num_warps=num_warps,
        )  # fmt: skip


def put(logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
    """Set some logits to values, or add these, in place.

    Args:
        places: int64 [n], row * vocab + token; each once.
        values: float32 [n].
    """
    _put(logits, places.contiguous(), values.contiguous(), _ADD if add else _SET)


def put_only(logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Set the logits of some rows to -inf, in place, but for some places.

    Args:
        places: as for `put`.
        rows: int64, those of the places.
    """
    if not len(rows):
        return
    places = places.contiguous()
    logits_at_places = torch.empty(len(places), dtype=torch.float32, device=logits.device)
    _put(logits, places, logits_at_places, _TAKE)
    constants, num_warps = _READ
    parts, _ = _parts(logits, constants["BLOCK"])
    _fill_kernel[(len(rows), parts)](
        logits, logits.stride(0), logits.shape[1], rows.contiguous(), **constants,
        num_warps=num_warps,
    )  # fmt: skip
    _put(logits, places, logits_at_places, _SET)


def _put(
    logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor, kind: dict[str, bool]
) -> None:
    constants, num_warps = _EDITS
    if len(places):
        _put_kernel[(triton.cdiv(len(places), constants["BLOCK"]),)](
            logits, logits.stride(0), logits.shape[1], places, values, len(places), **kind,
            **constants, num_warps=num_warps,
        )  # fmt: skip


def divide(logits: torch.Tensor, divisors: torch.Tensor) -> None:
    """Divide each row by its number, in place.

    Args:
        divisors: float32 [rows, 1].
    """
    if len(logits):
        constants, num_warps = _READ
        parts, _ = _parts(logits, constants["BLOCK"])
        _divide_kernel[(len(logits), parts)](
            logits, logits.stride(0), logits.shape[1], divisors.contiguous(), **constants,
            num_warps=num_warps,
        )  # fmt: skip


def _variants() -> Iterator[Variant]:
    """Yield the variants for the vocabularies of Llama 3 and Qwen."""
    rows = {"logits_ptr": "*fp32", "row_stride": "i64:16", "vocab": "i32:16"}
    best = {"best_ptr": "*i64"}
    join = {"parts": "i32", "tokens_ptr": "*i64"}
    scores = {"scores_ptr": "*i64", "winners_ptr": "*i32"}
    race = {"seeds_ptr": "*i64", "positions_ptr": "*i64", "greedy_ptr": "*u8"} | scores
    state = {"sums_ptr": "*i64", "found_ptr": "*i64", "goals_ptr": "*i64"}
    top_k = rows | best | {"settings_ptr": "*i64"} | state, {"WEIGHTED": False}
    top_p = rows | best | {"settings_ptr": "*fp32"} | state, {"WEIGHTED": True}

    def variant(
        name: str, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int
    ) -> Variant:
        return Variant(f"{name}, {vocab} logits", kernel, types, constants, warps)

    for vocab in (128256, 151936):
        parts = {"PARTS": power_of_2(triton.cdiv(vocab, _READ[0]["BLOCK"]))}
        read, num_warps = _READ[0] | parts, _READ[1]
        select, select_warps = _SELECT[0] | parts, _SELECT[1]
        yield variant("best", _best_kernel, rows | best, _READ[0], num_warps)
        yield variant("argmax", _argmax_kernel, best | join, parts, _JOIN_WARPS)
        yield variant("race", _race_kernel, rows | best | race, read, num_warps)
        yield variant("winner", _winner_kernel, scores | join, parts, _JOIN_WARPS)
        yield variant("min-p", _min_p_kernel, rows | best | {"log_p_ptr": "*fp32"}, read, num_warps)
        for name, (types, kind) in {"top-k": top_k, "top-p": top_p}.items():
            for step, label in enumerate(("first", "second", "later")):
                constants = select | kind | {"KIND": step}
                numbered = types | {"number": "i32"}
                yield variant(f"{name}, {label}", _select_kernel, numbered, constants, select_warps)
            constants = select | kind | {"PASSES": _PASSES}
            yield variant(f"{name}, mask", _mask_kernel, types, constants, select_warps)
    mask = {"rows_ptr": "*i64", "masks_ptr": "*i32", "mask_stride": "i64"}
    yield Variant("bitmask", _keep_tokens_kernel, rows | mask, *_READ)
    yield Variant("divide", _divide_kernel, rows | {"divisors_ptr": "*fp32"}, *_READ)
    yield Variant("fill", _fill_kernel, rows | {"rows_ptr": "*i64"}, *_READ)
    edits = rows | {"places_ptr": "*i64", "values_ptr": "*fp32", "count": "i32"}
    for name, kind in {"take": _TAKE, "set": _SET, "add": _ADD}.items():
        yield Variant(name, _put_kernel, edits, _EDITS[0] | kind, _EDITS[1])


VARIANTS = tuple(_variants())
