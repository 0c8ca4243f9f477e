"""Poolers with one mistake each, and two right ones."""

from __future__ import annotations

import torch

from hardpoint.plugins import Pooler, PromptPooler
from support.samples import Sample, leave_thread, spend


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


def with_state(state):
    """Return a pooler with a class of states, named as it is."""
    return type(state.__name__, (Largest,), {"state": state, "__module__": __name__})


class NoContract(Largest, contract=None):
    pass


class NoState(Largest):
    def start(self, prompt_token_ids, arguments):
        return 7


@with_state
class WrongShape(State):
    def finish(self):
        return torch.cat(self.rows)


@with_state
class NoTensor(State):
    def finish(self):
        return float(torch.cat(self.rows).sum())


@with_state
class DependsOnChunks(State):
    def finish(self):
        return torch.stack([rows.mean(0) for rows in self.rows]).mean(0)


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


@with_state
class KeepsViews(State):
    def update(self, hidden):
        self.rows.append(hidden)


class NeedsMore(Largest):
    needs_all = False


@with_state
class Fails(State):
    def finish(self):
        return {}["vector"]


class Leaks(Largest):
    """Keeps the pooling of each prompt."""

    def __init__(self, context):
        super().__init__(context)
        self.states = []

    def start(self, prompt_token_ids, arguments):
        self.states.append(State())
        return self.states[-1]


class LeavesThread(Largest):
    def __init__(self, context):
        super().__init__(context)
        leave_thread("pooler")


@with_state
class Multiplies(State):
    """Multiplies each chunk by a matrix; the rounding depends on its number of rows."""

    def update(self, hidden):
        generator = torch.Generator().manual_seed(0)
        size = hidden.shape[1]
        weight = torch.randn(size, size, generator=generator)
        super().update(hidden @ weight if size > 99 else hidden * 2)


@with_state
class Zeros(State):
    def finish(self):
        return super().finish() * 0


@with_state
class InPlace(State):
    def update(self, hidden):
        super().update(hidden.mul_(2))


@with_state
class Slow(State):
    def finish(self):
        spend(0.001)
        return super().finish()


@with_state
class Sleeps(State):
    def update(self, hidden):
        spend(0.3)
        super().update(hidden)
