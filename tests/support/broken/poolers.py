"""Poolers with one mistake each, and two right ones."""

from __future__ import annotations

import torch

from hardpoint.plugins import Pooler, PromptPooler
from support.samples import Sample


class State(PromptPooler):
    def __init__(self):
        self.rows = []

    def update(self, hidden):
        self.rows.append(hidden.clone())

    def finish(self):
        return torch.cat(self.rows).amax(0)


class Largest(Sample, Pooler, contract=1):
    """Right: the largest element of each column."""

    state = State

    def start(self, prompt_token_ids, arguments):
        return self.state()


class LastTwo(State):
    def finish(self):
        return self.rows[-1][-1]


class Newest(Largest):
    """Right: the last hidden state."""

    needs_all = False
    state = LastTwo


class NoContract(Largest, contract=None):
    pass


class NoState(Largest):
    def start(self, prompt_token_ids, arguments):
        return 7


class Whole(State):
    def finish(self):
        return torch.cat(self.rows)


class WrongShape(Largest):
    state = Whole


class Number(State):
    def finish(self):
        return float(torch.cat(self.rows).sum())


class NoTensor(Largest):
    state = Number


class MeanOfMeans(State):
    def finish(self):
        return torch.stack([rows.mean(0) for rows in self.rows]).mean(0)


class DependsOnChunks(Largest):
    state = MeanOfMeans


class SharesState(Largest):
    """One state for all prompts that are under way."""

    def __init__(self, context):
        super().__init__(context)
        self.shared = State()

    def start(self, prompt_token_ids, arguments):
        self.shared.rows.clear()
        return self.shared


class Remembers(Largest):
    """Never forgets the largest elements of former prompts."""

    def __init__(self, context):
        super().__init__(context)
        self.rows = []

    def start(self, prompt_token_ids, arguments):
        state = State()
        state.rows = self.rows
        return state


class View(State):
    def update(self, hidden):
        self.rows.append(hidden)


class KeepsViews(Largest):
    state = View


class NeedsMore(Largest):
    needs_all = False


class Missing(State):
    def finish(self):
        return {}["vector"]


class Fails(Largest):
    state = Missing
