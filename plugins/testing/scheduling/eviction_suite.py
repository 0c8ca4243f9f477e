"""The conformance suite for eviction policies; the built-in one passes it too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import EvictionContext, EvictionPolicy
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import GeneralComponentSuite
from hardpoint.testing.declared import declared_result
from hardpoint.testing.engine_access import load_default_scheduler
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.pace import cpu_cost
from hardpoint.testing.scheduling.fakes.blocks import FakeBlocks
from hardpoint.testing.snapshots import without_growth
from hardpoint.testing.suite import (
    Violation,
    checks,
    short_repr,
)

from .features import UnsupportedFeatures
from .rules import BLOCK_IDS, EVICTION
from .scenarios import Scenario, play, scenarios

_BLOCKS = 24
_CONTENTS = 40
_ALL_SUPPORTED = UnsupportedFeatures({}, frozenset())
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["released", "released", "taken", "evict", "dropped"]),
        st.integers(1, 6),
        st.integers(0, _CONTENTS - 1),
    ),
    min_size=1,
    max_size=20,
)


class EvictionPolicySuite(GeneralComponentSuite):
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

    def test_candidates(self) -> None:
        """`evict` returns the requested number of distinct candidates, and drops them; taken and
        dropped blocks are not candidates.
        """
        self._search(
            EVICTION.text,
            200,
            lambda calls: self._driver().play(calls),
            calls=_CALLS,
        )

    def test_block_ids(self) -> None:
        """The same calls for the same contents evict the same contents, whichever blocks they are
        in. So content that may be gone is identified by hash, and equal candidates go in the order
        of release.
        """

        def check(calls: Sequence[tuple[str, int, int]]) -> None:
            first, other = self._driver(), self._driver(first_in=False)
            for call in calls:
                first.play([call])
                other.play([call])
                if first.evicted != other.evicted:
                    raise BLOCK_IDS.violation(
                        f"after the same calls for the same contents, evict({call[1]}) chose the "
                        f"contents {sorted(first.evicted)}, but with other block ids "
                        f"{sorted(other.evicted)}"
                    )

        self._search(BLOCK_IDS.text, 200, check, calls=_CALLS)

    def test_evict_all(self) -> None:
        """Every candidate can be evicted, one by one and all at once."""

        def check(calls: Sequence[tuple[str, int, int]], at_once: bool) -> None:
            driver = self._driver()
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
        """In the KV cache of the engine, under any load, no decision is a fault."""
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

    @checks("memory: nothing grows with the number of blocks that are no longer candidates")
    def test_memory(self) -> None:
        """A policy remembers a bounded number of blocks that are no longer candidates."""
        driver = self._driver(num_blocks=8)
        description = "the policy: while 800 blocks were released, and taken, dropped or evicted"
        fix = (
            "drop a block in taken(), dropped() and evict(); remember at most a few times "
            "context.blocks.num_blocks hashes of evicted ones"
        )
        for wave in without_growth(driver.policy, 100, description, fix):
            contents = list(range(8 * wave, 8 * wave + 8))
            driver.release(contents)
            driver.mark_taken(contents[:2])
            driver.release(contents[:2])
            driver.evict(4)
            driver.drop(list(driver.candidates))

    def test_speed(self) -> None:
        """The cost of a block stays within the budget among many candidates."""
        if self.budget_us_per_block is None:
            pytest.skip("budget_us_per_block is None")
        self._run_checks("speed: a block costs no more than its budget", self._check_speed)

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        driver = self._driver(num_blocks=8)

        def use(number: int) -> None:
            contents = list(range(8 * number, 8 * number + 8))
            driver.release(contents)
            driver.mark_taken(contents[:2])
            driver.evict(4)
            driver.drop(list(driver.candidates))
            driver.release(contents[:2])
            driver.drop(list(driver.candidates))

        yield InUse(driver.policy, use)

    def _make(self, **fields: Any) -> EvictionPolicy:
        fields = fields or FakeBlocks(_BLOCKS).context_fields()
        policy: EvictionPolicy = self._build(EvictionContext, **fields)
        return policy

    def _driver(self, num_blocks: int = _BLOCKS, *, first_in: bool = True) -> _PolicyDriver:
        blocks = FakeBlocks(num_blocks)
        policy = self._make(**blocks.context_fields())
        return _PolicyDriver(policy, blocks, first_in=first_in)

    def _check_speed(self) -> None:
        count = self.budget_blocks
        blocks = FakeBlocks(count)
        policy = self._make(**blocks.context_fields())
        for block in range(count):
            blocks.cache(block, block)
        policy.released(range(count))

        def work() -> None:
            for first in range(0, 400, 8):
                policy.taken(range(first, first + 4))
                evicted = policy.evict(4)
                policy.released(sorted({*range(first, first + 4), *evicted}))

        budget = self.budget_us_per_block or 0.0
        cost = cpu_cost(work, budget * 400 / 1e6) * 1e6 / 400
        if cost > budget:
            raise Violation(
                f"a block cost {cost:.0f} microseconds among {count}, the budget is {budget:.0f}",
                "do not iterate over all candidates in each call; or set budget_us_per_block",
            )


class _PolicyDriver:
    """Calls an eviction policy, and tracks the candidates that it must have.

    Attributes:
        candidates: their contents; numbers, as in FakeBlocks.
        evicted: the contents that the last `evict` chose.
    """

    def __init__(self, policy: EvictionPolicy, blocks: FakeBlocks, *, first_in: bool) -> None:
        """`first_in` uses the block that was freed first, otherwise the one freed last."""
        self.policy = policy
        self.candidates: dict[int, None] = {}
        self.evicted: set[int] = set()
        self._blocks = blocks
        self._block_of: dict[int, int] = {}
        self._free = list(range(blocks.num_blocks))
        self._first_in = first_in

    def play(self, calls: Sequence[tuple[str, int, int]]) -> None:
        for name, count, first in calls:
            contents = [(first + offset) % _CONTENTS for offset in range(count)]
            known = [content for content in contents if content in self.candidates]
            if name == "released":
                self.release([content for content in contents if content not in known])
            elif name == "taken":
                self.mark_taken(known)
            elif name == "dropped":
                self.drop(known)
            elif self.candidates:
                self.evict(min(count, len(self.candidates)))

    def release(self, contents: list[int]) -> None:
        """Release contents; cache uncached ones while there is space."""
        released = []
        for content in contents:
            if content in self._block_of:
                self._blocks.use(self._block_of[content])
            elif self._free:
                block = self._block_of[content] = self._free.pop(0 if self._first_in else -1)
                self._blocks.cache(block, content)
            else:
                continue
            released.append(content)
        self._notify("released", released)
        self.candidates |= dict.fromkeys(released)

    def mark_taken(self, contents: list[int]) -> None:
        for content in contents:
            self._blocks.hit(self._block_of[content])
            del self.candidates[content]
        self._notify("taken", contents)

    def drop(self, contents: list[int]) -> None:
        self._notify("dropped", contents)
        for content in contents:
            self._blocks.uncache(self._block_of[content])
        self._forget(contents)

    def evict(self, count: int) -> None:
        result = self._call("evict", count)
        call = f"evict({count}) returned {short_repr(result)}"
        blocks = declared_result(EVICTION, EvictionPolicy, "evict", result, (count,))
        candidates = {self._block_of[content]: content for content in self.candidates}
        for block in blocks:
            if block not in candidates:
                raise EVICTION.violation(f"{call}, {block} is no candidate")
        if len(set(blocks)) < len(blocks):
            raise EVICTION.violation(f"{call}, with a block twice")
        if len(blocks) != count:
            raise EVICTION.violation(f"{call}: {len(blocks)} blocks")
        self.evicted = {candidates[block] for block in blocks}
        for block in blocks:
            self._blocks.uncache(block)
        self._forget([candidates[block] for block in blocks])

    def _forget(self, contents: list[int]) -> None:
        for content in contents:
            del self.candidates[content]
            self._free.append(self._block_of.pop(content))

    def _notify(self, method: str, contents: list[int]) -> None:
        if contents:
            self._call(method, tuple(self._block_of[content] for content in contents))

    def _call(self, method: str, argument: Any) -> Any:
        try:
            return getattr(self.policy, method)(argument)
        except Exception as cause:
            raise EVICTION.violation(
                f"{method}({short_repr(argument)}) raised {type(cause).__name__}: {cause}"
            ) from cause
