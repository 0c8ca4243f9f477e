"""Plugins by which a test sets the pace of an engine process."""

from __future__ import annotations

import time
from pathlib import Path

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase
from hardpoint.process.engine import run


class Turns(LogitsProcessor):
    """Takes a file away in each step, and waits until there is one."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        path: str

    def apply(self, logits, rows):
        for path in {arguments.path for arguments in rows.arguments()}:
            while not Path(path).exists():
                time.sleep(0.001)
            Path(path).unlink()
        return logits


class Tires(LogitsProcessor):
    """Takes half a second in each step of a request with many tokens, which so does not end."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        tokens: int

    def apply(self, logits, rows):
        for request, arguments in zip(rows.requests, rows.arguments(), strict=True):
            if len(request.output_token_ids) >= arguments.tokens:
                time.sleep(0.5)
                break
        return logits


class Gate(LogitsProcessor):
    """Lets no engine be built while there is a file at a path."""

    contract = 1
    phase = Phase.PENALTY

    class Options(plugins.Options):
        path: str

    class Arguments(plugins.Arguments):
        pass

    def __init__(self, context):
        super().__init__(context)
        while Path(context.options.path).exists():
            time.sleep(0.01)

    def apply(self, logits, rows):
        return logits


class Unhurried(LogitsProcessor):
    """Gives an engine without its program a minute to end in order."""

    contract = 1
    phase = Phase.PENALTY
    grace_s = 60.0

    class Arguments(plugins.Arguments):
        pass

    def __init__(self, context):
        super().__init__(context)
        run._ORPHAN_GRACE_S = self.grace_s

    def apply(self, logits, rows):
        return logits


class Hurried(Unhurried):
    """Gives it half a second."""

    contract = 1
    grace_s = 0.5
