"""An executor under test with workers of a script: how it is started, called and looked at."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hardpoint.plugins import (
    EngineCoreRequest,
    Executor,
    ExecutorContext,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    SchedulerOutput,
    WorkerInfo,
)
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.plugins.executor import WorkerLaunch
from hardpoint.plugins.parallel import Placement
from hardpoint.testing.engine_access import start_worker_process
from hardpoint.testing.suite import short_repr

from . import executor_rules as rules
from .scripted_worker import (
    REPORTING_PART,
    Order,
    StepHistory,
    WorkerScript,
    scripted_launch,
    step_message,
)

T = TypeVar("T")

CALL_SECONDS = 5.0
"""Maximum time of a call."""
START_SECONDS = 30.0
"""Maximum time of a start."""
_CACHE_BLOCKS = 8
_UNORDERED = ("abort", "close", "defect")


class ExecutorSession:
    """An executor and its workers.

    Attributes:
        executor: under test.
        script: actions of its workers.
        parallel: numbers of ranks.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        build: Callable[..., Executor],
        order: Order | None = None,
        *,
        all_report: bool = False,
    ) -> None:
        """Build the executor.

        Args:
            build: `build(ExecutorContext, **fields)` does it.
            order: for its workers, until `close`.
            all_report: whether each rank reports of each step.
        """
        self.parallel = parallel
        self._all_report = all_report
        self._folder = Path(tempfile.mkdtemp(prefix="hardpoint-executor-"))
        self.script = WorkerScript(self._folder)
        if order is not None:
            self.script.set_order(order)
        self._history = StepHistory()
        self._step = 0
        self._expected: list[tuple[str, str]] = []
        try:
            self.executor = build(
                ExecutorContext,
                parallel=parallel,
                launch=self._launch,
                start_process=start_worker_process,
                progress=_no_progress,
                all_report=all_report,
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def start(self) -> None:
        """Start the executor as an engine does.

        Raises:
            Violation: it does not return the infos of all ranks in their order.
        """
        size = self.parallel.world_size
        infos = self.executor.start()
        if not isinstance(infos, Sequence) or not all(isinstance(i, WorkerInfo) for i in infos):
            raise rules.START.violation(f"start returned {short_repr(infos)}")
        ranks = [(1 << 20) - info.available_bytes for info in infos]
        if ranks != list(range(size)):
            raise rules.START.violation(
                f"start returned the infos of ranks {ranks}, there are {size}"
            )
        self._expected += [("open", ""), ("load_model", "")]
        self.executor.initialize_cache(_CACHE_BLOCKS)
        self._history.initialize(_CACHE_BLOCKS)
        self._expected.append(("initialize_cache", str(_CACHE_BLOCKS)))

    def rpc(self, method: str, args: Sequence[Any] = (), timeout: float | None = None) -> Any:
        """Call `collective_rpc`, and expect each rank to get the call."""
        self._expected.append((method, str(args[0]) if args else ""))
        return self.executor.collective_rpc(method, args, timeout)

    def plan(self, counts: Mapping[str, int]) -> SchedulerOutput:
        """Return the plan of the next step."""
        self._step += 1
        return _plan(self._step, counts)

    def begin(
        self, plan: SchedulerOutput, *, in_pipeline: bool = False
    ) -> Callable[[], ModelRunnerOutput]:
        """Start a step as an engine does; return a function that waits for its result."""
        forward = self.execute(plan)
        sampling: Future[Any] | None = None
        if in_pipeline and plan.total_num_scheduled_tokens:
            sampling = self.sample(plan)

        def result() -> ModelRunnerOutput:
            output = wait(forward, "execute_model")
            if output is None and plan.total_num_scheduled_tokens:
                output = wait(sampling or self.sample(plan), "sample_tokens")
            if not isinstance(output, ModelRunnerOutput):
                raise rules.RESULTS.violation(
                    f"the result of step {plan.step} is {short_repr(output)}, no ModelRunnerOutput"
                )
            return output

        return result

    def execute(self, plan: SchedulerOutput) -> Future[Any]:
        """Start the model of a step."""
        self._expected.append(("execute_model", str(plan.step)))
        return _future(self.executor.execute_model(plan), "execute_model")

    def sample(self, plan: SchedulerOutput) -> Future[Any]:
        """Start the sampling of a step."""
        self._expected.append(("sample_tokens", str(plan.step)))
        return _future(self.executor.sample_tokens(plan, _bitmask(plan)), "sample_tokens")

    def compare(
        self, plan: SchedulerOutput, result: Callable[[], ModelRunnerOutput]
    ) -> ModelRunnerOutput:
        """Compare a result, which it returns, with the result of steps in sequence."""
        expected = self._history.run(plan) or self._history.sample(plan, _bitmask(plan))
        output = result()
        if output.num_nans_in_logits:
            raise rules.RESULTS.violation(
                f"the result of step {plan.step}, which has no tokens, is not from rank "
                f"{self.parallel.output_rank}: {short_repr(output)}"
            )
        tokens = output.sampled_token_ids
        for request_id in expected.sampled_token_ids.keys() | tokens.keys():
            wanted, got = expected.sampled_token_ids.get(request_id, []), tokens.get(request_id, [])
            if len(wanted) != len(got):
                raise rules.RESULTS.violation(
                    f"in step {plan.step} request {request_id!r} got {len(got)} tokens, the worker "
                    f"sampled {len(wanted)}"
                )
            if list(wanted) != list(got):
                raise rules.RESULTS.violation(
                    f"in step {plan.step} request {request_id!r} got token {got[0]}; a worker that "
                    f"ran each step once and in order samples {wanted[0]}"
                )
        return output

    def check_reports(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Check that the result of a step has the report of each rank.

        Raises:
            Violation: it has not.
        """
        wanted = {rank: step_message(plan) for rank in range(self.parallel.world_size)}
        reports = output.part_reports.get(REPORTING_PART, {})
        if reports != wanted:
            ranks = sorted(reports)
            raise rules.REPORTS.violation(
                f"the result of step {plan.step} has reports of ranks {ranks}, each of "
                f"{len(wanted)} ranks made one of this step"
            )

    def check_calls(self) -> None:
        """Check that each rank got every call once, in order.

        Raises:
            Violation: one did not.
        """
        for rank in range(self.parallel.world_size):
            calls = self.script.calls(rank)
            got = [(call.method, call.detail) for call in calls if call.method not in _UNORDERED]
            for index, expected in enumerate(self._expected):
                if index >= len(got) or got[index] != expected:
                    current = got[index] if index < len(got) else "nothing"
                    raise rules.RESULTS.violation(
                        f"call {index} of rank {rank} was {current}, the executor got {expected}"
                    )
            if more := got[len(self._expected) :]:
                raise rules.RESULTS.violation(
                    f"rank {rank} was called more often: {short_repr(more)}"
                )

    def check_workers(self) -> None:
        """Check that no worker observed a forbidden call.

        Raises:
            Violation: one did.
        """
        if defects := self.script.defects():
            if not self._expected:
                raise rules.START.violation(defects[0])
            raise rules.RESULTS.violation(
                defects[0], "call a worker in one thread at a time, in order"
            )

    def process_of(self, rank: int) -> int:
        """Return the process of a worker."""
        return self.script.calls(rank)[0].process

    def open_workers(self) -> list[int]:
        """Return the ranks with a worker that was not closed and did not end with its process."""
        ranks = []
        for rank in range(self.parallel.world_size):
            calls = self.script.calls(rank)
            if not calls or any(call.method == "close" for call in calls):
                continue
            if calls[0].process == os.getpid() or is_running(calls[0].process):
                ranks.append(rank)
        return ranks

    def close(self) -> None:
        """Close the executor, and remove the script."""
        try:
            self.executor.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self, rank: int, placement: Placement | None = None) -> WorkerLaunch:  # noqa: ARG002
        size = self.parallel.world_size
        if not 0 <= rank < size:
            raise ValueError(f"rank: expected 0 to {size - 1}, got {rank}")
        output_rank, reports = self.parallel.output_rank, self._all_report
        return scripted_launch(self._folder, rank, size, output_rank, reports=reports)


def wait(future: Future[Any], method: str) -> Any:
    """Return the result of a future.

    Raises:
        Violation: it is not done in time.
    """
    seconds = CALL_SECONDS
    try:
        return future.result(timeout=seconds)
    except FutureTimeoutError:
        if future.done():
            raise
        raise rules.FUTURES.violation(
            f"the future of {method} was not done after {seconds:g} s"
        ) from None


def is_running(process: int) -> bool:
    """Return whether a process of this machine runs."""
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def _plan(step: int, counts: Mapping[str, int]) -> SchedulerOutput:
    requests = tuple(
        NewRequest(
            source=EngineCoreRequest(
                request_id=request_id, prompt_token_ids=[1] * count, params=SamplingParams()
            ),
            output_token_ids=(),
            block_ids=([0],),
            num_computed_tokens=0,
        )
        for request_id, count in counts.items()
    )
    return SchedulerOutput(
        step=step,
        new_requests=requests,
        num_scheduled_tokens=dict(counts),
        total_num_scheduled_tokens=sum(counts.values()),
    )


def _bitmask(plan: SchedulerOutput) -> GrammarBitmask | None:
    """Return a bitmask for every second step."""
    names = list(plan.num_scheduled_tokens)
    if plan.step % 2 or not names:
        return None
    return GrammarBitmask(names, np.full((len(names), 9), plan.step, dtype=np.int32))


def _future(value: Any, method: str) -> Future[Any]:
    if not isinstance(value, Future):
        raise rules.FUTURES.violation(f"{method} returned {short_repr(value)}")
    return value


def _no_progress(activity: str, done: int, total: int) -> None:
    """Report no progress."""
