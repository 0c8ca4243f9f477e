"""How the kit says that a rule is broken."""

from __future__ import annotations

from typing import Any

__all__ = ["Violation", "short"]

_LONGEST = 600


class Violation(Exception):  # noqa: N818 - it is a finding
    """A rule that a component broke."""

    def __init__(self, saw: str, do: str) -> None:
        """Keep what was seen, and what its author should do."""
        super().__init__(saw)
        self.saw = saw
        self.do = do


def short(value: Any) -> str:
    """Return `repr`, cut where it gets too long to read."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
