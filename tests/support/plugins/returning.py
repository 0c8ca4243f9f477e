"""An executor with results that differ from the plan, for requests that ask for it by user id."""

from __future__ import annotations

from concurrent.futures import Future

from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from support.samples import Sample


class Returning(Sample, UniprocExecutor, contract=1):
    def sample_tokens(self, plan, bitmask=None):
        future = super().sample_tokens(plan, bitmask)
        result = future.result()
        sampled = result.sampled_token_ids
        for request_id in list(plan.num_scheduled_tokens):
            how = request_id.partition("-")[0]
            if how == "nothing" and len(sampled) > 1:
                sampled.pop(request_id, None)
            elif how == "empty":
                sampled[request_id] = []
            elif how == "doubled" and request_id in sampled:
                sampled[request_id] *= 2
            elif how == "early":
                sampled.setdefault(request_id, [7])
            elif how == "foreign":
                self.foreign = request_id
        if (foreign := getattr(self, "foreign", None)) and foreign not in plan.num_scheduled_tokens:
            sampled[foreign] = [7]
        return future


class NoResult(Sample, UniprocExecutor, contract=1):
    def sample_tokens(self, plan, bitmask=None):
        super().sample_tokens(plan, bitmask)
        future = Future()
        future.set_result({"sampled_token_ids": {}})
        return future


class NoFuture(Sample, UniprocExecutor, contract=1):
    """Returns no future."""

    def execute_model(self, plan):
        return None


class Raising(UniprocExecutor):
    """Raises `error` in the step in which a request reaches a length."""

    contract = 2
    error: BaseException | None = RuntimeError("no step today")
    length = 60

    def execute_model(self, plan):
        if self.fails(plan):
            raise self.error
        return super().execute_model(plan)

    def fails(self, plan):
        computed = plan.num_computed_tokens()
        return self.error is not None and any(
            computed[request_id] + count >= self.length
            for request_id, count in plan.num_scheduled_tokens.items()
        )


class FailingSample(Raising):
    """Fails so in the future of the tokens, as `uniproc` does if its worker raises."""

    contract = 2

    def execute_model(self, plan):
        return UniprocExecutor.execute_model(self, plan)

    def sample_tokens(self, plan, bitmask=None):
        if not self.fails(plan):
            return super().sample_tokens(plan, bitmask)
        future = Future()
        future.set_exception(self.error)
        return future


class NoPlan(Sample, DefaultScheduler, contract=1):
    """Returns no plan."""

    def schedule(self):
        super().schedule()


class NoOutputs(Sample, DefaultScheduler, contract=1):
    """Returns no outputs."""

    def update(self, plan, result):
        super().update(plan, result)


class Cancelled(Sample, UniprocExecutor, contract=1):
    """Returns a future that is cancelled."""

    def execute_model(self, plan):
        future = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


class TooMany(Sample, DefaultScheduler, contract=1):
    """Plans more tokens than a request has."""

    def schedule(self):
        plan = super().schedule()
        plan.num_scheduled_tokens.update(dict.fromkeys(plan.num_scheduled_tokens, 1000))
        return plan


class Unknown(Sample, DefaultScheduler, contract=1):
    """Plans tokens of a request that does not exist."""

    def schedule(self):
        plan = super().schedule()
        plan.num_scheduled_tokens["unknown"] = 1
        return plan


class Ignoring(Sample, DefaultScheduler, contract=1):
    """Adds no request."""

    def add_request(self, request):
        pass
