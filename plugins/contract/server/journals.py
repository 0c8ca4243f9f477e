"""Journals of engines, as commands use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class JournalReport(Protocol):
    """The findings of the replay of a journal.

    Attributes:
        difference: the first one, with its text; None if all was the same.
    """

    difference: Any

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""


class JournalUse(Protocol):
    """A journal (`engine.journal`) and its operations.

    Each method raises a HardpointError that names the offset if the file is damaged, or the
    difference if something else recorded it.
    """

    def replay(self, until: int | None = None) -> JournalReport:
        """Run its engine again, up to a step."""

    def replan(self, policy: str, until: int | None = None) -> JournalReport:
        """Plan its steps again with another scheduling policy, without the model."""

    def request(self, name: str) -> Iterator[str]:
        """Yield the history of a request, line by line."""

    def export(self, form: str) -> Iterator[str]:
        """Yield the lines of a trace, "redacted" or "mooncake"."""
