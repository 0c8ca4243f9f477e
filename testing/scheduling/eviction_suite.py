"""The conformance suite for eviction policies; the built-in one passes it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import CachedBlock, EvictionContext, EvictionPolicy
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.engine_access import load_default_scheduler
from hardpoint.testing.snapshots import count_elements
from hardpoint.testing.suite import Violation, best_cpu_time, reject_replaced_tests, short_repr

from .features import UnsupportedFeatures
from .rules import EVICTION
from .scenarios import Scenario, play, scenarios

_BLOCKS = 24
_ALL_SUPPORTED = UnsupportedFeatures({}, frozenset())
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["released", "released", "taken", "evict"]),
        st.integers(1, 6),
        st.integers(0, _BLOCKS - 1),
    ),
    min_size=1,
    max_size=20,
)


class EvictionPolicySuite(ComponentSuite):
    """Base class of a test class, which sets `eviction`, and `options` if it has some.

    Attributes:
        eviction: the class under test.
        budget_us_per_block: maximum microseconds per block, from its release until it is evicted
            or taken, among `budget_blocks` candidates; None does not measure.
    """

    kind = "eviction_policies"
    eviction: ClassVar[type[EvictionPolicy]]
    budget_us_per_block: ClassVar[float | None] = 50.0
    budget_blocks: ClassVar[int] = 20_000

    def _component(self) -> type[Component]:
        return self.eviction

    def test_contract(self) -> None:
        """The class states its contract and can be built; its options survive pickling."""
        self._run_checks(
            "contract: the loader can check and build the class",
            lambda: reject_replaced_tests(type(self), EvictionPolicySuite),
            self._check_contract,
            lambda: self._make().close(),
        )

    def test_candidates(self) -> None:
        """Evict returns the requested number of distinct candidates."""
        self._search(
            EVICTION.text,
            200,
            lambda calls: _PolicyDriver(self._make()).play(calls),
            calls=_CALLS,
        )

    def test_evict_all(self) -> None:
        """Every candidate can be evicted, one by one and all at once."""

        def check(calls: Sequence[tuple[str, int, int]], at_once: bool) -> None:
            driver = _PolicyDriver(self._make())
            driver.play(calls)
            while driver.candidates:
                driver.evict(len(driver.candidates) if at_once else 1)

        self._search(
            "evict all: no candidate is kept for ever",
            100,
            check,
            calls=_CALLS,
            at_once=st.booleans(),
        )

    def test_in_cache(self) -> None:
        """In the KV cache under a scheduler, no decision is a fault."""
        scheduler = load_default_scheduler()

        def check(scenario: Scenario) -> None:
            play(scheduler, scenario, eviction=self._make)

        self._search(
            EVICTION.text,
            150,
            check,
            scenario=scenarios(
                _ALL_SUPPORTED, sometimes=("windows", "salts"), events=("abort", "reset")
            ),
        )

    def test_memory(self) -> None:
        """Blocks that are no longer candidates leave nothing behind."""
        self._run_checks(
            "memory: nothing grows with the number of evicted blocks", self._check_memory
        )

    def test_speed(self) -> None:
        """The cost of a block stays within the budget among many candidates."""
        if self.budget_us_per_block is None:
            pytest.skip("budget_us_per_block is None")
        self._run_checks("speed: a block costs no more than its budget", self._check_speed)

    def _make(self) -> EvictionPolicy:
        policy: EvictionPolicy = self._build(EvictionContext)
        return policy

    def _check_memory(self) -> None:
        policy, sizes, waves = self._make(), [], 100
        for wave in range(2 * waves):
            policy.released([CachedBlock(block, wave % 7) for block in range(8)])
            policy.taken([0, 1, 2, 3])
            policy.evict(4)
            if wave in (waves - 1, 2 * waves - 1):
                attributes = {
                    name: value for name, value in vars(policy).items() if name != "context"
                }
                sizes.append(count_elements(attributes))
        if sizes[1] - sizes[0] >= waves:
            raise Violation(
                f"the policy's attributes grew from {sizes[0]} to {sizes[1]} elements while "
                f"{8 * waves} blocks were released and evicted",
                "drop a block in taken() and in evict()",
            )

    def _check_speed(self) -> None:
        count, policy = self.budget_blocks, self._make()
        blocks = [CachedBlock(block, block % 50) for block in range(count)]
        policy.released(blocks)

        def work() -> None:
            """Take and evict some of many candidates, then release them again."""
            for first in range(0, 400, 8):
                policy.taken(range(first, first + 4))
                evicted = policy.evict(4)
                released = {*range(first, first + 4), *evicted}
                policy.released([blocks[block] for block in sorted(released)])

        cost = best_cpu_time(4, work) * 1e6 / 400
        budget = self.budget_us_per_block or 0.0
        if cost > budget:
            raise Violation(
                f"a block cost {cost:.0f} microseconds among {count}, the budget is {budget:.0f}",
                "do not iterate over all candidates in each call; or set budget_us_per_block",
            )


class _PolicyDriver:
    """Calls an eviction policy, and tracks the candidates that it must have."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.candidates: dict[int, None] = {}

    def play(self, calls: Sequence[tuple[str, int, int]]) -> None:
        for name, count, first in calls:
            blocks = [(first + offset) % _BLOCKS for offset in range(count)]
            if name == "released":
                self.release([block for block in blocks if block not in self.candidates])
            elif name == "taken":
                self.mark_taken([block for block in blocks if block in self.candidates])
            elif self.candidates:
                self.evict(min(count, len(self.candidates)))

    def release(self, blocks: list[int]) -> None:
        if blocks:
            given = [CachedBlock(block, depth) for depth, block in enumerate(blocks)]
            self._call("released", given)
            self.candidates |= dict.fromkeys(blocks)

    def mark_taken(self, blocks: list[int]) -> None:
        if blocks:
            self._call("taken", blocks)
            for block in blocks:
                del self.candidates[block]

    def evict(self, count: int) -> None:
        result = self._call("evict", count)
        what = f"evict({count}) returned {short_repr(result)}"
        try:
            blocks = [int(block) for block in result]
        except TypeError as cause:
            raise EVICTION.violation(f"{what}: {cause}") from cause
        for block in blocks:
            if block not in self.candidates:
                raise EVICTION.violation(f"{what}, of which {block} is no candidate")
        if len(set(blocks)) < len(blocks):
            raise EVICTION.violation(f"{what}, with a block twice")
        if len(blocks) != count:
            raise EVICTION.violation(f"{what}: {len(blocks)} blocks")
        for block in blocks:
            del self.candidates[block]

    def _call(self, method: str, given: Any) -> Any:
        try:
            return getattr(self.policy, method)(given)
        except Exception as cause:
            raise EVICTION.violation(
                f"{method}({short_repr(given)}) raised {type(cause).__name__}: {cause}"
            ) from cause
