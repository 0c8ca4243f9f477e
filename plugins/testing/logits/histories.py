"""Random histories of a running batch, in which each row must equal its request run alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from hardpoint.plugins import Finish, LogitsRequest
from hardpoint.plugins.requests import FinishedError
from hardpoint.testing.engine_access import create_batch
from hardpoint.testing.suite import Violation, short_repr

from .batch import (
    ENDS_ADVICE,
    LOGITS_KINDS,
    BatchFixture,
    advance_requests,
    allowed_tokens,
    apply_processor,
    check_update_state,
    difference,
    make_logits,
    run_alone,
    start_request,
)
from .subject import MAX_ROWS, RequestCase, Subject

_MIN_STEPS, _MAX_STEPS = 10, 30
_MAX_LENGTH = 64
_RUN = 3  # tokens of a request that follow each other in its arguments, now and then


@dataclass(frozen=True)
class HistoryStep:
    """The events of one step.

    Attributes:
        events: (name, number) pairs: "add" a case, "resume" a waiting request, "finish" or
            "preempt" a running one; numbers index the cases or requests, modulo their count.
        skipped_rows: bit i set: the i-th running request gets no token in this step.
        reverse: True to sample the rows in reverse order.
    """

    events: tuple[tuple[str, int], ...]
    skipped_rows: int
    reverse: bool


def steps() -> st.SearchStrategy[list[HistoryStep]]:
    """Return a strategy for histories."""
    name = st.sampled_from(["add", "add", "finish", "preempt", "resume"])
    events = st.lists(st.tuples(name, st.integers(0, MAX_ROWS - 1)), max_size=4).map(tuple)
    skipped_rows = st.just(0) | st.integers(0, 2**MAX_ROWS - 1)
    step = st.builds(HistoryStep, events, skipped_rows, st.booleans())
    return st.lists(step, min_size=_MIN_STEPS, max_size=_MAX_STEPS)


@dataclass(eq=False)
class _HistoryRequest:
    """A request with its output tokens; `request` is None while it is not in the batch.

    `alone` is the same request in a batch of its own, if the processor observes: its state depends
    on all logits that it saw.
    """

    number: int
    case: RequestCase
    outputs: list[int]
    request: LogitsRequest | None = None
    alone: BatchFixture | None = None


class SimulatedBatch:
    """A worker's batch without a model: rows, moves and pipeline are the engine's own."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.pipeline = subject.build()
        self.running: list[_HistoryRequest] = []
        self.waiting: list[_HistoryRequest] = []
        self._batch = create_batch(MAX_ROWS, _MAX_LENGTH)
        self._count = 0

    def apply_events(self, step: HistoryStep, cases: Sequence[RequestCase]) -> None:
        """Remove and add the requests of a step; removals come first, as in the engine."""
        self._remove_requests(step)
        self._add_requests(step, cases)
        self.pipeline.update(self._batch.settle())
        check_update_state(self.pipeline)

    def sampled_requests(self, step: HistoryStep) -> list[_HistoryRequest]:
        """Return the requests that get a token in a step, in the order of its rows."""
        chosen = [entry for i, entry in enumerate(self.running) if not step.skipped_rows >> i & 1]
        return chosen[::-1] if step.reverse else chosen

    def process(self, sampled: Sequence[_HistoryRequest], logits: torch.Tensor) -> torch.Tensor:
        """Return the pipeline's result for the logits [sampled, vocab]."""
        requests = [entry.request for entry in sampled if entry.request is not None]
        return apply_processor(self.pipeline, logits.clone(), requests)

    def advance(
        self, sampled: Sequence[_HistoryRequest], logits: torch.Tensor, processed: torch.Tensor
    ) -> None:
        """Append one token to each sampled request.

        Args:
            sampled: the requests in `sampled_requests`.
            logits: logits of the step, [sampled, vocab].
            processed: result of `process` for them.
        """
        tokens = [_token(entry, self.subject.vocab_size) for entry in sampled]
        tokens = allowed_tokens(self.pipeline, processed, tokens)
        ended: dict[str, Finish] = {}
        for row, (entry, token) in enumerate(zip(sampled, tokens, strict=True)):
            self._batch.append(str(entry.number), token)
            if entry.alone is not None:
                try:
                    entry.alone.advance([token], logits=logits[row : row + 1])
                except FinishedError as end:
                    ended[str(entry.number)] = end.finish
        requests = [entry.request for entry in sampled if entry.request is not None]
        ends = advance_requests(self.pipeline, requests, tokens, processed)
        if self.pipeline.observes and ends != ended:
            raise Violation(f"it ends {ends} in a batch, and {ended} alone", ENDS_ADVICE)
        for entry in [entry for entry in sampled if str(entry.number) in ends]:
            self.running.remove(entry)
            self._drop(entry)
            self.pipeline.finish(str(entry.number))

    def _remove_requests(self, step: HistoryStep) -> None:
        for name, number in step.events:
            if name in ("finish", "preempt") and self.running:
                entry = self.running.pop(number % len(self.running))
                self._drop(entry)
                if name == "preempt":
                    self.waiting.append(entry)
                else:
                    self.pipeline.finish(str(entry.number))

    def _drop(self, entry: _HistoryRequest) -> None:
        self._batch.remove(frozenset({str(entry.number)}))
        entry.request = None

    def _add_requests(self, step: HistoryStep, cases: Sequence[RequestCase]) -> None:
        for name, number in step.events:
            if len(self.running) == MAX_ROWS:
                break
            if name == "resume" and self.waiting:
                self._add(self.waiting.pop(number % len(self.waiting)))
            elif name == "add":
                self._count += 1
                case = cases[number % len(cases)]
                entry = _HistoryRequest(self._count, case, list(case.outputs))
                if self.pipeline.observes:
                    entry.alone = BatchFixture(self.subject, [case])
                self._add(entry)

    def _add(self, entry: _HistoryRequest) -> None:
        """Put a request into a row; a resumed one gets a new list and a new request object."""
        entry.outputs = list(entry.outputs)
        entry.request = entry.case.request(self.subject, str(entry.number), entry.outputs)
        self._batch.add(entry.request, entry.outputs, [], 0)
        start_request(self.pipeline, entry.request)
        self.running.append(entry)


def check_history(subject: Subject, cases: list[RequestCase], history: list[HistoryStep]) -> None:
    """Run a history; raise a Violation at the first row that differs from its request alone."""
    batch = SimulatedBatch(subject)
    for number, step in enumerate(history):
        batch.apply_events(step, cases)
        if not (sampled := batch.sampled_requests(step)):
            continue
        logits = torch.cat([_logits(entry, subject.vocab_size) for entry in sampled])
        result = batch.process(sampled, logits)
        for row, entry in enumerate(sampled):
            expected = _single_row(subject, entry, logits[row])
            if (message := difference(result[row], expected)) is not None:
                raise Violation(
                    f"in step {number}, with {len(sampled)} rows, {message}; the row belongs to "
                    f"{short_repr(replace(entry.case, outputs=tuple(entry.outputs)))}",
                    "a row's result may depend on nothing but its own request: keep the state "
                    "to a request in its state (start, advance, device_state; observe, if it "
                    "depends on logits) or follow every BatchUpdate, key caches by rows.version, "
                    "and do not mix rows",
                )
        batch.advance(sampled, logits, result)


def _single_row(subject: Subject, entry: _HistoryRequest, logits: torch.Tensor) -> torch.Tensor:
    """Return the result for a request that ran alone from its start, for logits [vocab]."""
    if entry.alone is None:
        return run_alone(subject, entry.case, entry.outputs, logits)
    return entry.alone.process(logits.unsqueeze(0))[0]


def _token(entry: _HistoryRequest, vocab_size: int) -> int:
    """Return a request's next token: often one of a few, or the next of its arguments'."""
    at, ids = len(entry.outputs), entry.case.argument_ids
    run = _mixed(entry.number, at // _RUN)
    if ids and run % 2:
        return ids[(run // 2 + at) % len(ids)]
    mixed = _mixed(entry.number, at)
    return mixed % min(4, vocab_size) if mixed % 5 else mixed % vocab_size


def _mixed(number: int, at: int) -> int:
    return (number * 1_000_003 + at * 7_919 + 12_345) * 48_271 % (2**31 - 1)


def _logits(entry: _HistoryRequest, vocab_size: int) -> torch.Tensor:
    seed = entry.number * 1_009 + len(entry.outputs)
    return make_logits(seed, 1, vocab_size, LOGITS_KINDS[seed % len(LOGITS_KINDS)])
