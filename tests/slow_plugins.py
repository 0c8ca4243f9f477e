"""Plugins that take their time."""

from __future__ import annotations

import time

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase


class Slow(LogitsProcessor):
    """Takes so long in every step."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        seconds: float = 0.01

    def apply(self, logits, rows):
        time.sleep(max(arguments.seconds for arguments in rows.arguments()))
        return logits
