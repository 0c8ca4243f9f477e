"""Plugins that note the ids of prompts that they are shown."""

from __future__ import annotations

import torch

from hardpoint import plugins
from hardpoint.plugins import BatchLogitsProcessor, LogitsProcessor, Phase, Pooler, PromptPooler
from hardpoint.plugins import Speculator as SpeculatorBase

SEEN: dict[str, list] = {}
"""Ids of prompts, by who saw them."""


def note(name, ids):
    SEEN.setdefault(name, []).append(ids if ids is None else list(ids))


class Row(LogitsProcessor):
    """Row by row; its arguments are prepared."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        pass

    @classmethod
    def prepare(cls, arguments, context):
        note("prepare", context.prompt_token_ids)
        return arguments

    def start(self, request):
        note("row", request.prompt_token_ids)

    def apply(self, logits, rows):
        return logits


class Whole(BatchLogitsProcessor):
    """Of the batch."""

    contract = 1
    phase = Phase.PENALTY

    def update_state(self, update):
        for added in update.added if update is not None else ():
            note("batch", added.prompt_token_ids)

    def apply(self, logits):
        return logits


class Guesser(SpeculatorBase):
    """Drafts nothing."""

    contract = 1

    def start(self, request):
        note("speculator", request.prompt_token_ids)

    def propose(self, requests, budget):
        return [[] for _ in requests]


class _First(PromptPooler):
    def update(self, hidden):
        self.first = getattr(self, "first", hidden[0])

    def finish(self):
        return torch.as_tensor(self.first)


class First(Pooler):
    """The first hidden state."""

    contract = 1

    def start(self, prompt_token_ids, arguments):
        note("pooler", prompt_token_ids)
        return _First()
