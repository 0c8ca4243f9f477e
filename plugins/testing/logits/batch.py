"""A batch of requests under test in the engine's logits pipeline, and the logits to run on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from hardpoint.plugins import (
    BatchUpdate,
    Finish,
    LogitsRequest,
    Move,
    RequestFault,
)
from hardpoint.plugins.requests import FinishedError
from hardpoint.plugins.sampling.rows import Added, Moved
from hardpoint.testing.engine_access import ProcessorFailedError, ProcessorPipeline
from hardpoint.testing.suite import Violation

from .subject import RequestCase, Subject

LOGITS_KINDS = ("plain", "ties", "masked")
"""Kinds of logits that a model, and the masks before a processor, may produce."""

_RESULT_ADVICE = (
    "return float32 logits of the given shape and device (or Edits or None), and raise for no "
    "arguments that Arguments and prepare accept"
)


class BatchFixture:
    """Requests in rows 0, 1, ... of a batch, with a processor to run on them."""

    def __init__(
        self,
        subject: Subject,
        cases: Sequence[RequestCase],
        *,
        pipeline: ProcessorPipeline | None = None,
    ) -> None:
        """Start every case, in a new pipeline unless one is given.

        Raises:
            Violation: the processor raised.
        """
        self.subject = subject
        self.pipeline = subject.build() if pipeline is None else pipeline
        self.outputs = [list(case.outputs) for case in cases]
        self.requests = [
            case.request(subject, f"r{row}", self.outputs[row], row)
            for row, case in enumerate(cases)
        ]
        for request in self.requests:
            start_request(self.pipeline, request)
        self.add_rows()

    def add_rows(self) -> None:
        """Pass an update that adds every request to the processor."""
        added = tuple(_added(request) for request in self.requests)
        self.update(BatchUpdate(len(added), added=added))

    def update(self, update: BatchUpdate | None) -> None:
        """Pass a step's changes of the batch to the processor."""
        self.pipeline.update(update)
        check_update_state(self.pipeline)

    def swap(self, first: int, second: int) -> None:
        """Exchange the requests of two rows."""
        for request in self.requests:
            if request.row in (first, second):
                row = second if request.row == first else first
                object.__setattr__(request, "row", row)  # as the engine does
        move = Moved(first, second, Move.SWAP)
        self.update(BatchUpdate(len(self.requests), moved=(move,)))

    def process(
        self, logits: torch.Tensor, requests: Sequence[LogitsRequest] | None = None
    ) -> torch.Tensor:
        """Return the pipeline's result for logits [requests, vocab], which stay unchanged."""
        chosen = self.requests if requests is None else list(requests)
        return apply_processor(self.pipeline, logits.clone(), chosen)

    def process_row_by_row(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the result of the processor run on each row apart, as after a fault."""
        result, faults = self.pipeline.apply_row_by_row(logits, self.requests)
        for fault in faults.values():
            raise Violation(f"on a single row, {fault.message}", _RESULT_ADVICE)
        return result

    def advance(
        self,
        tokens: Sequence[int],
        requests: Sequence[LogitsRequest] = (),
        logits: torch.Tensor | None = None,
    ) -> None:
        """Run a step in which each request gets one more token.

        Args:
            tokens: one per request; see `allowed_tokens`.
            requests: requests that get one; all if empty.
            logits: [requests, vocab] of the step; None is zeros.

        Raises:
            FinishedError: the processor ends one of them.
        """
        chosen = list(requests) or self.requests
        if logits is None:
            logits = torch.zeros(len(chosen), self.subject.vocab_size)
        processed = self.process(logits, chosen)
        tokens = allowed_tokens(self.pipeline, processed, tokens)
        for request, token in zip(chosen, tokens, strict=True):
            self.outputs[self.requests.index(request)].append(token)
        ends = advance_requests(self.pipeline, chosen, tokens, processed)
        self.update(None)
        for finish in ends.values():
            raise FinishedError(finish)


ENDS_ADVICE = (
    "let advance and observe return a Finish by the state and the token alone, so that a request "
    "ends at the same token in any batch, after a preemption and over drafts"
)


def run_alone(
    subject: Subject, case: RequestCase, outputs: Sequence[int], logits: torch.Tensor
) -> torch.Tensor:
    """Return a new processor's result for one request, started on its whole history.

    Args:
        subject: the processor.
        case: the request.
        outputs: all of its output tokens.
        logits: [vocab].
    """
    whole = RequestCase(
        case.arguments, case.params, case.prompt, tuple(outputs), case.stop_token_ids
    )
    return BatchFixture(subject, [whole]).process(logits.unsqueeze(0))[0]


def start_request(pipeline: ProcessorPipeline, request: LogitsRequest) -> None:
    """Start a request; raise a Violation if that fails, and FinishedError if it ends."""
    fault = pipeline.start(request)
    if isinstance(fault, Finish):
        raise FinishedError(fault)
    if fault is not None:
        raise Violation(
            f"start or start_row failed: {fault.message}",
            "start and start_row must accept every request that prepare accepts, with any outputs",
        )


def allowed_tokens(
    pipeline: ProcessorPipeline, processed: torch.Tensor, tokens: Sequence[int]
) -> list[int]:
    """Return tokens that may have been sampled from processed logits [rows, vocab].

    For a processor that observes, a token at -inf is replaced by the likeliest; others only see
    tokens, of which any may come.
    """
    if not pipeline.observes:
        return list(tokens)
    return [
        token if row[token] > -torch.inf else int(row.argmax())
        for row, token in zip(processed, tokens, strict=True)
    ]


def advance_requests(
    pipeline: ProcessorPipeline,
    requests: Sequence[LogitsRequest],
    tokens: Sequence[int],
    processed: torch.Tensor,
) -> dict[str, Finish]:
    """Advance the requests' states by one token each; raise a Violation if that fails.

    Returns:
        The requests that the processor ends.
    """
    ends = pipeline.advance(requests, tokens, processed)
    for fault in (end for end in ends.values() if isinstance(end, RequestFault)):
        raise Violation(
            f"advance, advance_rows or observe failed: {fault.message}",
            "advance and advance_rows must accept every token of the vocabulary, and observe "
            "every token that may be sampled; a state must be as State and max_state_bytes declare",
        )
    return {name: end for name, end in ends.items() if isinstance(end, Finish)}


def check_update_state(pipeline: ProcessorPipeline) -> None:
    """Raise a Violation if a batch-level processor failed to follow an update."""
    if (error := pipeline.update_error) is not None:
        raise Violation(
            f"update_state raised {type(error).__name__}: {error}",
            "update_state must accept every update, including None and requests that do not use "
            "the processor",
        ) from error


def apply_processor(
    pipeline: ProcessorPipeline, logits: torch.Tensor, requests: list[LogitsRequest]
) -> torch.Tensor:
    """Run the processor in place; raise a Violation if it fails."""
    try:
        return pipeline.apply(logits, requests)
    except ProcessorFailedError as error:
        cause = error.__cause__
        raise Violation(
            f"{pipeline.method_name} failed: {type(cause).__name__}: {cause}", _RESULT_ADVICE
        ) from cause


def make_logits(seed: int, rows: int, vocab: int, kind: str = "plain") -> torch.Tensor:
    """Return pseudo-random logits [rows, vocab].

    Args:
        seed: equal seeds give equal logits.
        rows: number of rows.
        vocab: width of a row.
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


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return a message on how two rows [vocab] differ; None if they are equal bit for bit."""
    if torch.equal(actual.view(torch.int32), expected.view(torch.int32)):
        return None
    indices = (actual.view(torch.int32) != expected.view(torch.int32)).nonzero().view(-1)
    token = int(indices[0])
    message = (
        f"{len(indices)} of {len(actual)} logits differ, the first at token {token}: "
        f"{float(actual[token]):.9g} instead of {float(expected[token]):.9g}"
    )
    if torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
        message += (
            ". The difference is mere rounding: an operation here rounds differently for other "
            "numbers of rows, as matrix products and sums along a row may; softmax and amax do not"
        )
    return message


def _added(request: LogitsRequest) -> Added:
    params = msgspec.structs.replace(request.params, plugin_args=dict(request.arguments))
    return Added(request.row, params, request.prompt_token_ids, request.output_token_ids)
