"""Speculators that record their calls, or fail."""

from __future__ import annotations

from hardpoint import plugins
from hardpoint.plugins import Speculator
from support.samples import Sample

CALLS = []


class Recorder(Sample, Speculator, contract=1):
    """Drafts a token that requests choose, and records its calls."""

    class Arguments(plugins.Arguments):
        token: int = 65

    def start(self, request):
        CALLS.append(("start", request.request_id, request.scope))
        return []

    def propose(self, requests, budget):
        assert budget == sum(request.limit for request in requests)
        for request in requests:
            CALLS.append(("propose", request.limit, len(request.output_token_ids)))
        return [[request.arguments.token] * request.limit for request in requests]

    def verified(self, request, drafts, accepted):
        CALLS.append(("verified", list(drafts), accepted))

    def ended(self, request):
        CALLS.append(("ended", request.request_id, len(request.output_token_ids)))


class Failing(Recorder):
    """Fails in the method that its options name, or returns forbidden drafts."""

    class Options(plugins.Options):
        fails_in: str = "propose"

    def start(self, request):
        assert self.options.fails_in != "start"

    def propose(self, requests, budget):
        match self.options.fails_in:
            case "propose":
                raise ValueError("no drafts today")
            case "count":
                return [[1]] * (len(requests) + 1)
            case "length":
                return [[1] * (request.limit + 1) for request in requests]
            case "vocabulary":
                return [[100_000] for _ in requests]
        return [[1] for _ in requests]

    def verified(self, request, drafts, accepted):
        assert self.options.fails_in != "verified"

    def ended(self, request):
        assert self.options.fails_in != "ended"


class ReadsHidden(Recorder):
    """Drafts right and wrong tokens, and counts the hidden states that it is shown."""

    needs_hidden = True

    def propose(self, requests, budget):
        for request in requests:
            CALLS.append(("hidden", *request.hidden.shape, len(request.output_token_ids)))
        return super().propose(requests, budget)
