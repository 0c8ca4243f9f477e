"""Fair: tenants share the engine by weight, whatever they send."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hardpoint import plugins
from hardpoint.plugins import Load, Meta, PolicyContext, Request, RequestStatus, SchedulingPolicy

from .virtual_counters import Client, VirtualCounters

Cost = Annotated[float, Meta(ge=0)]


@dataclass(slots=True)
class _Account:
    """What is known of a live request.

    Attributes:
        charged: its leading positions that are paid for.
        waiting: whether it counts among those of its tenant that wait.
    """

    tenant: Client
    charged: int
    waiting: bool = False


class Fair(SchedulingPolicy):
    """The tenant that had least runs next, and within a tenant whoever came first.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
    2024): a tenant pays for each prompt token computed and for each token sampled, divided by its
    weight. Over any time in which two tenants both wait, what they paid differs by at most
    2 * max(input_cost * longest prompt, output_cost * tokens that fit in a batch), divided by the
    smaller weight, as long as input_cost <= output_cost.

    Beyond the paper: tokens are paid as they are computed, so an aborted request costs what it
    used; what the prefix cache has is free; what is computed anew after a preemption was paid.
    """

    contract = 1
    state_format = "virtual token counters 1"

    class Options(plugins.Options):
        """Who the tenants are, and what things cost.

        Attributes:
            tag: of a request, its value is the tenant; those without it are a tenant together.
            weights: by tenant; one of weight 2 gets twice as much. 1 where it says nothing.
            input_cost: of a prompt token that is computed.
            output_cost: of a token that is sampled.
        """

        tag: str = "tenant"
        weights: dict[str, Annotated[float, Meta(gt=0)]] = {}
        input_cost: Cost = 1.0
        output_cost: Cost = 2.0

    def __init__(self, context: PolicyContext) -> None:
        """Begin with empty books."""
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
        """Order tenants by what they had."""
        return self._counters.counter(str(group))

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the latest admitted request of the tenant that had most."""
        return max(
            reversed(running),
            key=lambda request: self._accounts[request.request_id].tenant.counter,
        )

    def added(self, request: Request) -> None:
        """Open an account."""
        charged = self._imported.pop(request.request_id, None)
        handed_over = charged is not None
        if charged is None:  # what another policy let it compute is not for this one to charge
            known = request.num_tokens - 1 if request.output_token_ids else 0
            charged = max(known, request.num_computed_tokens)
        account = _Account(self._counters.begin(self.group(request)), charged)
        self._accounts[request.request_id] = account
        if request.status is not RequestStatus.RUNNING:
            self._wait(account, lift=not handed_over)

    def scheduled(self, request: Request, tokens: int) -> None:
        """Charge the tenant for what was never computed before."""
        account = self._accounts[request.request_id]
        if account.waiting:
            self._run(account)
        begin = max(account.charged, request.num_computed_tokens)
        end = request.num_computed_tokens + tokens
        if end > begin:
            cost = self._cost(request, end) - self._cost(request, begin)
            account.tenant.counter += cost / account.tenant.weight
            account.charged = end

    def preempted(self, request: Request) -> None:
        """Note that a request waits again."""
        self._wait(self._accounts[request.request_id])

    def finished(self, request: Request) -> None:
        """Close the account."""
        account = self._accounts.pop(request.request_id)
        if account.waiting:
            self._run(account)
        self._counters.end(account.tenant)

    def export_state(self) -> dict[str, Any]:
        """Return what tenants had, and how far live requests are paid for."""
        return {
            "tag": self.options.tag,
            "level": self._counters.level(),
            "counters": self._counters.export(),
            "charged": {name: account.charged for name, account in self._accounts.items()},
        }

    def import_state(self, state: Any) -> None:
        """Go on from there. What tenants had is left out if they were told by another tag."""
        self._imported = dict(state["charged"])
        if state["tag"] == self.options.tag:
            self._counters.restore(state["counters"], state["level"])

    def _cost(self, request: Request, end: int) -> float:
        """Return the cost of the leading `end` positions: the prompt's last one gives an output."""
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
