"""Speculators with one mistake each, and two right ones."""

from __future__ import annotations

import numpy as np
import torch

from hardpoint.plugins import AttentionStep, Speculator
from support.samples import Sample, spend


class LastPair(Sample, Speculator, contract=1):
    """Right: the token that followed an earlier occurrence of the last token, per request."""

    def start(self, request):
        return {"after": {}, "seen": []}

    def propose(self, requests, budget):
        return [self.follow(request)[: request.limit] for request in requests]

    def follow(self, request):
        state = request.state
        known = [*request.prompt_token_ids, *request.output_token_ids]
        for token in known[len(state["seen"]) :]:
            if state["seen"]:
                state["after"][state["seen"][-1]] = token
            state["seen"].append(token)
        token, drafts = known[-1], []
        while len(drafts) < request.limit and token in state["after"]:
            token = state["after"][token]
            drafts.append(token)
        return drafts


class Learns(LastPair):
    """Right: pairs of earlier requests of the scope help, of the newest 8 scopes."""

    def __init__(self, context):
        super().__init__(context)
        self.scopes = {}

    def start(self, request):
        after = self.scopes.pop(request.scope, {})
        self.scopes[request.scope] = after
        while len(self.scopes) > 8:
            del self.scopes[next(iter(self.scopes))]
        return {"after": after, "seen": []}


class FirstLayers(Sample, Speculator, contract=1):
    """Right: the likeliest tokens of the first layers of the engine's model."""

    cache_bytes = 1 << 14

    def __init__(self, context):
        super().__init__(context)
        self.model = context.open_model(
            context.MAIN_MODEL, self.cache_bytes, num_layers=context.num_layers
        )

    def propose(self, requests, budget):
        return [self.drafts_of(request) for request in requests]

    def drafts_of(self, request):
        name, drafts = request.request_id, []
        text = [*request.prompt_token_ids, *request.output_token_ids]
        new = text[self.model.length(name) :]
        if not self.model.reserve(name, len(new) + request.limit - 1):
            return []
        while len(drafts) < request.limit:
            new = [int(self.model.extend({name: new}).argmax())]
            drafts += new
        self.model.cut(name, len(text))
        return drafts

    def ended(self, request):
        self.model.cut(request.request_id, 0)

    def memory(self):
        return self.model.cache_bytes


class KeepsSequences(FirstLayers):
    cache_bytes = 1 << 24

    def ended(self, request):
        pass


class OpensHead(LastPair):
    def __init__(self, context):
        super().__init__(context)
        self.head = context.open_head("head")


class NoContract(LastPair, contract=None):
    pass


class TooFew(LastPair):
    def propose(self, requests, budget):
        return [drafts for drafts in super().propose(requests, budget) if drafts]


class TooLong(LastPair):
    def propose(self, requests, budget):
        return [[*self.follow(request), 1] for request in requests]


class NoLists(LastPair):
    def propose(self, requests, budget):
        return 7


class OutOfRange(LastPair):
    def propose(self, requests, budget):
        return [[self.context.vocab_size] for _ in requests]


class Fails(LastPair):
    def follow(self, request):
        return [request.state["after"][request.output_token_ids[-1]]]


class Remembers(Learns):
    """Keeps pairs of ended requests, though its suite has `learns = False`."""


class MixesScopes(LastPair):
    def __init__(self, context):
        super().__init__(context)
        self.after = {}

    def start(self, request):
        return {"after": self.after, "seen": []}


class ByPlace(LastPair):
    """Keeps states by the place of a request in the step."""

    def __init__(self, context):
        super().__init__(context)
        self.states = {}

    def propose(self, requests, budget):
        drafts = []
        for place, request in enumerate(requests):
            state = self.states.setdefault(place, {"after": {}, "seen": []})
            request.state.update(state)
            drafts.append(self.follow(request)[: request.limit])
            self.states[place] = dict(request.state)
        return drafts


class ReadsNewTokensOnly(LastPair):
    """Counts only the tokens shown to it, not earlier ones."""

    def start(self, request):
        return {"after": {}, "seen": [*request.prompt_token_ids, *request.output_token_ids]}


class Appends(LastPair):
    def follow(self, request):
        drafts = super().follow(request)
        list.append(request.output_token_ids, 1)
        return drafts


class SetsState(LastPair):
    def follow(self, request):
        request.state = dict(request.state)
        return super().follow(request)


class Grows(LastPair):
    def __init__(self, context):
        super().__init__(context)
        self.known = []

    def ended(self, request):
        self.known.append(list(request.output_token_ids))


class Searches(LastPair):
    """Walks through the whole text for each draft."""

    def follow(self, request):
        known = [*request.prompt_token_ids, *request.output_token_ids]
        spend(2e-8 * len(known))
        for place in range(len(known) - 2, -1, -1):
            if known[place] == known[-1] and known[place - 9 : place] == known[-10:-1]:
                return known[place + 1 : place + 1 + request.limit]
        return []


class Slow(LastPair):
    def follow(self, request):
        spend(0.001)
        return super().follow(request)


class WritesKeys(LastPair):
    """Right: writes a part of each hidden state as its key and value."""

    needs_hidden = True
    has_kv_cache = True

    def cache_allocated(self, cache):
        self.cache = cache

    def propose(self, requests, budget):
        for request in requests:
            self.write(request, self.slots(request))
        return super().propose(requests, budget)

    def slots(self, request):
        size, start = self.cache.block_size, request.hidden_start
        places = range(start, start + len(request.hidden))
        return [request.block_ids[place // size] * size + place % size for place in places]

    def write(self, request, slots):
        count = len(slots)
        length = request.hidden_start + count
        blocks = list(request.block_ids[: -(-length // self.cache.block_size)])
        step = AttentionStep(
            query_starts=np.array([0, count]),
            seq_lens=np.array([1]),
            num_single=int(count == 1),
            block_table=torch.tensor([blocks]),
            slots=torch.tensor(slots),
            block_size=self.cache.block_size,
        )
        rows = request.hidden[:count, None, :4]
        self.cache.attend([step])(0, rows, rows, rows)


class WritesLastKeys(WritesKeys):
    def slots(self, request):
        return super().slots(request)[-1:]


class WritesElsewhere(WritesKeys):
    def propose(self, requests, budget):
        for request in requests:
            self.write(request, [7_000_000])
        return super().propose(requests, budget)
