"""A cap on the running requests of each tenant."""

from __future__ import annotations

from hardpoint import plugins
from hardpoint.plugins import (
    Annotated,
    Load,
    Meta,
    PolicyContext,
    Request,
    RequestStatus,
    SchedulingPolicy,
)

Count = Annotated[int, Meta(ge=1)]


class TenantCap(SchedulingPolicy):
    """Limits the running requests of each tenant; otherwise first come, first served."""

    contract = 1

    class Options(plugins.Options):
        """The tenants and their limits.

        Attributes:
            tag: name of the request tag with the tenant; requests without it are one tenant.
            max_running: limit of running requests of a tenant.
            limits: the same for particular tenants.
        """

        tag: str = "tenant"
        max_running: Count = 4
        limits: dict[str, Count] = {}

    options: Options

    def __init__(self, context: PolicyContext) -> None:
        """Create a policy without running requests."""
        super().__init__(context)
        self._running: dict[str, set[str]] = {}

    def key(self, request: Request) -> float:
        """Order by arrival."""
        return request.arrival_time

    def group(self, request: Request) -> str:
        """Return the tenant."""
        return request.tags.get(self.options.tag, "")

    def group_key(self, group: str, now: float) -> int:  # noqa: ARG002
        """Order tenants at their cap last, so that a step need not walk through their requests."""
        return int(self._is_full(group))

    def admit(self, request: Request, load: Load) -> str | None:  # noqa: ARG002
        """Return why a request of a tenant at its cap must wait; None for others."""
        tenant = self.group(request)
        if not self._is_full(tenant):
            return None
        return f"tenant {tenant!r} has {self._limit(tenant)} requests running, which is its limit"

    def added(self, request: Request) -> None:
        """Count a request that is running when this policy replaces another one."""
        if request.status is RequestStatus.RUNNING:
            self._start(request)

    def scheduled(self, request: Request, tokens: int) -> None:  # noqa: ARG002
        """Count a running request."""
        self._start(request)

    def preempted(self, request: Request) -> None:
        """Uncount a request that waits again."""
        self._stop(request)

    def finished(self, request: Request) -> None:
        """Uncount a finished request."""
        self._stop(request)

    def _start(self, request: Request) -> None:
        self._running.setdefault(self.group(request), set()).add(request.request_id)

    def _stop(self, request: Request) -> None:
        tenant = self.group(request)
        running = self._running.get(tenant, set())
        running.discard(request.request_id)
        if not running:
            self._running.pop(tenant, None)

    def _limit(self, tenant: str) -> int:
        return self.options.limits.get(tenant, self.options.max_running)

    def _is_full(self, tenant: str) -> bool:
        return len(self._running.get(tenant, ())) >= self._limit(tenant)
