"""Asks the eviction policy, and decides in its place where it fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from operator import index

from hardpoint.core.faults import FaultReporter
from hardpoint.plugins import EvictionPolicy
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.kv_cache import CachedBlock


def raise_fault(words: str, cause: BaseException | None = None) -> None:
    """Report a fault where nobody else listens.

    Raises:
        PluginFaultError: always.
    """
    raise PluginFaultError(words) from cause


class Eviction:
    """An eviction policy that may be wrong: what it says is checked, what it raises is reported.

    The pool's own candidates are the truth. After a fault the policy's books may differ from
    them; then its further answers are found wrong in turn, and the rest is decided here.
    """

    def __init__(self, policy: EvictionPolicy | None, fault: FaultReporter = raise_fault) -> None:
        """Without a policy the candidate that was released first goes."""
        self._policy = policy
        self._fault = fault

    def released(self, block_ids: Sequence[int], depths: Sequence[int]) -> None:
        """Tell of new candidates; `depths` is by block id."""
        if self._policy is None or not block_ids:
            return
        blocks = [CachedBlock(block, depths[block]) for block in block_ids]
        try:
            self._policy.released(blocks)
        except Exception as cause:
            self._fault(f"released() of {_count(len(blocks))} failed", cause)

    def taken(self, block_ids: Sequence[int]) -> None:
        """Tell that these are candidates no more."""
        if self._policy is None or not block_ids:
            return
        try:
            self._policy.taken(block_ids)
        except Exception as cause:
            self._fault(f"taken() of {_count(len(block_ids))} failed", cause)

    def choose(self, count: int, candidates: Collection[int]) -> list[int]:
        """Return `count` different candidates.

        Args:
            count: at least 1, at most the number of candidates.
            candidates: in the order in which they were released.
        """
        if self._policy is None:
            return list(islice(candidates, count))
        words, cause = "", None
        answer: list[int] = []
        try:
            # One more than asked for shows that there are too many, even if there is no end.
            answer = [index(block) for block in islice(self._policy.evict(count), count + 1)]
        except Exception as error:
            words, cause = f"evict({count}) failed", error
        chosen = [block for block in dict.fromkeys(answer) if block in candidates][:count]
        if len(chosen) == len(answer) == count:
            return chosen
        taken = set(chosen)
        own = list(islice((b for b in candidates if b not in taken), count - len(chosen)))
        self._fault(words or _wrong(count, answer, candidates), cause)
        self.taken(own)
        return chosen + own


def _wrong(count: int, answer: list[int], candidates: Collection[int]) -> str:
    strange = next((block for block in answer if block not in candidates), None)
    if strange is not None:
        return f"evict({count}) returned {strange}, which is no candidate"
    if len(set(answer)) < len(answer):
        twice = next(block for block in answer if answer.count(block) > 1)
        return f"evict({count}) returned {twice} twice"
    if len(answer) > count:
        return f"evict({count}) returned more than {_count(count)}"
    return f"evict({count}) returned {_count(len(answer))}"


def _count(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"
