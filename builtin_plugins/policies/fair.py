"""Fair: tenants share the engine in proportion to their weights."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hardpoint import plugins
from hardpoint.plugins import Load, Meta, PolicyContext, Request, RequestStatus, SchedulingPolicy

from .virtual_counters import ClientCounter, VirtualCounters

Cost = Annotated[float, Meta(ge=0)]


@dataclass(slots=True)
class _Account:
    """The account of a live request.

    Attributes:
        tenant: the tenant that pays.
        charged: number of leading positions that were charged.
        num_member_tokens: length of the prompts of its members.
        waiting: whether it counts as a waiting request of its tenant.
    """

    tenant: ClientCounter
    charged: int
    num_member_tokens: int
    waiting: bool = False


class Fair(SchedulingPolicy):
    """Runs the tenant with the least service next; within a tenant, by arrival.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
    2024): a tenant is charged for each prompt token computed and each token sampled, divided by its
    weight. Over any time in which two tenants both have waiting requests, their charges differ by
    at most 2 * max(input_cost * longest prompt, output_cost * tokens that fit in a batch), divided
    by the smaller weight, as long as input_cost <= output_cost.

    Beyond the paper: tokens are charged when they are computed, so an aborted request costs what it
    used; tokens from the prefix cache are free; recomputation after a preemption is free. The
    prompts of a request's members are charged with the last token of its own, when all of them
    are computed.

    A tenant without waiting requests earns no credit. On a server, each key is a tenant: the
    tag `tenant` is the name of the key, unless its `tags` name another.
    """

    contract = 1
    uses_priority = False
    state_format = "virtual token counters 1"

    class Options(plugins.Options):
        """Tenants, weights and costs.

        Attributes:
            tag: name of the request tag with the tenant; requests without it are one tenant.
            weights: by tenant; a tenant of weight 2 gets twice as much. The default is 1.
            input_cost: cost of a computed prompt token.
            output_cost: cost of a sampled token.
        """

        tag: str = "tenant"
        weights: dict[str, Annotated[float, Meta(gt=0)]] = {}
        input_cost: Cost = 1.0
        output_cost: Cost = 2.0

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._counters = VirtualCounters(self.options.weights)
        self._accounts: dict[str, _Account] = {}
        self._imported: dict[str, int] = {}

    def key(self, request: Request) -> Any:
        """Order a tenant's requests by arrival."""
        return request.arrival_time

    def group(self, request: Request) -> str:
        """Return the tenant."""
        return request.tags.get(self.options.tag, "")

    def group_key(self, group: Hashable, now: float) -> float:  # noqa: ARG002
        """Order tenants by their counters."""
        return self._counters.counter(str(group))

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the latest admitted request of the tenant with the largest counter."""
        return max(
            reversed(running),
            key=lambda request: self._accounts[request.request_id].tenant.counter,
        )

    def added(self, request: Request) -> None:
        """Open an account for a request."""
        charged = self._imported.pop(request.request_id, None)
        imported = charged is not None
        if charged is None:  # computed under another policy, which is not charged
            known = request.num_tokens - 1 if request.output_token_ids else 0
            charged = max(known, request.num_computed_tokens)
        members = [member for group in request.source.members.values() for member in group]
        num_member_tokens = sum(len(member.prompt_token_ids) for member in members)
        tenant = self._counters.add(self.group(request))
        account = _Account(tenant, charged, num_member_tokens)
        self._accounts[request.request_id] = account
        if request.status is not RequestStatus.RUNNING:
            self._wait(account, lift=not imported)

    def scheduled(self, request: Request, tokens: int) -> None:
        """Charge the tenant for tokens that are computed for the first time."""
        account = self._accounts[request.request_id]
        if account.waiting:
            self._run(account)
        start = max(account.charged, request.num_computed_tokens)
        end = request.num_computed_tokens + tokens
        if end > start:
            cost = self._cost(request, end) - self._cost(request, start)
            if start < request.num_prompt_tokens <= end:
                cost += self.options.input_cost * account.num_member_tokens
            account.tenant.counter += cost / account.tenant.weight
            account.charged = end

    def preempted(self, request: Request) -> None:
        """Mark the request as waiting again."""
        self._wait(self._accounts[request.request_id])

    def finished(self, request: Request) -> None:
        """Close the account of a request."""
        account = self._accounts.pop(request.request_id)
        if account.waiting:
            self._run(account)
        self._counters.remove(account.tenant)

    def export_state(self) -> dict[str, Any]:
        """Return the counters of the tenants and the charges of live requests, as plain data."""
        return {
            "tag": self.options.tag,
            "level": self._counters.level(),
            "counters": self._counters.export(),
            "charged": {name: account.charged for name, account in self._accounts.items()},
        }

    def import_state(self, state: Any) -> None:
        """Restore exported state; counters only if the tenants have the same tag."""
        self._imported = dict(state["charged"])
        if state["tag"] == self.options.tag:
            self._counters.restore(state["counters"], state["level"])

    def _cost(self, request: Request, end: int) -> float:
        """Return the cost of the first `end` positions; the prompt's last one samples an output."""
        options: Fair.Options = self.options
        prompt = request.num_prompt_tokens
        outputs = max(end - prompt + 1, 0)
        return options.input_cost * min(end, prompt) + options.output_cost * outputs

    def _wait(self, account: _Account, *, lift: bool = True) -> None:
        account.waiting = True
        self._counters.wait(account.tenant, lift=lift)

    def _run(self, account: _Account) -> None:
        account.waiting = False
        self._counters.run(account.tenant)
