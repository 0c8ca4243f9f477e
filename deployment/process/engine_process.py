"""Where an engine runs, as its client sees it: in a process of this host, or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hardpoint.host.boundary.activity import Activity, Snapshot
from hardpoint.process.child_processes.launch import ChildLaunch
from hardpoint.process.child_processes.process import ChildProcess, ending, was_killed

_WATCHDOG_EXIT_CODE = 1  # that of faulthandler


class EngineHost(Protocol):
    """The host of an engine: an EngineProcess, or a stand-in for one of another machine.

    It connects the engine to the addresses of its launch, and keeps the record of what it does in
    the launch's folder.

    Attributes:
        activity: what the engine does; None if it does not record that.
        is_remote: whether it runs on another machine.
    """

    activity: Activity | None
    is_remote: bool

    @property
    def pid(self) -> int:
        """Its process id there."""

    @property
    def label(self) -> str:
        """Its name, for messages."""

    @property
    def sentinels(self) -> Sequence[int]:
        """Descriptors; if `failure` may return an error, one of them is readable."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing comes of it any more."""

    @property
    def sends_end_marker(self) -> bool:
        """Whether an end marker follows its outputs: it reported a failure, or ended in order."""

    @property
    def was_killed(self) -> bool:
        """Whether something outside ended it, so that its code is not to blame."""

    def launch(self, launch: ChildLaunch) -> None:
        """Send the launch, once; return before the engine is ready."""

    def failure(self) -> Exception | None:
        """Return why the engine does not serve any more; None while it does. In any thread."""

    def kill(self) -> None:
        """End the engine at once."""

    def close(self, grace_s: float = ...) -> None:
        """End the engine, `grace_s` seconds later by force."""


class EngineProcess(ChildProcess):
    """A running engine process.

    Attributes:
        activity: what the engine in it does; None if it does not record that.
    """

    is_remote = False
    title = "engine process"
    run = "hardpoint.process.engine.run:run_engine"
    activity: Activity | None = None

    @property
    def description(self) -> str:
        """The state as text, with the method of a plugin that ran when it ended."""
        code = self.returncode
        now = self.activity.snapshot() if self.activity is not None else Snapshot()
        how, limit = self.ending, now.watchdog_seconds
        if code == _WATCHDOG_EXIT_CODE and 0 < limit <= now.step_seconds:
            how = f"was ended by its watchdog: a step took longer than {limit:g} s"
            how += " (engine.watchdog_seconds)"
        if code is not None and now.call is not None:
            sent = ", which others send," if how == ending(code) else ","
            how += f"{sent} while {now.call} ran" if self.was_killed else now.during
        return f"the {self.label} {how}"

    @property
    def sends_end_marker(self) -> bool:
        """Whether an end marker follows its outputs: it reported a failure, or ended in order."""
        return self.reported or self.returncode == 0

    @property
    def was_killed(self) -> bool:
        """Whether another process's signal ended it, so that its code is not to blame."""
        return was_killed(self.returncode)
