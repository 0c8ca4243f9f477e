"""A budget of tokens per second for each tenant, and a limit of its running requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from hardpoint import plugins
from hardpoint.plugins import (
    Annotated,
    EngineCoreRequest,
    Meta,
    Request,
    RequestError,
    SchedulerOutput,
    StepPart,
    WaitingFor,
    WaitReason,
)
from hardpoint.plugins.step_part import (
    AdmissionGate,
    EngineHalfContext,
    PlanData,
    RequestFilter,
    RequestLifecycle,
    ResourceCost,
    WorkerStep,
)
from hardpoint.plugins.worker_half import WorkerHalfContext

from .bucket import Bucket

Rate = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]

_WAIT_S = 0.002
_log = logging.getLogger(__name__)


class TenantBudget(StepPart):
    """Slows down tenants that use more tokens per second than they have bought.

    A request costs its prompt and the most that it may generate; what it does not generate is
    returned to the tenant when it ends. Requests without the tag are not limited.
    """

    contract = 1

    class Options(plugins.Options):
        """The tenants and their budgets.

        Attributes:
            tag: name of the request tag with the tenant.
            tokens_per_second: by which the budget of a tenant grows.
            burst: tokens that a tenant can save up; a request that costs more is refused.
            rates: tokens per second of particular tenants.
            running: limits of the running requests of particular tenants.
        """

        tag: str = "tenant"
        tokens_per_second: Rate = 1000.0
        burst: Count = 4096
        rates: dict[str, Rate] = {}
        running: dict[str, Count] = {}

    options: Options

    def engine_half(self, context: EngineHalfContext) -> Budgets:
        """Return the half that counts the tokens."""
        return Budgets(self.options, context.clock)

    def worker_half(self, context: WorkerHalfContext) -> BudgetLog:
        """Return the half that logs the budgets."""
        return BudgetLog(context.rank)


class Budgets(RequestFilter, AdmissionGate, ResourceCost, RequestLifecycle, PlanData):
    """The budgets of all tenants that have sent a request."""

    def __init__(self, options: TenantBudget.Options, clock: Callable[[], float]) -> None:
        """Start with full budgets.

        Args:
            options: options of the part.
            clock: seconds.
        """
        self.capacity = {_slots(tenant): limit for tenant, limit in options.running.items()}
        self._options, self._clock = options, clock
        self._buckets: dict[str, Bucket] = {}
        self._charged: dict[str, tuple[Request, int]] = {}  # by id, with tokens
        self._waiting: set[str] = set()  # ids that the gate holds back

    def uses(self, request: EngineCoreRequest) -> bool:
        """Return whether a request has a tenant."""
        return self._options.tag in request.tags

    def check(self, request: EngineCoreRequest) -> None:
        """Refuse a request that costs more than a tenant can save up.

        Raises:
            RequestError: it does.
        """
        if (price := _price(request)) > self._options.burst:
            raise RequestError(
                f"the request costs {price} tokens, prompt and max_tokens together; tenants can "
                f"save up {self._options.burst} (plugin.tenant_budget.burst)"
            )

    def gate(self, request: Request) -> WaitReason | None:
        """Take the price of a request from its tenant's budget; return a reason if it lacks."""
        tenant, price, now = self._tenant(request), _price(request.source), self._clock()
        bucket = self._bucket(tenant, now)
        if bucket.withdraw(price, now):
            self._waiting.discard(request.request_id)
            self._charged[request.request_id] = request, price
            return None
        self._waiting.add(request.request_id)
        level = int(bucket.level(now))
        return WaitReason(
            WaitingFor.PART,
            f"tenant {tenant!r} has {level} tokens left, the request costs {price}; "
            f"{self._rate(tenant):g} come per second",
            needed=price,
            available=level,
        )

    def cost(self, request: Request) -> Mapping[str, int]:
        """Return the slot of a tenant with a limit of running requests."""
        tenant = self._tenant(request)
        return {_slots(tenant): 1} if tenant in self._options.running else {}

    def begin(self, plan: SchedulerOutput) -> bytes:  # noqa: ARG002
        """Return the tokens that each tenant has left, for the workers."""
        now = self._clock()
        levels = {tenant: int(bucket.level(now)) for tenant, bucket in self._buckets.items()}
        return msgspec.msgpack.encode(levels)

    def ended(self, request_id: str) -> None:
        """Return the tokens that a request did not generate to its tenant."""
        self._waiting.discard(request_id)
        if (charged := self._charged.pop(request_id, None)) is not None:
            request, price = charged
            now = self._clock()
            unused = max(price - request.num_tokens, 0)
            self._bucket(self._tenant(request), now).put_back(unused, now)

    def wait(self) -> None:
        """Wait a moment if a request waits for its budget, so that the engine does not spin."""
        if self._waiting:
            time.sleep(_WAIT_S)

    def _tenant(self, request: Request) -> str:
        return request.tags[self._options.tag]

    def _rate(self, tenant: str) -> float:
        return self._options.rates.get(tenant, self._options.tokens_per_second)

    def _bucket(self, tenant: str, now: float) -> Bucket:
        if tenant not in self._buckets:
            self._buckets[tenant] = Bucket(self._rate(tenant), self._options.burst, now)
        return self._buckets[tenant]


class BudgetLog(WorkerStep):
    """Logs the budgets that are spent, for the logs of each worker.

    Attributes:
        levels: tokens left in the last step, by tenant.
    """

    def __init__(self, rank: int) -> None:
        """Start without budgets."""
        self._rank = rank
        self.levels: dict[str, int] = {}

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the budgets of a step."""
        self.levels = msgspec.msgpack.decode(data, type=dict[str, int])
        if spent := [tenant for tenant, level in self.levels.items() if level == 0]:
            _log.debug("rank %d, step %d: %s spent all", self._rank, plan.step, ", ".join(spent))


def _price(request: EngineCoreRequest) -> int:
    return len(request.prompt_token_ids) + (request.params.max_tokens or 0)


def _slots(tenant: str) -> str:
    return f"slots of {tenant}"
