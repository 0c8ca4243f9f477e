"""Long random histories of a running batch, each row compared with its request run alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from hardpoint.core.worker.input_batch import InputBatch
from hardpoint.core.worker.sampling.pipeline import LogitsPipeline
from hardpoint.plugins import LogitsRequest
from hardpoint.testing.suite import Violation, short

from .batch import (
    KINDS,
    advanced,
    alone,
    check_books,
    difference,
    make_logits,
    run_pipeline,
    started,
)
from .subject import MAX_ROWS, Case, Subject

_MIN_STEPS, _MAX_STEPS = 10, 30
_MAX_LENGTH = 64


@dataclass(frozen=True)
class Step:
    """What happens in one step.

    Attributes:
        events: (what, number): "add" the case of that number, "resume" that waiting request,
            "finish" or "preempt" that running one; numbers count modulo what is there.
        pausing: bit i set: the i-th running request gets no token in this step.
        reverse: the step's rows come in the opposite order.
    """

    events: tuple[tuple[str, int], ...]
    pausing: int
    reverse: bool


def steps() -> st.SearchStrategy[list[Step]]:
    """Return a strategy for histories."""
    what = st.sampled_from(["add", "add", "finish", "preempt", "resume"])
    events = st.lists(st.tuples(what, st.integers(0, MAX_ROWS - 1)), max_size=4).map(tuple)
    pausing = st.just(0) | st.integers(0, 2**MAX_ROWS - 1)
    step = st.builds(Step, events, pausing, st.booleans())
    return st.lists(step, min_size=_MIN_STEPS, max_size=_MAX_STEPS)


@dataclass(eq=False)
class _Life:
    """A request and all that it has said."""

    number: int
    case: Case
    outputs: list[int]
    request: LogitsRequest | None = None


class Floor:
    """A worker's batch without a model: rows, moves and the pipeline are the engine's own."""

    def __init__(self, subject: Subject) -> None:
        """Start with nobody."""
        self.subject = subject
        self.stage = subject.build()
        self.pipeline = LogitsPipeline([self.stage], self.stage.device)
        self.batch = InputBatch(MAX_ROWS, _MAX_LENGTH, block_size=16)
        self.running: list[_Life] = []
        self.waiting: list[_Life] = []
        self._count = 0

    def arrange(self, step: Step, cases: Sequence[Case]) -> None:
        """Let requests come and go; removals come first, as in the engine."""
        for what, number in step.events:
            if what in ("finish", "preempt") and self.running:
                life = self.running.pop(number % len(self.running))
                self.batch.remove(str(life.number))
                life.request = None
                if what == "preempt":
                    self.waiting.append(life)
        for what, number in step.events:
            if len(self.running) == MAX_ROWS:
                break
            if what == "resume" and self.waiting:
                self._seat(self.waiting.pop(number % len(self.waiting)))
            elif what == "add":
                self._count += 1
                case = cases[number % len(cases)]
                self._seat(_Life(self._count, case, list(case.outputs)))
        self.pipeline.update(self.batch.settle())
        check_books(self.stage)

    def sampled(self, step: Step) -> list[_Life]:
        """Return who gets a token in a step, in the order of its rows."""
        chosen = [life for i, life in enumerate(self.running) if not step.pausing >> i & 1]
        return chosen[::-1] if step.reverse else chosen

    def process(self, lives: Sequence[_Life], logits: torch.Tensor) -> torch.Tensor:
        """Return what the pipeline makes of the logits [lives, vocab]."""
        requests = [life.request for life in lives if life.request is not None]
        return run_pipeline(self.pipeline, self.stage, logits.clone(), requests)

    def advance(self, lives: Sequence[_Life]) -> None:
        """Give everybody one more token."""
        tokens = [_token(life, self.subject.vocab_size) for life in lives]
        for life, token in zip(lives, tokens, strict=True):
            self.batch.append(str(life.number), token)
        requests = [life.request for life in lives if life.request is not None]
        advanced(self.pipeline, requests, tokens)

    def _seat(self, life: _Life) -> None:
        """Give a request a row; one that comes back gets a new list and a new request object."""
        life.outputs = list(life.outputs)
        life.request = life.case.request(self.subject, str(life.number), life.outputs)
        self.batch.add(life.request, life.outputs, [], 0)
        started(self.pipeline, life.request)
        self.running.append(life)


def check_history(subject: Subject, cases: list[Case], history: list[Step]) -> None:
    """Run a history; raise a Violation at the first row that differs from its request alone."""
    floor = Floor(subject)
    for number, step in enumerate(history):
        floor.arrange(step, cases)
        if not (lives := floor.sampled(step)):
            continue
        logits = torch.cat([_logits(life, subject.vocab_size) for life in lives])
        result = floor.process(lives, logits)
        for place, life in enumerate(lives):
            wanted = alone(subject, life.case, life.outputs, logits[place])
            if (differs := difference(result[place], wanted)) is not None:
                raise Violation(
                    f"in step {number}, batch of {len(lives)}, {differs}; the row is that of "
                    f"{short(replace(life.case, outputs=tuple(life.outputs)))}",
                    "a row's result may depend on nothing but its own request: keep what belongs "
                    "to a request in its state (start, advance, device_state) or follow every "
                    "BatchUpdate, key caches by rows.version, and do not mix rows",
                )
        floor.advance(lives)


def _token(life: _Life, vocab_size: int) -> int:
    """Return a request's next token: often one of a few, so that patterns occur."""
    mixed = (life.number * 1_000_003 + len(life.outputs) * 7_919 + 12_345) * 48_271 % (2**31 - 1)
    return mixed % min(4, vocab_size) if mixed % 5 else mixed % vocab_size


def _logits(life: _Life, vocab_size: int) -> torch.Tensor:
    seed = life.number * 1_009 + len(life.outputs)
    return make_logits(seed, 1, vocab_size, KINDS[seed % len(KINDS)])
