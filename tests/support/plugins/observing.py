"""Processors with a state that depends on logits, and an executor with two batches at once."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from hardpoint import plugins
from hardpoint.plugins import Executor, LogitsProcessor, Phase
from hardpoint.plugins.executor import open_worker
from support.samples import Sample


class Follows(Sample, LogitsProcessor, contract=1):
    """Changes logits by all log-probabilities so far, so that a wrong state changes the text."""

    phase = Phase.PENALTY
    max_state_bytes = 60

    class Arguments(plugins.Arguments):
        fail: str = ""
        after: int = 0

    class State(plugins.State):
        total: float
        tokens: int
        fail: str
        after: int

    def start(self, request):
        arguments = request.arguments[self.name]
        return self.State(total=0.0, tokens=0, fail=arguments.fail, after=arguments.after)

    def apply(self, logits, rows):
        shifts = [int(state.total * 1000) % 251 for state in rows.states()]
        columns = torch.arange(logits.shape[1])
        return logits + torch.stack([(columns + shift) % 7 for shift in shifts]).float()

    def observe(self, state, token, logprob):
        if state.fail and state.tokens >= state.after:
            return self.failed(state)
        assert math.isfinite(logprob)
        assert logprob <= 0
        return self.State(
            total=state.total + logprob, tokens=state.tokens + 1, fail=state.fail, after=state.after
        )

    def failed(self, state):
        if state.fail == "large":
            return self.State(total=0.0, tokens=0, fail="x" * 100, after=0)
        if state.fail == "type":
            return {"total": 0.0}
        raise ZeroDivisionError("broken observe")


class Exact(Follows):
    """The same by every bit of the sum."""

    def apply(self, logits, rows):
        shifts = [hash(state.total) % 251 for state in rows.states()]
        columns = torch.arange(logits.shape[1])
        return logits + torch.stack([(columns + shift) % 7 for shift in shifts]).float()


class Bytes(LogitsProcessor):
    """Keeps the number of tokens as bytes, and lets no token follow after five."""

    contract = 1
    phase = Phase.MASK
    max_state_bytes = 8
    State = bytes
    supports_drafts = False

    class Arguments(plugins.Arguments):
        pass

    def start(self, request):
        return b"\0"

    def apply(self, logits, rows):
        for row, state in enumerate(rows.states()):
            logits[row, : -2 - state[0]] -= 1
        return logits

    def observe(self, state, token, logprob):
        return bytes([state[0] + 1])


class TwoBatches(Executor):
    """Runs the worker in a thread of its own, two steps at once."""

    contract = 1
    max_concurrent_batches = 2

    def __init__(self, context):
        super().__init__(context)
        self._worker = open_worker(context.launch(0))
        self._thread = ThreadPoolExecutor(1)

    def start(self):
        return [self._worker.load_model()]

    def initialize_cache(self, num_blocks):
        self._worker.initialize_cache(num_blocks)

    def execute_model(self, plan) -> Future:
        return self._thread.submit(self._worker.execute_model, plan)

    def sample_tokens(self, plan, bitmask=None) -> Future:
        return self._thread.submit(self._worker.sample_tokens, plan, bitmask)

    def collective_rpc(self, method, args=(), timeout=None):
        return [self._thread.submit(getattr(self._worker, method), *args).result(timeout)]

    def close(self):
        self._thread.shutdown()
        self._worker.close()
