"""Whole numbers with an exponent or a unit, on command lines and in variables."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["whole_number"]

_WHOLE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:e([0-9]{1,2})|([kmgKMG]))")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def whole_number(text: str) -> int | None:
    """Return the number of a text such as `1e3`, `4k` (4000) or `4K` (4096), or None."""
    match = _WHOLE.fullmatch(text)
    if match is None:
        return None
    digits, exponent, unit = match.groups()
    number = Decimal(digits) * (_UNITS[unit] if unit else 10 ** int(exponent))
    return int(number) if number == number.to_integral_value() else None
