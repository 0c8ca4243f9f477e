"""A scheduler without drafts, and a processor that fails at tokens of wrong drafts alone."""

from __future__ import annotations

from hardpoint import plugins
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import LogitsProcessor, Phase, Scheduler


class TakesNoDrafts(DefaultScheduler):
    contract = 1
    update_drafts = Scheduler.update_drafts


class Strict(LogitsProcessor):
    """Fails after tokens that it was not told of: when it advances, applies, or chooses."""

    contract = 1
    phase = Phase.MASK

    class Arguments(plugins.Arguments):
        known: list[int]
        fails_in: str

    def start(self, request):
        return request.arguments[self.name]

    def advance(self, state, token):
        if state.fails_in == "advance":
            assert token in state.known
        return state

    def apply(self, logits, rows):
        for row, request in enumerate(rows.requests):
            arguments, output = request.arguments[self.name], request.output_token_ids
            if not output or output[-1] in arguments.known:
                continue
            assert arguments.fails_in != "apply"
            if arguments.fails_in == "choice":
                logits[row] = float("nan")
        return logits
