"""The requests of a dead engine: which go on, in which order, and which end."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable

from hardpoint.plugins.config_tables import EngineProcessConfig

from .ledger import Entry

_DEADLY = 2
"""Deaths of engines with a request in the step, after which it runs no more."""


class Recovery:
    """The requests that wait for an engine. For one thread at a time.

    A request that an engine's step had when it died may have caused that, and is a suspect until it
    gets its next token. Suspects go on one at a time: if an engine dies once more, it is known
    which of them was in the step, and it ends. So a request that kills engines takes two of them,
    and ends no other.
    """

    def __init__(self, config: EngineProcessConfig) -> None:
        self._config = config
        self._waiting: deque[Entry] = deque()
        self._suspects: deque[Entry] = deque()
        self._tested: Entry | None = None

    def wait(self, entry: Entry) -> None:
        """Let a request wait until an engine serves."""
        self._waiting.append(entry)

    def lost(
        self,
        entries: Iterable[Entry],
        in_step: Collection[str] | None,
        *,
        blameless: bool,
        version: str,
    ) -> list[tuple[Entry, str]]:
        """Queue the requests of a dead engine; return the others, which end, each with the reason.

        Args:
            entries: its requests, which have left it.
            in_step: ids of the requests of the step in which it died; None is all.
            blameless: whether it was killed from outside.
            version: version of the weights of the engines where they may go on.
        """
        ended: list[tuple[Entry, str]] = []
        for entry in entries:
            was_in_step = in_step is None or entry.request.request_id in in_step
            if self._tested is entry:
                self._tested = None
            if was_in_step and not blameless:
                entry.deaths += 1
                entry.is_suspect = True
            reason = self._why_ended(entry, version, was_in_step=was_in_step)
            if reason is not None:
                ended.append((entry, reason))
            elif entry.is_suspect:
                self._suspects.append(entry)
            else:
                self._waiting.append(entry)
            entry.num_resumes += 1
            entry.num_moves += 1
        return ended

    def _why_ended(self, entry: Entry, version: str, *, was_in_step: bool) -> str | None:
        if self._config.resume == "off":
            return "was in the step in which it died" if was_in_step else "may be sent again"
        if entry.deaths >= _DEADLY:
            return f"was in the step of {entry.deaths} engines when they died; it runs no more"
        if entry.num_resumes >= self._config.max_resumes:
            times = f"{entry.num_resumes} time{'s' if entry.num_resumes > 1 else ''}"
            return f"went on at another engine {times} before (engine.max_resumes)"
        if self._config.resume == "exact" and entry.has_output and entry.version != version:
            return (
                f"began with weights of version {entry.version or 'several'!r}, and engines have "
                f"{version!r} now (engine.resume)"
            )
        return None

    def record_output(self, entry: Entry) -> None:
        """Note that a request got an output."""
        if entry is self._tested and not entry.is_suspect:
            self._tested = None

    def forget(self, entry: Entry) -> None:
        """Forget a request that has ended."""
        for queue in (self._waiting, self._suspects):
            with contextlib.suppress(ValueError):
                queue.remove(entry)
        if self._tested is entry:
            self._tested = None

    def pop(self) -> list[Entry]:
        """Remove and return the requests that are to be sent now."""
        taken = list(self._waiting)
        self._waiting.clear()
        if self._tested is None and self._suspects:
            self._tested = self._suspects.popleft()
            taken.append(self._tested)
        return taken

    @property
    def has_more(self) -> bool:
        """Whether `pop` would return any."""
        return bool(self._waiting) or (self._tested is None and bool(self._suspects))
