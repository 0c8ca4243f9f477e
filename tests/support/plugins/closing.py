"""A policy with a slow close that other processes can observe."""

from __future__ import annotations

import time
from pathlib import Path

from hardpoint import plugins
from hardpoint.plugins import SchedulingPolicy


class Closing(SchedulingPolicy):
    """Writes a file when it is closed, then takes its time."""

    contract = 1

    class Options(plugins.Options):
        path: str
        seconds: float = 0.0

    def key(self, request):
        return request.arrival_time

    def close(self):
        Path(self.context.options.path).write_text("closed")
        time.sleep(self.context.options.seconds)
