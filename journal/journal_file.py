"""The Python face of a journal: replay it, show a request, plan it again, export it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .export import export
from .history import history
from .replanning import replan
from .replay import Journal, ReplayReport, replay


class JournalFile:
    """A journal that is used.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path | str, *, anyway: bool = False) -> None:
        """Name the file; what is called reads it.

        Args:
            path: path of the file.
            anyway: whether to use what is before damage, and what another build, model or set of
                plugins recorded.
        """
        self.path, self._anyway = Path(path), anyway

    def replay(self, until: int | None = None) -> ReplayReport:
        """Run the engine again, up to a step; see `replay`."""
        return replay(self.path, anyway=self._anyway, until=until)

    def replan(self, policy: str, until: int | None = None) -> ReplayReport:
        """Plan the steps again with another scheduling policy; see `replan`."""
        journal = Journal(self.path, until_damage=self._anyway)
        return replan(journal, policy, until=until, anyway=self._anyway)

    def export(self, form: str) -> Iterator[str]:
        """Yield the lines of a trace; see `export`."""
        return export(Journal(self.path, until_damage=self._anyway), form)

    def request(self, name: str) -> Iterator[str]:
        """Yield the history of a request, line by line; see `history`."""
        return history(Journal(self.path, until_damage=self._anyway), name)
