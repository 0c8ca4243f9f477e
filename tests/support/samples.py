"""Contract numbers of the plugins of tests, stated once for a class and those derived from it."""

from __future__ import annotations

from typing import Any

_OF_BASE: Any = object()


class Sample:
    """States a contract in each subclass: the loader reads it from a class, not from its bases.

    `class Right(Sample, Pooler, contract=1)` states it for whatever derives from `Right`, and
    `contract=None` leaves one class without it.
    """

    def __init_subclass__(cls, *, contract: int | None = _OF_BASE, **options: Any) -> None:
        """State the given contract, or that of the bases."""
        super().__init_subclass__(**options)
        if contract is _OF_BASE:
            contract = getattr(cls, "contract", None)
        if contract is not None:
            cls.contract = contract
