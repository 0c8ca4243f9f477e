"""A batch on a desk: requests in rows, the engine's own pipeline over them, logits to feed it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from hardpoint.core.worker.sampling.fault_isolation import FaultIsolation
from hardpoint.core.worker.sampling.pipeline import LogitsPipeline
from hardpoint.core.worker.sampling.processor_runner import ProcessorError, ProcessorRunner
from hardpoint.plugins import Added, BatchUpdate, LogitsRequest, Move, Moved
from hardpoint.testing.suite import Violation

from .subject import Case, Subject

KINDS = ("plain", "ties", "masked")
"""Kinds of logits that a model and the masks before a processor may make."""

_SOUND_ADVICE = (
    "return float32 logits of the shape and on the device that were given (or Edits or None), "
    "and raise for no arguments that Arguments and prepare accept"
)


class Desk:
    """Requests that stand in rows 0, 1, ... as the engine would have put them there."""

    def __init__(
        self, subject: Subject, cases: Sequence[Case], *, stage: ProcessorRunner | None = None
    ) -> None:
        """Start every case; `stage` is a fresh one if none is given.

        Raises:
            Violation: the processor raised.
        """
        self.subject = subject
        self.stage = subject.build() if stage is None else stage
        self.pipeline = LogitsPipeline([self.stage], self.stage.device)
        self.outputs = [list(case.outputs) for case in cases]
        self.requests = [
            case.request(subject, f"r{row}", self.outputs[row], row)
            for row, case in enumerate(cases)
        ]
        for request in self.requests:
            started(self.pipeline, request)
        self.take_rows()

    def take_rows(self) -> None:
        """Tell the processor that each request took its row."""
        added = tuple(_added(request) for request in self.requests)
        self.update(BatchUpdate(len(added), added=added))

    def update(self, update: BatchUpdate | None) -> None:
        """Tell the processor of a step's changes."""
        self.pipeline.update(update)
        check_books(self.stage)

    def swap(self, first: int, second: int) -> None:
        """Let the requests of two rows change places."""
        for request in self.requests:
            if request.row in (first, second):
                request.row = second if request.row == first else first
        move = Moved(first, second, Move.SWAP)
        self.update(BatchUpdate(len(self.requests), moved=(move,)))

    def process(
        self, logits: torch.Tensor, requests: Sequence[LogitsRequest] | None = None
    ) -> torch.Tensor:
        """Return what the pipeline makes of logits [requests, vocab], which stay as they are."""
        chosen = self.requests if requests is None else list(requests)
        return run_pipeline(self.pipeline, self.stage, logits.clone(), chosen)

    def process_apart(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the same made row by row, as after a fault in the step."""
        isolation = FaultIsolation(self.pipeline, self.requests, logits.clone)
        isolation.isolate(self.stage.name)
        result = isolation.run(logits.clone())
        for fault in isolation.faults.values():
            raise Violation(f"on a row alone, {fault.message}", _SOUND_ADVICE)
        return result

    def advance(self, tokens: Sequence[int], requests: Sequence[LogitsRequest] = ()) -> None:
        """Take a step in which each request gets one more token."""
        chosen = list(requests) or self.requests
        self.process(torch.zeros(len(chosen), self.subject.vocab_size), chosen)
        for request, token in zip(chosen, tokens, strict=True):
            self.outputs[self.requests.index(request)].append(token)
        advanced(self.pipeline, chosen, tokens)
        self.update(None)


def alone(
    subject: Subject, case: Case, outputs: Sequence[int], logits: torch.Tensor
) -> torch.Tensor:
    """Return what a fresh processor makes of one request's row, from its whole history.

    Args:
        subject: the processor.
        case: the request.
        outputs: all that it has.
        logits: [vocab].
    """
    whole = Case(case.arguments, case.params, case.prompt, tuple(outputs), case.stop_token_ids)
    return Desk(subject, [whole]).process(logits.unsqueeze(0))[0]


def started(pipeline: LogitsPipeline, request: LogitsRequest) -> None:
    """Start a request; raise a Violation if its start fails."""
    if (fault := pipeline.start(request)) is not None:
        raise Violation(
            f"start or start_row failed: {fault.message}",
            "start and start_row must take every request that prepare let pass, with any outputs",
        )


def advanced(
    pipeline: LogitsPipeline, requests: Sequence[LogitsRequest], tokens: Sequence[int]
) -> None:
    """Carry states over one more token; raise a Violation if that fails."""
    for fault in pipeline.advance(requests, tokens, torch.tensor(list(tokens))).values():
        raise Violation(
            f"advance or advance_rows failed: {fault.message}",
            "advance and advance_rows must take every token of the vocabulary",
        )


def check_books(stage: ProcessorRunner) -> None:
    """Raise a Violation if a batch-level processor could not follow an update."""
    if stage.broken is not None:
        raise Violation(
            f"update_state raised {type(stage.broken).__name__}: {stage.broken}",
            "update_state must follow every update, also None and requests of no interest",
        ) from stage.broken


def run_pipeline(
    pipeline: LogitsPipeline,
    stage: ProcessorRunner,
    logits: torch.Tensor,
    requests: list[LogitsRequest],
) -> torch.Tensor:
    """Run the pipeline in place; raise a Violation if the processor fails."""
    try:
        return pipeline.apply(logits, requests)
    except ProcessorError as error:
        cause = error.cause
        raise Violation(
            f"{stage.method_name} failed: {type(cause).__name__}: {cause}", _SOUND_ADVICE
        ) from cause


def make_logits(seed: int, rows: int, vocab: int, kind: str = "plain") -> torch.Tensor:
    """Return pseudo-random logits [rows, vocab].

    Args:
        seed: equal seeds give equal logits.
        rows: how many.
        vocab: width.
        kind: "plain"; "ties" (few values); "masked" (a third at -inf); "flat" (all equal);
            "huge" (up to 1e30); "survivor" (one token per row not at -inf).
    """
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=source) * 4
    if kind == "ties":
        return logits.round().clamp(-4, 4)
    if kind == "flat":
        return torch.full_like(logits, float(logits[0, 0]))
    if kind == "huge":
        return logits.sign() * 10.0 ** (logits.abs() * 4).clamp(max=30)
    if kind == "masked":
        masked = torch.rand(rows, vocab, generator=source) < 0.33
        masked[torch.arange(rows), torch.randint(vocab, (rows,), generator=source)] = False
        return logits.masked_fill(masked, -torch.inf)
    if kind == "survivor":
        left = torch.randint(vocab, (rows, 1), generator=source)
        return torch.full_like(logits, -torch.inf).scatter(1, left, logits.gather(1, left))
    return logits


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Say how two rows [vocab] differ; None if they are equal bit for bit."""
    if torch.equal(got.view(torch.int32), wanted.view(torch.int32)):
        return None
    places = (got.view(torch.int32) != wanted.view(torch.int32)).nonzero().view(-1)
    token = int(places[0])
    text = (
        f"{len(places)} of {len(got)} logits differ, the first at token {token}: "
        f"{float(got[token]):.9g} instead of {float(wanted[token]):.9g}"
    )
    if torch.allclose(got, wanted, rtol=1e-4, atol=1e-4):
        text += (
            ". The difference is mere rounding: an operation here rounds differently for other "
            "numbers of rows, as matrix products and sums along a row may; softmax and amax do not"
        )
    return text


def _added(request: LogitsRequest) -> Added:
    params = msgspec.structs.replace(request.params, plugin_args=dict(request.arguments))
    return Added(request.row, params, request.prompt_token_ids, request.output_token_ids)
