"""Operations on logits, compared with the plain torch of `Ops`."""

from __future__ import annotations

import math
from typing import Any

import torch

from hardpoint.plugins import Ops

from . import ops_rules as rules

__all__ = ["KINDS", "check_choice", "check_in_place", "check_mask", "described", "draw_logits"]

KINDS = ("plain", "ties", "flat", "few", "one", "nothing but -inf", "NaN", "+inf", "subnormal")
"""Of rows of logits."""


def draw_logits(rows: int, vocab_size: int, shift: int, device: torch.device) -> torch.Tensor:
    """Return logits of several kinds, from a number on; part of a wider tensor."""
    generator = torch.Generator().manual_seed(shift)
    logits = torch.randn(rows, vocab_size + 3, generator=generator) * 3
    for row, logit in enumerate(logits):
        order = torch.randperm(vocab_size, generator=generator)
        kind = KINDS[(row + shift) % len(KINDS)]
        if kind == "ties":
            logit.round_()
        elif kind == "flat":
            logit.zero_()
        elif kind in ("few", "one"):
            logit[order[1 if kind == "one" else 5 :]] = -math.inf
        elif kind == "nothing but -inf":
            logit.fill_(-math.inf)
        elif kind == "subnormal":
            logit *= 1e-40
        elif kind != "plain":
            logit[order[:2]] = math.nan if kind == "NaN" else math.inf
    return logits.to(device)[:, :vocab_size]


def check_choice(ops: Ops, logits: torch.Tensor, name: str, *columns: torch.Tensor) -> None:
    """Check the tokens that a method returns, for all rows and for each alone."""
    before = logits.clone()
    expected: torch.Tensor = getattr(Ops, name)(ops, logits, *columns)
    for rows in (slice(None), *(slice(row, row + 1) for row in range(len(logits)))):
        result = getattr(ops, name)(logits[rows], *(column[rows] for column in columns))
        wanted = expected[rows]
        if not (
            isinstance(result, torch.Tensor)
            and result.dtype == torch.int64
            and result.shape == wanted.shape
            and result.device == logits.device
        ):
            raise rules.RESULT.violation(
                f"{name} returned {described(result)} for logits {list(before[rows].shape)}, "
                f"expected torch.int64 {list(wanted.shape)} on {logits.device}"
            )
        if not torch.equal(result, wanted):
            row = int((result != wanted).nonzero()[0])
            raise rules.TOKENS.violation(
                f"{name} returned token {int(result[row])} for {_row_of(before[rows], row)}, "
                f"expected {int(wanted[row])}"
            )
    if not torch.equal(logits.view(torch.int32), before.view(torch.int32)):
        raise rules.IN_PLACE.violation(f"{name} changed logits")


def check_mask(ops: Ops, logits: torch.Tensor, name: str, column: torch.Tensor, *more: int) -> None:
    """Check the logits that a method leaves, for all rows and for each alone."""
    expected = logits.clone()
    getattr(Ops, name)(ops, expected, column, *more)
    for rows in (slice(None), *(slice(row, row + 1) for row in range(len(logits)))):
        subset, k = logits[rows], column[rows]
        if name == "keep_top_k" and not 0 < int(k.amax()) < logits.shape[1] and len(k) == 1:
            continue
        wide = torch.nn.functional.pad(subset, (0, 2))
        result, wanted = wide[:, :-2], expected[rows]
        getattr(ops, name)(result, k, *([int(k)] if more and len(k) == 1 else more))
        differs = result.view(torch.int32) != wanted.view(torch.int32)
        row = int(differs.any(1).int().argmax())
        _check_left(name, f"of {k[row].item():.6g}", subset, wide, wanted, differs)


def check_in_place(ops: Ops, logits: torch.Tensor, name: str, edit: str, *arguments: Any) -> None:
    """Check the logits that a method leaves, and that it leaves its other arguments alone.

    Args:
        ops: under test.
        logits: to change.
        name: name of the method.
        edit: its description, after its name in messages.
        arguments: the other ones; tensors are moved to the device.
    """
    device = logits.device
    inputs = [x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for x in arguments]
    expected = logits.clone()
    getattr(Ops, name)(ops, expected, *inputs)
    wide = torch.nn.functional.pad(logits, (0, 2))
    result = wide[:, :-2]
    getattr(ops, name)(result, *inputs)
    differs = result.view(torch.int32) != expected.view(torch.int32)
    differs &= ~(result.isnan() & expected.isnan())
    _check_left(name, edit, logits, wide, expected, differs)
    for now, before in zip(inputs, arguments, strict=True):
        if isinstance(before, torch.Tensor) and not torch.equal(now, before.to(device)):
            raise rules.IN_PLACE.violation(f"{name} changed another argument than the logits")


def _check_left(
    name: str,
    edit: str,
    logits: torch.Tensor,
    wide: torch.Tensor,
    expected: torch.Tensor,
    differs: torch.Tensor,
) -> None:
    """Check the logits in `wide` after an edit in place, and the two columns next to them."""
    if bool(differs.any()):
        row, token = differs.nonzero()[0].tolist()
        raise rules.TOKENS.violation(
            f"{name} {edit} left {wide[row, token]:.6g} of token {token} in "
            f"{_row_of(logits, row)}, expected {expected[row, token]:.6g}"
        )
    if bool(wide[:, -2:].any()):
        raise rules.IN_PLACE.violation(f"{name} changed the memory next to the logits")


def _row_of(logits: torch.Tensor, row: int) -> str:
    left = int((logits[row] > -math.inf).sum())
    return f"row {row} of {len(logits)}, in which {left} of {logits.shape[1]} tokens are left"


def described(result: object) -> str:
    """Return dtype, shape and device of a result, or its type."""
    if isinstance(result, torch.Tensor):
        return f"{result.dtype} {list(result.shape)} on {result.device}"
    return type(result).__name__
