"""Plugins that take their time."""

from __future__ import annotations

import time
from pathlib import Path

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase


class Slow(LogitsProcessor):
    """Takes so long in every step, and writes to a path, if it has one, that a step has begun.

    `held` is the path of a file: once that is gone, steps take no more time (see `HeldSteps`).
    """

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        seconds: float = 0.01
        begun: str | None = None
        held: str | None = None

    def apply(self, logits, rows):
        for path in {arguments.begun for arguments in rows.arguments()} - {None}:
            Path(path).touch()
        began = time.monotonic()
        for arguments in rows.arguments():
            _wait(began + arguments.seconds, arguments.held)
        return logits


def _wait(until: float, held: str | None) -> None:
    while (left := until - time.monotonic()) > 0 and (held is None or Path(held).exists()):
        time.sleep(left if held is None else min(left, 0.002))
