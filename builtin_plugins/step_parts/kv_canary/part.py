"""The KV canary as a step part: fails requests with wrong keys and values."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from hardpoint.plugins import (
    EngineCoreRequest,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
    StepPart,
)
from hardpoint.plugins.step_part import (
    EngineHalfContext,
    PlanData,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
)
from hardpoint.plugins.worker_half import WorkerHalfContext

from .checking import CanaryWorker
from .messages import Finding

_log = logging.getLogger("hardpoint")


class KVCanary(StepPart):
    """Checks in each step that blocks hold the right keys and values; `debug.kv_canary`.

    The rank that samples checks its cache; the others have the same block tables.
    """

    contract = 1
    fault_scope = "request"
    after = ("kv_transfer", "recorded_steps")

    def engine_half(self, context: EngineHalfContext) -> CanaryFindings | None:  # noqa: ARG002
        """Return the half that ends requests; None unless the canary is on."""
        return CanaryFindings(self.name) if self.context.config.debug.kv_canary else None

    def worker_half(self, context: WorkerHalfContext) -> CanaryWorker | None:
        """Return the half that writes and checks entries, in the rank that samples."""
        config = self.context.config
        if not config.debug.kv_canary or context.rank != config.parallel.output_rank:
            return None
        return CanaryWorker(context)


class CanaryFindings(RequestFilter, RequestLifecycle, PlanData, StepObserver):
    """Ends the requests for which the worker has found a wrong entry."""

    every_plan = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._live: set[str] = set()
        self._last_step = 0
        self._invalid: dict[int, int] = {}  # last step that may have read a block without content

    def uses(self, request: EngineCoreRequest) -> bool:
        """Keep the id of the request."""
        self._live.add(request.request_id)
        return True

    def refused(self, request_id: str) -> None:
        """Forget a request."""
        self._live.discard(request_id)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._live.discard(request_id)

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return no data, so that the worker half is called in each step."""
        self._last_step = plan.step
        return b"" if plan.total_num_scheduled_tokens else None

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        """Return the requests that have wrong entries.

        Blocks that could not be loaded are computed again, by requests of all steps under way.
        """
        self._invalid |= dict.fromkeys(result.invalid_block_ids, self._last_step)
        ended: dict[str, RequestFault] = {}
        for report in result.part_reports.get(self._name, {}).values():
            findings = msgspec.msgpack.decode(report, type=dict[str, Finding])
            for request_id, finding in findings.items():
                is_known = plan.step <= self._invalid.get(finding.block_id, 0)
                if request_id in self._live and not is_known:
                    _log.error("KV canary, step %d: %s", plan.step, finding.text)
                    ended[request_id] = RequestFault(f"KV canary: {finding.text}", self._name)
        return ended
