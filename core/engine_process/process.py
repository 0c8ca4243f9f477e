"""The parent's side of an engine process."""

from __future__ import annotations

import socket
import subprocess

from hardpoint.boundary.activity import Activity, Snapshot
from hardpoint.system.process.error_output import ErrorOutput
from hardpoint.system.process.process import ChildProcess, ending

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
        """The state as text, with the plugin that ran when it ended."""
        code = self.returncode
        now = self.activity.snapshot() if self.activity is not None else Snapshot()
        how, limit = ending(code), now.watchdog_seconds
        if code == _WATCHDOG_EXIT_CODE and 0 < limit <= now.step_seconds:
            how = f"was ended by its watchdog: a step took longer than {limit:g} s"
            how += " (engine.watchdog_seconds)"
        return f"the {self.label} {how}{'' if code is None else now.during}"
