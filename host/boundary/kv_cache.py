"""Guards of KV cache plugins: the eviction policy, and the publishers of events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

from hardpoint.errors import PluginFaultError
from hardpoint.host.registry.blame import close_if_failed
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EvictionPolicy, KVEventBatch, KVEventPublisher, PublisherContext
from hardpoint.plugins.kv_cache import KVEvent
from hardpoint.typed import read_only

from .activity import PluginCalls
from .errors import close_all
from .faults import CALL_LOST, StepFaults
from .guard import FaultReporter, blocks, guard


def raise_fault(message: str, cause: BaseException | None = None) -> None:
    """Raise a fault; the default where no reporter is given.

    Raises:
        PluginFaultError: always.
    """
    raise PluginFaultError(message) from cause


class Eviction:
    """Completes the result of an eviction policy, if it is not what the pool needs.

    The pool's candidates are authoritative. After a fault the policy's own state may differ from
    them; its next answers are then reported as wrong in turn, and the missing blocks chosen here.
    """

    def __init__(
        self,
        policy: EvictionPolicy | None,
        report: FaultReporter = raise_fault,
        calls: PluginCalls | None = None,
    ) -> None:
        self._policy = policy and guard(policy, "eviction_policies", report, calls)
        self._report = report

    def released(self, block_ids: Sequence[int]) -> None:
        """Notify the policy of new candidates."""
        if self._policy is not None and block_ids:
            self._policy.released(tuple(block_ids))  # the pool's own list must not change

    def taken(self, block_ids: Sequence[int]) -> None:
        """Notify the policy of candidates that a request found and uses."""
        if self._policy is not None and block_ids:
            self._policy.taken(tuple(block_ids))

    def dropped(self, block_ids: Sequence[int]) -> None:
        """Notify the policy of candidates that have lost their content."""
        if self._policy is not None and block_ids:
            self._policy.dropped(tuple(block_ids))

    def choose(self, count: int, candidates: Collection[int]) -> list[int]:
        """Return `count` different candidates to evict.

        Args:
            count: at least 1, at most the number of candidates.
            candidates: in the order in which they were released.
        """
        if self._policy is None:
            return list(islice(candidates, count))
        answer: Sequence[int] | None = self._policy.evict(count)  # None after a fault
        chosen = [block for block in dict.fromkeys(answer or ()) if block in candidates][:count]
        if answer is not None and len(chosen) == len(answer) == count:
            return chosen
        taken = set(chosen)
        others = list(islice((b for b in candidates if b not in taken), count - len(chosen)))
        if answer is not None:
            self._report(_describe_wrong(count, answer, candidates), None)
        self.dropped(others)
        return chosen + others


def _describe_wrong(count: int, answer: Sequence[int], candidates: Collection[int]) -> str:
    unknown = next((block for block in answer if block not in candidates), None)
    if unknown is not None:
        return f"evict({count}) returned {unknown}, which is no candidate"
    if len(set(answer)) < len(answer):
        duplicate = next(block for block in answer if answer.count(block) > 1)
        return f"evict({count}) returned {duplicate} twice"
    if len(answer) > count:
        return f"evict({count}) returned more than {blocks(count)}"
    return f"evict({count}) returned {blocks(len(answer))}"


class KVEventFanout:
    """Passes the events of each step to all publishers, guarded, also if one of them fails.

    Args:
        publishers: each with the reporter of its faults and its calls, in the order of calls.
        wall_clock: seconds since 1970.
        follow: is called with the events after the publishers.
    """

    def __init__(
        self,
        publishers: Sequence[tuple[KVEventPublisher, FaultReporter, PluginCalls]],
        wall_clock: Callable[[], float],
        data_parallel_rank: int = 0,
        follow: Callable[[Sequence[KVEvent]], None] | None = None,
    ) -> None:
        self._publishers = [
            guard(publisher, calls.kind, report, calls) for publisher, report, calls in publishers
        ]
        self.follow, self._wall_clock, self._rank = follow, wall_clock, data_parallel_rank

    @property
    def has_any(self) -> bool:
        """Whether anything gets the events."""
        return bool(self._publishers) or self.follow is not None

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish the events of a step, if there are any.

        Raises:
            PluginFaultError: a publisher with faults of scope engine failed; all were called.
        """
        if events and self._publishers:
            batch = read_only(KVEventBatch(self._wall_clock(), list(events), self._rank))
            self._call("publish", batch)
        if events and self.follow is not None:
            self.follow(events)

    def close(self) -> None:
        """Close all publishers.

        Raises:
            PluginFaultError: a publisher with faults of scope engine failed; all were closed.
        """
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        fatal: PluginFaultError | None = None
        for publisher in self._publishers:
            try:
                getattr(publisher, method)(*arguments)
            except PluginFaultError as error:
                fatal = fatal or error
        if fatal is not None:
            raise fatal


def open_publishers(
    plugins: PluginSet, faults: StepFaults, data_parallel_rank: int
) -> list[tuple[KVEventPublisher, FaultReporter, PluginCalls]]:
    """Build the enabled publishers; each with the reporter of its faults and its calls.

    Raises:
        PluginError: one cannot be built; the others are closed.
    """
    publishers: list[tuple[KVEventPublisher, FaultReporter, PluginCalls]] = []
    with ExitStack() as undo:
        for entry in plugins.entries(kind := "kv_event_publishers"):
            publisher = plugins.create(
                entry, PublisherContext, data_parallel_rank=data_parallel_rank
            )
            close_if_failed(undo, partial(close_all, [publisher]))
            report = faults.reporter(entry.source, CALL_LOST)
            publishers.append((publisher, report, faults.calls(kind, entry.source)))
        undo.pop_all()
    return publishers
