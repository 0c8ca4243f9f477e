"""A scheduler without drafts, a processor that fails at wrong drafts alone, and a verifier."""

from __future__ import annotations

from hardpoint import plugins
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import LogitsProcessor, Phase, Scheduler, StepPart


class TakesNoDrafts(DefaultScheduler):
    contract = 1
    update_drafts = Scheduler.update_drafts


class KeepsNoGroups(DefaultScheduler):
    contract = 2
    keeps_groups = False


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


class FirstDraft(StepPart):
    """Verifies the first draft of each request, and rejects the others."""

    contract = 1

    class Options(plugins.Options):
        wrong: bool = False

    def worker_half(self, context):
        return _FirstDraftHalf(self.options.wrong) if context.num_draft_tokens else None


class _FirstDraftHalf:
    def __init__(self, wrong):
        self.wrong = wrong

    def verify_drafts(self, step):
        first = step.sample([(index, 0) for index in range(len(step.requests))])
        right = [drafts[:1] == [token] for drafts, token in zip(step.drafts, first, strict=True)]
        step.sample([(index, 1) for index, is_right in enumerate(right) if is_right])
        return [int(is_right or self.wrong) for is_right in right]
