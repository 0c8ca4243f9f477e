"""Pooling as a step part: drives the poolers that requests name."""

from __future__ import annotations

from collections.abc import Collection

from hardpoint import plugins
from hardpoint.plugins import EngineConfig, EngineHalf, FrontendHalf, StepPart, WorkerHalf
from hardpoint.plugins.frontend_half import FrontendHalfContext
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

from .requests import PooledRequests, PooledResults
from .worker import PoolingWorker


class Pooling(StepPart):
    """Requests with `pooling_params`, whose results are vectors; drives the `poolers` kind.

    A fault of a pooler ends the request that it is about.
    """

    contract = 1
    fault_scope = "request"

    class Options(plugins.Options):
        """Options.

        Attributes:
            pooler: pooler of requests that name none; None is the one that the folder of the model
                names, or else "last".
        """

        pooler: str | None = None

    options: Options

    @classmethod
    def request_fields(cls, config: EngineConfig) -> Collection[str]:  # noqa: ARG003
        """Return the field of requests that pool."""
        return ("pooling_params",)

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf:
        """Return the half that checks which pooler a request names."""
        return PooledRequests(context.components, self.options.pooler or "last")

    def engine_half(self, context: EngineHalfContext) -> EngineHalf:  # noqa: ARG002
        """Return the half that reads results."""
        return PooledResults(self.name)

    def worker_half(self, context: WorkerHalfContext) -> WorkerHalf | None:
        """Return the half that pools, in the rank that has the last hidden states."""
        if context.rank != self.context.config.parallel.output_rank:
            return None
        return PoolingWorker(context)
