"""Calls the eviction policy, and evicts in order of release where the policy fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from operator import index

from hardpoint.errors import PluginFaultError
from hardpoint.plugins import EvictionPolicy
from hardpoint.registry.blame import raise_unless_fault

from .faults import FaultReporter


def raise_fault(message: str, cause: BaseException | None = None) -> None:
    """Raise a fault; the default where no reporter is given.

    Raises:
        PluginFaultError: always.
    """
    raise PluginFaultError(message) from cause


class Eviction:
    """Checks what an eviction policy returns, and reports what it raises.

    The pool's candidates are authoritative. After a fault the policy's own state may differ from
    them; its next answers are then reported as wrong in turn, and the missing blocks chosen here.
    """

    def __init__(self, policy: EvictionPolicy | None, fault: FaultReporter = raise_fault) -> None:
        """Without a policy, the candidates released first are evicted first.

        Args:
            policy: chooses the cached blocks to evict.
            fault: called with each of its faults.
        """
        self._policy = policy
        self._fault = fault

    def released(self, block_ids: Sequence[int]) -> None:
        """Notify the policy of new candidates."""
        self._notify("released", block_ids)

    def taken(self, block_ids: Sequence[int]) -> None:
        """Notify the policy of candidates that a request found and uses."""
        self._notify("taken", block_ids)

    def dropped(self, block_ids: Sequence[int]) -> None:
        """Notify the policy of candidates whose content is gone."""
        self._notify("dropped", block_ids)

    def _notify(self, method: str, block_ids: Sequence[int]) -> None:
        if self._policy is None or not block_ids:
            return
        try:
            getattr(self._policy, method)(tuple(block_ids))  # the pool's own list must not change
        except BaseException as cause:
            raise_unless_fault(cause)
            self._fault(f"{method}() of {_count(len(block_ids))} failed", cause)

    def choose(self, count: int, candidates: Collection[int]) -> list[int]:
        """Return `count` different candidates to evict.

        Args:
            count: at least 1, at most the number of candidates.
            candidates: in the order in which they were released.
        """
        if self._policy is None:
            return list(islice(candidates, count))
        message, cause = "", None  # type: str, BaseException | None
        answer: list[int] = []
        try:
            # One more than needed shows that there are too many, even in an endless iterator.
            answer = [index(block) for block in islice(self._policy.evict(count), count + 1)]
        except BaseException as error:
            raise_unless_fault(error)
            message, cause = f"evict({count}) failed", error
        chosen = [block for block in dict.fromkeys(answer) if block in candidates][:count]
        if len(chosen) == len(answer) == count:
            return chosen
        taken = set(chosen)
        others = list(islice((b for b in candidates if b not in taken), count - len(chosen)))
        self._fault(message or _describe_wrong(count, answer, candidates), cause)
        self.dropped(others)
        return chosen + others


def _describe_wrong(count: int, answer: list[int], candidates: Collection[int]) -> str:
    unknown = next((block for block in answer if block not in candidates), None)
    if unknown is not None:
        return f"evict({count}) returned {unknown}, which is no candidate"
    if len(set(answer)) < len(answer):
        duplicate = next(block for block in answer if answer.count(block) > 1)
        return f"evict({count}) returned {duplicate} twice"
    if len(answer) > count:
        return f"evict({count}) returned more than {_count(count)}"
    return f"evict({count}) returned {_count(len(answer))}"


def _count(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"
