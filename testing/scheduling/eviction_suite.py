"""The conformance suite for eviction policies: what the built-in one passes, in your tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import CachedBlock, EvictionContext, EvictionPolicy
from hardpoint.plugins.component import Component
from hardpoint.testing.scheduling.checks.names import EVICTION
from hardpoint.testing.snapshots import weigh
from hardpoint.testing.suite import Violation, refuse_replaced_tests, short

from .features import Refusals
from .scenarios import Scenario, play, scenarios
from .settings import builtin_scheduler
from .suite_base import SchedulingSuiteBase, best_of

_BLOCKS = 24
_ANYTHING = Refusals({}, frozenset())
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["released", "released", "taken", "evict"]),
        st.integers(1, 6),
        st.integers(0, _BLOCKS - 1),
    ),
    min_size=1,
    max_size=20,
)


class EvictionPolicySuite(SchedulingSuiteBase):
    """Derive a test class from it, and set `eviction`, and `options` if it needs some.

    Attributes:
        eviction: the class under test.
        budget_us_per_block: microseconds that a block may cost, from its release until it is
            evicted or taken, among `budget_blocks` of them; None does not measure.
    """

    kind = "eviction_policies"
    eviction: ClassVar[type[EvictionPolicy]]
    budget_us_per_block: ClassVar[float | None] = 50.0
    budget_blocks: ClassVar[int] = 20_000

    def _component(self) -> type[Component]:
        return self.eviction

    def test_contract(self) -> None:
        """It states its contract, and can be built; its options travel."""
        self._once(
            "the contract: a loader must be able to check and build it",
            lambda: refuse_replaced_tests(type(self), EvictionPolicySuite),
            self._check_contract,
            lambda: self._make().close(),
        )

    def test_candidates(self) -> None:
        """It evicts candidates, so many different ones as it is asked for."""
        self._search(
            EVICTION.words,
            200,
            lambda calls: _Bench(self._make()).play(calls),
            calls=_CALLS,
        )

    def test_everything(self) -> None:
        """Every candidate can be evicted, one by one and all at once."""

        def check(calls: Sequence[tuple[str, int, int]], at_once: bool) -> None:
            bench = _Bench(self._make())
            bench.play(calls)
            while bench.candidates:
                bench.evict(len(bench.candidates) if at_once else 1)

        self._search(
            "everything: no candidate is kept for ever",
            100,
            check,
            calls=_CALLS,
            at_once=st.booleans(),
        )

    def test_in_cache(self) -> None:
        """It works in the KV cache under a scheduler, and no decision is a fault."""
        scheduler = builtin_scheduler()

        def check(scenario: Scenario) -> None:
            play(scheduler, scenario, eviction=self._make)

        self._search(
            EVICTION.words,
            150,
            check,
            scenario=scenarios(
                _ANYTHING, sometimes=("windows", "salts"), events=("abort", "reset")
            ),
        )

    def test_memory(self) -> None:
        """Blocks that are candidates no more leave nothing behind."""
        self._once("memory: nothing grows with the number of blocks that came and went", self._grow)

    def test_speed(self) -> None:
        """A block costs no more than the budget, however many there are."""
        if self.budget_us_per_block is None:
            pytest.skip("budget_us_per_block is None")
        self._once("speed: a block costs no more than its budget", self._measure)

    def _make(self) -> EvictionPolicy:
        policy: EvictionPolicy = self._build(EvictionContext)
        return policy

    def _grow(self) -> None:
        policy, weights, waves = self._make(), [], 100
        for wave in range(2 * waves):
            policy.released([CachedBlock(block, wave % 7) for block in range(8)])
            policy.taken([0, 1, 2, 3])
            policy.evict(4)
            if wave in (waves - 1, 2 * waves - 1):
                own = {name: value for name, value in vars(policy).items() if name != "context"}
                weights.append(weigh(own))
        if weights[1] - weights[0] >= waves:
            raise Violation(
                f"what hangs on the policy grew from {weights[0]} to {weights[1]} elements while "
                f"{8 * waves} blocks came and went",
                "drop a block in taken() and in evict()",
            )

    def _measure(self) -> None:
        count, policy = self.budget_blocks, self._make()
        blocks = [CachedBlock(block, block % 50) for block in range(count)]
        policy.released(blocks)

        def work() -> None:
            """Take and evict some among many, and bring them back."""
            for first in range(0, 400, 8):
                policy.taken(range(first, first + 4))
                gone = policy.evict(4)
                back = {*range(first, first + 4), *gone}
                policy.released([blocks[block] for block in sorted(back)])

        cost = best_of(4, work) * 1e6 / 400
        budget = self.budget_us_per_block or 0.0
        if cost > budget:
            raise Violation(
                f"a block cost {cost:.0f} microseconds among {count}, the budget is {budget:.0f}",
                "do not look at all candidates in each call; or set budget_us_per_block",
            )


class _Bench:
    """An eviction policy, and the candidates as they truly are."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.candidates: dict[int, None] = {}

    def play(self, calls: Sequence[tuple[str, int, int]]) -> None:
        for name, count, first in calls:
            ring = [(first + place) % _BLOCKS for place in range(count)]
            if name == "released":
                self.release([block for block in ring if block not in self.candidates])
            elif name == "taken":
                self.take([block for block in ring if block in self.candidates])
            elif self.candidates:
                self.evict(min(count, len(self.candidates)))

    def release(self, blocks: list[int]) -> None:
        if blocks:
            given = [CachedBlock(block, place) for place, block in enumerate(blocks)]
            self._call("released", given)
            self.candidates |= dict.fromkeys(blocks)

    def take(self, blocks: list[int]) -> None:
        if blocks:
            self._call("taken", blocks)
            for block in blocks:
                del self.candidates[block]

    def evict(self, count: int) -> None:
        answer = self._call("evict", count)
        what = f"evict({count}) returned {short(answer)}"
        try:
            blocks = [int(block) for block in answer]
        except TypeError as cause:
            raise EVICTION.broken(f"{what}: {cause}") from cause
        for block in blocks:
            if block not in self.candidates:
                raise EVICTION.broken(f"{what}, of which {block} is no candidate")
        if len(set(blocks)) < len(blocks):
            raise EVICTION.broken(f"{what}, with a block twice")
        if len(blocks) != count:
            raise EVICTION.broken(f"{what}: {len(blocks)} blocks")
        for block in blocks:
            del self.candidates[block]

    def _call(self, method: str, given: Any) -> Any:
        try:
            return getattr(self.policy, method)(given)
        except Exception as cause:
            raise EVICTION.broken(
                f"{method}({short(given)}) raised {type(cause).__name__}: {cause}"
            ) from cause
