"""Bitmasks of tokens, as grammar backends and step parts fill them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

__all__ = ["allow_tokens"]


def allow_tokens(row: np.ndarray, token_ids: Iterable[int]) -> None:
    """Set the bits of tokens in a row of a bitmask.

    Args:
        row: int32 [ceil(vocab_size / 32)].
        token_ids: below `vocab_size`.
    """
    bits = row.view("uint32")
    for token in token_ids:
        bits[token // 32] |= 1 << token % 32
