"""Checks of the results of schedulers and executors; their errors name the component."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, cast

from hardpoint.errors import PluginFaultError
from hardpoint.host.registry.blame import describe, is_fault, raise_unless_fault
from hardpoint.host.registry.discovery import is_third_party
from hardpoint.host.system.plugin_settings import READ, changed
from hardpoint.plugins import (
    Executor,
    ModelRunnerOutput,
    Request,
    RequestFault,
    Scheduler,
    SchedulerOutput,
)
from hardpoint.plugins.component import Component, Source

C = TypeVar("C", bound=Component)
T = TypeVar("T")


def result_of(future: Future[T], executor: str, method: str) -> T:
    """Wait for the result of a future that the executor's `method` returned.

    Raises:
        PluginFaultError: the future was cancelled.
        BaseException: the error of the call.
    """
    try:
        return future.result()
    except CancelledError as cause:
        if not future.cancelled():  # an error of the call
            raise
        message = f"{executor}: its {method} returned a future that was cancelled"
        raise PluginFaultError(message) from cause
    except RuntimeError as error:
        # The lock of a future is not held when a signal ends the wait before it was taken again.
        if (interrupt := error.__context__) is not None and not is_fault(interrupt):
            raise interrupt from None
        raise


def no_result(plan: SchedulerOutput, executor: str) -> PluginFaultError:
    """Return the error of a step for which the executor returned None instead of a result."""
    return PluginFaultError(f"{executor}: it returned no result for step {plan.step}")


def plan_defect(plan: SchedulerOutput, scheduler: Scheduler) -> str | None:
    """Return the defect of a plan, None if it has none; called after its step failed."""
    try:
        return next(_plan_defects(plan, scheduler), None)
    except BaseException as cause:
        raise_unless_fault(cause)
        return f"cannot be read: {describe(cause)}"


def _plan_defects(plan: SchedulerOutput, scheduler: Scheduler) -> Iterator[str]:
    scheduled, computed = plan.num_scheduled_tokens, _computed_before(plan)
    for request_id in scheduled.keys() ^ computed.keys():
        yield (
            f"has request {request_id!r} only in one of num_scheduled_tokens and "
            f"new_requests or cached_requests"
        )
    for request_id, count in scheduled.items():
        live = live_request(scheduler, request_id)
        if live is None:
            yield f"schedules request {request_id!r}, which is not live"
            continue
        left = live.num_tokens - computed[request_id]
        left += len(plan.draft_token_ids.get(request_id, ()))
        if not 1 <= count <= left:
            yield f"schedules {count} tokens of request {request_id!r}, expected 1 to {left}"
    if (total := sum(scheduled.values())) != plan.total_num_scheduled_tokens:
        yield (
            f"has total_num_scheduled_tokens {plan.total_num_scheduled_tokens}, "
            f"expected their sum, {total}"
        )
    if total > (limit := scheduler.context.limits.max_num_batched_tokens):
        yield f"schedules {total} tokens, expected at most max_num_batched_tokens ({limit})"


def live_request(scheduler: Scheduler, request_id: str) -> Request | None:
    """Return a live request; None if the id is unknown, or the scheduler shows no live requests."""
    try:
        return scheduler.live_request(request_id)
    except NotImplementedError:  # optional for schedulers
        return None


class ResultCheck:
    """Finds the requests for which an executor returned too little, too much or nothing."""

    def __init__(self, executor: str, scheduler: Scheduler) -> None:
        self._executor = executor
        self._scheduler = scheduler

    def check_type(self, plan: SchedulerOutput, result: Any) -> None:
        """Check that a result is one, before anything reads it.

        Raises:
            PluginFaultError: it is not.
        """
        if not isinstance(result, ModelRunnerOutput):
            raise PluginFaultError(
                f"{self._executor}: expected a ModelRunnerOutput for step {plan.step}, got "
                f"{type(result).__name__}"
            )

    def check(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, RequestFault]:
        """Return the faults of requests, by id; add faults of planned requests to the result."""
        if _is_plain(plan, result) or result.invalid_block_ids:
            return {}
        faults = {
            request_id: RequestFault(
                f"{self._executor}: for step {plan.step} it returned {message}"
            )
            for request_id, message in self._differences(plan, result)
        }
        for request_id in faults.keys() & plan.num_scheduled_tokens.keys():
            result.faults[request_id] = faults[request_id]
            result.sampled_token_ids.pop(request_id, None)
        return faults

    def _differences(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Iterator[tuple[str, str]]:
        scheduled, sampled = plan.num_scheduled_tokens, result.sampled_token_ids
        for request_id in sampled.keys() - scheduled.keys():
            if live_request(self._scheduler, request_id) is not None:
                yield request_id, "tokens of a request that it was not to compute"
        computed = _computed_before(plan)
        for request_id, count in scheduled.items():
            if request_id in result.faults or request_id in result.pooler_output:
                continue
            tokens = sampled.get(request_id, ())
            limit = 1 + len(plan.draft_token_ids.get(request_id, ()))
            if len(tokens) > limit:
                yield request_id, f"{len(tokens)} tokens, expected {_range(limit)}"
            elif (count > 1 or not tokens) and (
                live := live_request(self._scheduler, request_id)
            ) is not None:
                is_complete = computed.get(request_id, 0) + count >= live.num_tokens
                if is_complete and not tokens and live.source.leader not in result.faults:
                    yield request_id, f"no token, expected {_range(limit)}"
                elif tokens and not is_complete:
                    yield request_id, "a token, expected none before the whole prompt is computed"


def _is_plain(plan: SchedulerOutput, result: ModelRunnerOutput) -> bool:
    """Return whether each request of a plan was to compute one token and got one.

    It is so in most steps, and costs less than 0.1 microseconds per request: no loop in Python.
    """
    scheduled, sampled = plan.num_scheduled_tokens, result.sampled_token_ids
    count = len(scheduled)
    return (
        plan.total_num_scheduled_tokens == count
        and list(sampled) == list(scheduled)
        and all(sampled.values())  # none is empty, so if their sum is that, each is of length 1
        and sum(map(len, sampled.values())) == count
    )


def _computed_before(plan: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request were computed before the step, by id."""
    cached = plan.cached_requests
    computed = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
    return computed | {new.source.request_id: new.num_computed_tokens for new in plan.new_requests}


def _range(limit: int) -> str:
    return "one" if limit == 1 else f"1 to {limit}"


def watched(component: C, *methods: str) -> C:
    """Return a component with methods that restore torch's settings, and name the component.

    Only a third party's component is watched. An executor may set the number of threads.
    """
    source = _third_party(component)
    return component if source is None else cast(C, _Watched(component, source, methods))


class _Watched:
    """A component with some watched methods."""

    def __init__(self, component: Component, source: Source, methods: Sequence[str]) -> None:
        self._component = component
        for name in methods:
            sets_threads = isinstance(component, Executor)
            watched = _watched_method(getattr(component, name), source, name, sets_threads)
            setattr(self, name, watched)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_component"], name)


def _watched_method(
    method: Callable[..., T], source: Source, name: str, sets_threads: bool
) -> Callable[..., T]:
    def call(*args: Any) -> T:
        before = READ[0]()
        try:
            return method(*args)
        finally:
            if READ[0]() != before:
                changed(before, source, name, threads=not sets_threads)

    return call


def _third_party(component: Component) -> Source | None:
    source = getattr(getattr(component, "context", None), "source", None)
    return None if source is None or not is_third_party(source) else source
