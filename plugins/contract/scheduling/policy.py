"""Scheduling policies: the order of requests and the choice of preemption victims."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hardpoint.plugins.component.base import Context
from hardpoint.plugins.component.behaviour import (
    ADMITTED,
    ARRIVAL_ORDER,
    COMMON_GROUP,
    EQUAL,
    HASHABLE,
    LAST_OF_FIRST,
    NONE_OR_TEXT,
    NOTHING,
    ONE_OF_FIRST,
    ORDERED,
    Returned,
    notifies,
    returns,
)
from hardpoint.plugins.requests.plan import Finish
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.text.arguments import ComponentWithArguments

__all__ = ["Load", "PolicyContext", "SchedulingPolicy"]


OPTIONAL_METHODS = (
    "group",
    "group_key",
    "admit",
    "victim",
    "added",
    "scheduled",
    "preempted",
    "finished",
)
"""Methods that a policy need not define."""


def _none_text_or_end(value: Any, *arguments: Sequence[Any]) -> Any:
    return value if type(value) is Finish else NONE_OR_TEXT.check(value, *arguments)


def _none_or_end(value: Any, *_: Sequence[Any]) -> Any:
    return value if type(value) is Finish else None  # policies of before returned anything


_NONE_TEXT_OR_END = Returned("None, text that is not empty, or a `Finish`", _none_text_or_end)
_NONE_OR_END = Returned("None or a `Finish`; anything else counts as None", _none_or_end)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the engine at the time of a decision.

    Attributes:
        now: seconds on the engine's clock, read once per step.
        num_running: running requests.
        max_num_seqs: maximum of these.
        num_waiting: requests that do not run.
        token_budget: tokens of this step not assigned yet.
        num_free_blocks: KV blocks that no request references, including cached blocks.
        num_blocks: all KV blocks.
    """

    now: float
    num_running: int
    max_num_seqs: int
    num_waiting: int
    token_budget: int
    num_free_blocks: int
    num_blocks: int


class PolicyContext(Context["SchedulingPolicy"]):
    """Context of a scheduling policy."""


class SchedulingPolicy(ComponentWithArguments):
    """Orders waiting requests and chooses preemption victims. Only `key` must be implemented.

    The cost of a step does not depend on the number of waiting requests: keys are static, and only
    groups are compared again in each step. To order by something that changes with time, express it
    as a static key (waiting longer is arriving earlier) or as a few groups.

    A request gives it arguments under `plugin_args[name]`; `request.arguments` has them.

    If a method raises or returns an invalid value, `fcfs` makes that decision and
    `LLM.plugins.health()` counts the fault.

    Attributes:
        state_format: name of the format of `export_state`. A policy that replaces another one of
            the same format on a running engine gets its state; empty: no state is passed on.
        uses_priority: False in a class's own body declares that it ignores `Request.priority`; the
            engine then warns once when a request sets one. Subclasses do not inherit it.
    """

    context: PolicyContext
    state_format: ClassVar[str] = ""
    uses_priority: ClassVar[bool] = True

    @property
    def overridden(self) -> frozenset[str]:
        """Names of the optional methods that the policy overrides; schedulers may skip the others.

        `export_state` and `import_state` are not among them.
        """
        return frozenset(
            name
            for name in OPTIONAL_METHODS
            if getattr(getattr(self, name), "__func__", None) is not getattr(SchedulingPolicy, name)
        )

    @returns(ORDERED, otherwise=ARRIVAL_ORDER)
    @abstractmethod
    def key(self, request: Request) -> Any:
        """Return the sort key of a waiting request within its group, smallest first.

        Called when a request enters the queue: on arrival and at each preemption. Keys of one
        policy must be comparable; equal keys keep their order of arrival. A preempted request
        re-enters ahead of waiting ones with an equal key.
        """

    @returns(HASHABLE, otherwise=COMMON_GROUP)
    def group(self, request: Request) -> Hashable:  # noqa: ARG002
        """Return the group in which a request waits; by default all are in one, None.

        Called whenever `key` is.
        """
        return None

    @returns(ORDERED, otherwise=EQUAL)
    def group_key(self, group: Any, now: float) -> Any:  # noqa: ARG002
        """Return the sort key of a group; the group with the smallest one is admitted from first.

        Called for every group with waiting requests at the first admission of a step, and again
        for a group after an admission from it, after `scheduled`. Not called for a single group.

        Args:
            group: as returned by `group`.
            now: seconds on the engine's clock.
        """
        return 0

    @returns(_NONE_TEXT_OR_END, otherwise=ADMITTED)
    def admit(self, request: Request, load: Load) -> str | Finish | None:  # noqa: ARG002
        """Return None to admit a waiting request, or the reason to hold it back in this step.

        A `Finish` ends the request with the tokens that it has. Later requests may be admitted
        first. A policy cannot keep the engine idle: if nothing runs, the first request that it
        holds back is admitted anyway.
        """
        return None

    @returns(ONE_OF_FIRST, otherwise=LAST_OF_FIRST)
    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the request to preempt when blocks run out; by default the last admitted.

        Args:
            running: in order of admission, never empty.
            load: load of the engine.
        """
        return running[-1]

    @notifies
    def added(self, request: Request) -> None:
        """Handle a new request; calls of `key` and `group` follow.

        A policy that replaces another one on a running engine gets a call for every live request,
        in order of arrival; no call of `key` follows for requests with status RUNNING.
        """

    @returns(_NONE_OR_END, otherwise=NOTHING)
    def scheduled(self, request: Request, tokens: int) -> Finish | None:
        """Handle the assignment of a step's tokens to a request, drafts included.

        `request.num_computed_tokens` does not include them yet. A `Finish` ends the request with
        the result of the step. Steps before it may be under way: its `num_tokens` makes the end
        exact.
        """

    @notifies
    def preempted(self, request: Request) -> None:
        """Handle the preemption of a request; it lost its blocks and is computed again."""

    @notifies
    def finished(self, request: Request) -> None:
        """Handle the end of a request, for any reason, whether it ran or not."""

    def export_state(self) -> Any:
        """Return the state as plain data, for a policy that replaces this one."""
        return None

    def import_state(self, state: Any) -> None:
        """Load the state of a policy with the same `state_format`.

        Called before `added` is called for any request.
        """
