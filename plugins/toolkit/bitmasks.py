"""Bitmasks of tokens, as grammar backends and step parts fill them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from hardpoint.plugins import GrammarBitmask
from hardpoint.plugins.component import Source

__all__ = ["allow_tokens"]

MakerT = TypeVar("MakerT")


class Sourced(Protocol):
    """The maker of a mask.

    Attributes:
        source: its identity.
    """

    @property
    def source(self) -> Source:
        """Its identity."""


SourcedT = TypeVar("SourcedT", bound=Sourced)


def allow_tokens(row: np.ndarray, token_ids: Iterable[int]) -> None:
    """Set the bits of tokens in a row of a bitmask.

    Args:
        row: int32 [ceil(vocab_size / 32)].
        token_ids: below `vocab_size`.
    """
    bits = row.view("uint32")
    for token in token_ids:
        bits[token // 32] |= 1 << token % 32


def combined_masks(
    masks: Sequence[tuple[MakerT, GrammarBitmask]],
) -> tuple[GrammarBitmask, dict[str, list[MakerT]]]:
    """Return the tokens that every mask allows.

    Args:
        masks: pairs of a maker and its mask.

    Returns:
        The mask, and the makers of the masks of each request for which nothing is left; its rows
        allow everything, because the token sampled from them is dropped.
    """
    rows: dict[str, np.ndarray] = {}
    makers: dict[str, list[MakerT]] = {}
    for maker, mask in masks:
        names = np.array(mask.request_ids)
        for name in dict.fromkeys(mask.request_ids):
            bits = np.asarray(mask.bitmask)[names == name]
            rows[name] = rows[name] & bits if name in rows else bits
            makers.setdefault(name, []).append(maker)
    nothing_left = {name: makers[name] for name, allowed in rows.items() if not allowed[0].any()}
    for name in nothing_left:
        rows[name][:] = -1
    request_ids = [name for name, bits in rows.items() for _ in bits]
    return GrammarBitmask(request_ids, np.concatenate(list(rows.values()))), nothing_left


def masks_by_source(
    masks: Sequence[tuple[SourcedT, GrammarBitmask]],
) -> dict[Source, GrammarBitmask]:
    """Return masks by the identity of their makers, combined for each."""
    by_source: dict[Source, list[tuple[SourcedT, GrammarBitmask]]] = {}
    for part, mask in masks:
        by_source.setdefault(part.source, []).append((part, mask))
    return {
        source: source_masks[0][1] if len(source_masks) == 1 else combined_masks(source_masks)[0]
        for source, source_masks in by_source.items()
    }
