"""A plugin under the name that the server's field `mirostat` uses."""

from __future__ import annotations

import math

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase


class Mirostat(LogitsProcessor):
    """Allows one token, with the id `tau`, as a visible effect of the argument."""

    contract = 1
    phase = Phase.TRUNCATE

    class Arguments(plugins.Arguments):
        tau: float = 5.0
        eta: float = 0.1

    def apply(self, logits, rows):
        allowed = logits.new_full(logits.shape, -math.inf)
        for row, arguments in enumerate(rows.arguments()):
            allowed[row, int(arguments.tau)] = 0
        return allowed
