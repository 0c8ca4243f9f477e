"""The parent's side of an engine process."""

from __future__ import annotations

import socket
import subprocess

from hardpoint.boundary.activity import Activity, Snapshot
from hardpoint.system.process.error_output import ErrorOutput
from hardpoint.system.process.process import ChildProcess, ending, was_killed

_WATCHDOG_EXIT_CODE = 1  # that of faulthandler


class EngineProcess(ChildProcess):
    """A running engine process.

    Attributes:
        activity: what the engine in it does; None if it does not record that.
    """

    what = "engine process"
    run = "hardpoint.core.engine_process.run:run_engine"

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        channel: socket.socket,
        output: ErrorOutput | None = None,
    ) -> None:
        """Take over a child and the parent's end of its launch socket, both from `spawn`."""
        super().__init__(popen, channel, output)
        self.activity: Activity | None = None

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
    def was_killed(self) -> bool:
        """Whether a signal that others send ended it, so that what ran is not to blame."""
        return was_killed(self.returncode)
