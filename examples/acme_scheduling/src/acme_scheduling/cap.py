"""A cap on what runs of each tenant."""

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
    """At most so many requests of a tenant run at once; within that, first come, first served."""

    contract = 1

    class Options(plugins.Options):
        """Who the tenants are, and how many requests of each may run.

        Attributes:
            tag: of a request, its value is the tenant; those without it are one together.
            max_running: most requests of a tenant that run at once.
            limits: the same for single tenants.
        """

        tag: str = "tenant"
        max_running: Count = 4
        limits: dict[str, Count] = {}

    def __init__(self, context: PolicyContext) -> None:
        """Begin with nobody running."""
        super().__init__(context)
        self._running: dict[str, set[str]] = {}

    def key(self, request: Request) -> float:
        """Order by arrival."""
        return request.arrival_time

    def group(self, request: Request) -> str:
        """Return the tenant."""
        return request.tags.get(self.options.tag, "")

    def group_key(self, group: str, now: float) -> int:  # noqa: ARG002
        """Put tenants at their cap last, so that those behind need not be looked for."""
        return int(self._is_full(group))

    def admit(self, request: Request, load: Load) -> str | None:  # noqa: ARG002
        """Hold a request back whose tenant is at its cap."""
        tenant = self.group(request)
        if not self._is_full(tenant):
            return None
        return f"tenant {tenant!r} has {self._limit(tenant)} requests running, as many as it may"

    def added(self, request: Request) -> None:
        """Count a request that runs already, when this policy takes another one's place."""
        if request.status is RequestStatus.RUNNING:
            self._start(request)

    def scheduled(self, request: Request, tokens: int) -> None:  # noqa: ARG002
        """Count a request that runs."""
        self._start(request)

    def preempted(self, request: Request) -> None:
        """Count a request no more that waits again."""
        self._stop(request)

    def finished(self, request: Request) -> None:
        """Count a request no more that ended."""
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
