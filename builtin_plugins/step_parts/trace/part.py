"""Traces as a step part."""

from __future__ import annotations

from typing import Annotated, cast

from hardpoint import plugins
from hardpoint.plugins import Meta, Sampler, StepPart
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

from .reader import LogitsReader
from .recorder import TraceRecorder


class Tracing(StepPart):
    """Records the choice of tokens for requests with "trace" in `include`.

    It changes no output. A fault loses traces, and ends no request.
    """

    contract = 1
    fault_scope = "step"

    class Options(plugins.Options):
        """Options.

        Attributes:
            candidates: number of tokens per position and per change, if a request states none.
            positions: number of traced output positions; later ones are not traced.
            rows: maximum number of traced positions per step; further requests are not traced.
        """

        candidates: Annotated[int, Meta(ge=1, le=20)] = 8
        positions: Annotated[int, Meta(ge=1, le=4096)] = 4096
        rows: Annotated[int, Meta(ge=1, le=256)] = 32

    class Arguments(plugins.Arguments):
        """Arguments of a traced request.

        Attributes:
            candidates: number of tokens per position and per change; None is the option.
        """

        candidates: Annotated[int, Meta(ge=1, le=20)] | None = None

    options: Options

    def engine_half(self, context: EngineHalfContext) -> TraceRecorder:
        """Return the half that knows the steps, and keeps the records."""
        return TraceRecorder(self.name, self.options.positions, context.why_waiting)

    def worker_half(self, context: WorkerHalfContext) -> LogitsReader | None:
        """Return the half that reads logits, in the rank that samples."""
        if context.rank != self.context.config.parallel.output_rank:
            return None
        options, (name, *_) = self.options, context.components.enabled("samplers")
        return LogitsReader(
            context.rank,
            cast(type[Sampler], context.components.find("samplers", name)),
            name,
            num_candidates=options.candidates,
            num_positions=options.positions,
            max_rows=options.rows,
        )
