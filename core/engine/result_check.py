"""Checks the result of a step against its plan, so that no request waits for what never comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hardpoint.plugins import ModelRunnerOutput, Request, RequestFault, SchedulerOutput
from hardpoint.plugins.errors import PluginFaultError


class ResultCheck:
    """Finds the requests for which an executor returned too little, too much or nothing."""

    def __init__(self, executor: str, live_request: Callable[[str], Request | None]) -> None:
        """Store what names the executor, and the scheduler's method, which it may lack."""
        self._executor = executor
        self._live_request = live_request

    def check(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, RequestFault]:
        """Return the faults of requests, by id; those of the plan are added to the result, too.

        Raises:
            PluginFaultError: it is no result at all.
        """
        if not isinstance(result, ModelRunnerOutput):
            raise PluginFaultError(
                f"{self._executor}: expected a ModelRunnerOutput for step {plan.step}, got "
                f"{type(result).__name__}"
            )
        if _is_plain(plan, result) or result.invalid_block_ids:
            return {}
        found = {
            request_id: RequestFault(
                f"{self._executor}: for step {plan.step} it returned {message}"
            )
            for request_id, message in self._differences(plan, result)
        }
        for request_id in found.keys() & plan.num_scheduled_tokens.keys():
            result.faults[request_id] = found[request_id]
            result.sampled_token_ids.pop(request_id, None)
        return found

    def _differences(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Iterator[tuple[str, str]]:
        """Yield requests with what is wrong with their tokens, faults that are known left out."""
        scheduled, sampled = plan.num_scheduled_tokens, result.sampled_token_ids
        for request_id in sampled.keys() - scheduled.keys():
            if self._live(request_id) is not None:
                yield request_id, "tokens of a request that it was not to compute"
        computed = _computed_before(plan)
        for request_id, count in scheduled.items():
            if request_id in result.faults or request_id in result.pooler_output:
                continue
            tokens = sampled.get(request_id, ())
            most = 1 + len(plan.draft_token_ids.get(request_id, ()))
            if len(tokens) > most:
                yield request_id, f"{len(tokens)} tokens, expected {_range(most)}"
            elif (count > 1 or not tokens) and (live := self._live(request_id)) is not None:
                is_complete = computed.get(request_id, 0) + count >= live.num_tokens
                if is_complete and not tokens:
                    yield request_id, f"no token, expected {_range(most)}"
                elif tokens and not is_complete:
                    yield request_id, "a token, expected none before the whole prompt is computed"

    def _live(self, request_id: str) -> Request | None:
        try:
            return self._live_request(request_id)
        except NotImplementedError:  # optional for schedulers
            return None


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


def _range(most: int) -> str:
    return "one" if most == 1 else f"1 to {most}"
