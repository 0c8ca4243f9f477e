"""Plugins that take their time."""

from __future__ import annotations

import time
from pathlib import Path

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase


class Slow(LogitsProcessor):
    """Takes so long in every step, and says at a path, if it is told one, that a step has begun."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        seconds: float = 0.01
        begun: str | None = None

    def apply(self, logits, rows):
        for path in {arguments.begun for arguments in rows.arguments()} - {None}:
            Path(path).touch()
        time.sleep(max(arguments.seconds for arguments in rows.arguments()))
        return logits
