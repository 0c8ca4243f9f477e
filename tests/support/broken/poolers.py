"""Poolers with one mistake each, and two right ones."""

from __future__ import annotations

import torch

from hardpoint.plugins import Pooler, PromptPooler


class State(PromptPooler):
    def __init__(self):
        self.rows = []

    def update(self, hidden):
        self.rows.append(hidden.clone())

    def finish(self):
        return torch.cat(self.rows).amax(0)


class Largest(Pooler):
    """Right: the largest element of each column."""

    contract = 1
    state = State

    def start(self, prompt_token_ids, arguments):
        return self.state()


class LastTwo(State):
    def finish(self):
        return self.rows[-1][-1]


class Newest(Largest):
    """Right: the last hidden state."""

    contract = 1
    needs_all = False
    state = LastTwo


class NoContract(Largest):
    pass


class NoState(Largest):
    contract = 1

    def start(self, prompt_token_ids, arguments):
        return 7


class Whole(State):
    def finish(self):
        return torch.cat(self.rows)


class WrongShape(Largest):
    contract = 1
    state = Whole


class Number(State):
    def finish(self):
        return float(torch.cat(self.rows).sum())


class NoTensor(Largest):
    contract = 1
    state = Number


class MeanOfMeans(State):
    def finish(self):
        return torch.stack([rows.mean(0) for rows in self.rows]).mean(0)


class DependsOnChunks(Largest):
    contract = 1
    state = MeanOfMeans


class SharesState(Largest):
    """One state for all prompts that are under way."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.shared = State()

    def start(self, prompt_token_ids, arguments):
        self.shared.rows.clear()
        return self.shared


class Remembers(Largest):
    """Never forgets the largest elements of former prompts."""

    contract = 1

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
    contract = 1
    state = View


class NeedsMore(Largest):
    contract = 1
    needs_all = False


class Missing(State):
    def finish(self):
        return {}["vector"]


class Fails(Largest):
    contract = 1
    state = Missing
