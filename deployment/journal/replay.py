"""Replays a journal: exactly where it was recorded, with forced tokens elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from hardpoint.core.engine.core import EngineCore
from hardpoint.host.registry.discovery import is_third_party
from hardpoint.host.registry.kinds import KINDS, Process
from hardpoint.plugins.component.manifest import Manifest, PluginEntry

from .export import export
from .forcing import ForcedRun
from .frames import JournalError
from .history import history
from .playing import PlayedInputs, Player
from .records import CLOSED, JournalHeader, Keyframe
from .replanning import replan
from .run import Journal, ReplayReport, Run, open_played

__all__ = ["Journal", "JournalFile", "ReplayReport", "replay"]


def replay(path: Path | str, *, anyway: bool = False, until: int | None = None) -> ReplayReport:
    """Replay a journal exactly, up to the first difference; elsewhere, force its tokens.

    Args:
        path: the file.
        anyway: whether to replay what another build, model or set of plugins recorded.
        until: the last step; None is all.

    Raises:
        JournalError: the file is damaged, or was recorded by something else.
        HardpointError: the engine cannot be built.
    """
    journal = Journal(path, until_damage=anyway)
    player = Player(journal.header.clock, journal.last_answer)
    problems: list[str] = []

    def check(inputs: PlayedInputs) -> None:
        problems.extend(mismatches(journal.header, inputs))
        if problems and not anyway:
            raise JournalError(
                f"journal {str(path)!r}: it was recorded by something else: {'; '.join(problems)}. "
                "Its tokens may be others here: --anyway replays it and shows where they differ"
            )
        if isinstance(next(journal.records(), None), Keyframe):
            problems.append("it begins at a keyframe: plans are not compared")
        player.is_exact = not problems

    core, close = open_played(journal, player, check)
    try:
        if player.is_exact:
            report = _exactly(journal, core, player, until)
        else:
            report = ForcedRun(core, player, journal).run(journal, until)
    finally:
        close()
    report.notes[:0] = problems
    if report.is_same and until is None:
        report.notes += _early_end(journal)
    return report


def _early_end(journal: Journal) -> list[str]:
    if journal.end is None:  # the replay may have stopped before it
        deque(journal.records(), maxlen=0)
    if (end := journal.end) is None:
        return ["the journal has no end: its engine was killed, or is running"]
    if end.reason == CLOSED:
        return []
    return [f"the journal ends after {end.num_events} events: {end.reason}"]


def _exactly(journal: Journal, core: EngineCore, player: Player, until: int | None) -> ReplayReport:
    report = ReplayReport()
    run = Run(core, player, report)
    for number, record in enumerate(journal.records()):
        if not run.play(number, record, until):
            break
    return report


def mismatches(header: JournalHeader, inputs: PlayedInputs) -> Iterator[str]:
    """Yield the differences from the recorded program, each as a part of a sentence."""
    for name in header.build.__struct_fields__:
        recorded, here = getattr(header.build, name), getattr(inputs.build, name)
        if recorded != here:
            yield f"{name}: {recorded!r}, here {here!r}"
    if header.model != inputs.model:
        yield f"the model's files have the fingerprint {header.model}, here {inputs.model}"
    recorded_plugins = _computing(header.manifest)
    replayed_plugins = _computing(inputs.spec.plugins.manifest)
    for key in recorded_plugins.keys() | replayed_plugins.keys():
        first, second = recorded_plugins.get(key), replayed_plugins.get(key)
        kind, name, _ = key
        shown = [
            f"{entry.distribution} {entry.version}" if entry else "not enabled"
            for entry in (first, second)
        ]
        if shown[0] != shown[1]:
            yield f"plugin {name!r} ({kind}): {shown[0]}, here {shown[1]}"


def _computing(manifest: Manifest) -> dict[tuple[str, str, str], PluginEntry]:
    """Return the plugins that tokens may depend on: without frontend plugins and publishers.

    Keys are kind, name and, of a third party's, the value: modules of built-ins may move.
    """
    entries = {}
    for entry in manifest.tree():
        kind = KINDS.get(entry.kind)  # None: a kind of another Hardpoint
        frontend = kind is not None and kind.processes == (Process.FRONTEND,)
        if not frontend and entry.kind not in ("kv_event_publishers", "hooks"):
            value = entry.value if is_third_party(entry) else ""
            entries[entry.kind, entry.name, value] = entry
    return entries


class JournalFile:
    """A journal that is used.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path | str, *, anyway: bool = False) -> None:
        """Name the file; its methods read it.

        Args:
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
