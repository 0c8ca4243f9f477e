"""Scheduling policies: who goes first and who gives way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .component import Component, Context
from .request import Request

__all__ = ["Load", "PolicyContext", "SchedulingPolicy"]

_OPTIONAL_METHODS = (
    "group",
    "group_key",
    "admit",
    "victim",
    "added",
    "scheduled",
    "preempted",
    "finished",
)


@dataclass(frozen=True, slots=True)
class Load:
    """How full the engine is at the moment of a decision.

    Attributes:
        now: seconds on the engine's clock; one reading per step.
        num_running: requests that run.
        max_num_seqs: most that may.
        num_waiting: requests that do not run.
        token_budget: tokens that this step may still give away.
        num_free_blocks: KV blocks that nobody holds, cached content included.
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
    """What a scheduling policy is built with."""


class SchedulingPolicy(Component):
    """Decides who goes first and who gives way. Only `key` must be written.

    A step costs what it schedules, not what waits: keys are static, and only groups are compared
    anew in each step. To order by something that changes with time, turn it into a static key
    (waiting longer is arriving earlier) or into a few groups.

    Where a method raises or returns nonsense, `fcfs` takes that one decision, and
    `LLM.health()` counts it.

    Attributes:
        state_format: names the layout of `export_state`; policies with the same words hand over
            their books when one takes the other's place on a running engine. Empty: none do.
    """

    context: PolicyContext
    state_format: ClassVar[str] = ""

    @property
    def overridden(self) -> frozenset[str]:
        """Names of the optional methods that the policy overrides; schedulers may skip the others.

        `export_state` and `import_state` are not among them.
        """
        return frozenset(
            name
            for name in _OPTIONAL_METHODS
            if getattr(getattr(self, name), "__func__", None) is not getattr(SchedulingPolicy, name)
        )

    @abstractmethod
    def key(self, request: Request) -> Any:
        """Return what orders waiting requests within their group, smallest first.

        Read when a request enters the queue: once when it comes, and at each preemption. Keys of
        one policy compare with each other; equal keys keep their order of arrival. A preempted
        request re-enters ahead of waiting ones with an equal key.
        """

    def group(self, request: Request) -> Hashable:  # noqa: ARG002
        """Return the queue in which a request waits. By default there is one, None.

        Read whenever `key` is.
        """
        return None

    def group_key(self, group: Hashable, now: float) -> Any:  # noqa: ARG002
        """Return what orders the groups, smallest first; their best requests compete.

        Read for every group in which somebody waits: at the first admission of a step, and again
        for a group from which one was admitted, after `scheduled`. Never with a single group.

        Args:
            group: what `group` returned.
            now: seconds on the engine's clock.
        """
        return 0

    def admit(self, request: Request, load: Load) -> str | None:  # noqa: ARG002
        """Return None to let a waiting request run, or in words why it is held back this step.

        Those behind it may go first. A policy never keeps the engine idle: when nothing runs, the
        first request that it holds back is admitted all the same.
        """
        return None

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the request to preempt when blocks run out. By default the latest admitted.

        Args:
            running: in order of admission, never empty.
            load: how full the engine is.
        """
        return running[-1]

    def added(self, request: Request) -> None:
        """Note that a new request came; `key` and `group` follow.

        A policy that takes another one's place on a running engine is told of every live request,
        in order of arrival; those that run have status RUNNING, and no `key` follows.
        """

    def scheduled(self, request: Request, tokens: int) -> None:
        """Note that a step computes so many tokens of a request, drafts included.

        `request.num_computed_tokens` does not count them yet.
        """

    def preempted(self, request: Request) -> None:
        """Note that a request lost its blocks; what it had computed is computed anew."""

    def finished(self, request: Request) -> None:
        """Note that a request ended, for whatever reason, whether it ran or not."""

    def export_state(self) -> Any:
        """Return the books as plain data, for a policy that takes this one's place."""
        return None

    def import_state(self, state: Any) -> None:
        """Take over the books of a policy with the same `state_format`.

        Called before any request is handed over.
        """
