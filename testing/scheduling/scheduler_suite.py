"""The conformance suite for schedulers: what the built-in one passes, in your tests."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import OverloadedError, RequestError, Scheduler
from hardpoint.plugins.component import Component
from hardpoint.testing.scheduling.checks.names import REFUSAL
from hardpoint.testing.suite import refuse_replaced_tests

from .features import FEATURES, Refusals, find_refusals
from .scenarios import EVENTS, Scenario, pauses, play, scenarios, victims
from .simulator import SchedulerRig
from .suite_base import SchedulingSuiteBase

_RULE = "the contract: a loader must be able to check and build it"


class SchedulerSuite(SchedulingSuiteBase):
    """Derive a test class from it, and set `scheduler`, and `options` if it needs some.

    Each test is a situation, in which every rule must hold: the message says which one did not.
    What the scheduler refuses (ConfigError when it is built, RequestError in `add_request`) it is
    not asked for; a test that is about such a thing is skipped, with the scheduler's words.

    Attributes:
        scheduler: the class under test.
        asks_policy: False for one that asks no scheduling policy and tells it nothing.
    """

    kind = "schedulers"
    scheduler: ClassVar[type[Scheduler]]
    asks_policy: ClassVar[bool] = True

    def _component(self) -> type[Component]:
        return self.scheduler

    def test_contract(self) -> None:
        """It states its contract, and can be built; its options travel."""
        self._once(
            _RULE,
            lambda: refuse_replaced_tests(type(self), SchedulerSuite),
            self._check_contract,
            lambda: self._rig().check(),
        )

    def test_limits(self) -> None:
        """No step exceeds a limit, and every request gets its tokens within the bound."""
        self._situation(100, sometimes=("threshold", "whole", "uncached"), roomy=True)

    def test_blocks(self) -> None:
        """With a cache that has hardly room for one, requests take blocks from each other."""
        rest = ("uncached", "watermark", "windows", "lookahead", "salts", "threshold", "whole")
        self._situation(300, sometimes=rest, events=("abort",))

    def test_victims(self) -> None:
        """A request gives way that has tokens of the very step already."""
        self._situation(400, victims(), always=("threshold",))

    def test_outputs(self) -> None:
        """Outputs carry what was asked for, and go to who asked; requests end where they should."""
        sometimes = ("stops", "repetition", "logprobs", "prompt_logprobs", "clients")
        self._situation(100, sometimes=sometimes)

    def test_ends(self) -> None:
        """Requests are aborted, fail and time out at any moment; their ids come again."""
        events = ("abort", "abort_between", "advance")
        self._situation(250, sometimes=("timeouts", "faults", "clients"), events=events)

    def test_drafts(self) -> None:
        """Drafts are accepted and rejected."""
        sometimes = ("lookahead", "windows", "whole", "logprobs", "stops", "threshold", "loras")
        self._situation(150, always=("drafts",), sometimes=sometimes, events=("abort",))

    def test_asynchronous(self) -> None:
        """Results come one step late."""
        sometimes = ("faults", "prompt_logprobs", "logprobs", "stops", "windows", "timeouts")
        events = ("abort", "abort_between", "advance")
        self._situation(200, always=("asynchronous",), sometimes=sometimes, events=events)

    def test_transfers(self) -> None:
        """KV blocks come from elsewhere: at once, later, in part, or not at all."""
        sometimes = ("asynchronous", "salts", "drafts", "prompt_logprobs", "whole", "uncached")
        events = ("abort", "abort_between")
        self._situation(250, always=("transfers",), sometimes=sometimes, events=events)

    def test_grammars(self) -> None:
        """Grammars are ready late, or never."""
        sometimes = ("timeouts", "asynchronous", "drafts")
        self._situation(80, always=("grammars",), sometimes=sometimes, events=("abort", "advance"))

    def test_encoder(self) -> None:
        """Features are encoded within budget and cache."""
        sometimes = ("asynchronous", "threshold", "drafts", "lookahead")
        self._situation(150, always=("encoder",), sometimes=sometimes, events=("abort",))

    def test_adapters(self) -> None:
        """No more adapters are in a step than may."""
        sometimes = ("asynchronous", "salts", "stops")
        self._situation(200, always=("loras",), sometimes=sometimes, events=("abort",))

    def test_lost_plans(self) -> None:
        """Plans are lost, carried out or not."""
        sometimes = ("asynchronous", "drafts", "encoder", "loras", "prompt_logprobs", "windows")
        events = ("lose", "lose_unexecuted", "abort")
        self._situation(150, sometimes=sometimes, events=events)

    def test_resets(self) -> None:
        """The prefix cache is reset while requests run."""
        sometimes = ("asynchronous", "drafts", "transfers", "encoder", "windows")
        self._situation(150, always=("resets",), sometimes=sometimes, events=("reset", "reset_all"))

    def test_policy_swap(self) -> None:
        """Another policy takes over between two steps."""
        sometimes = ("grammars", "timeouts", "asynchronous")
        self._situation(80, always=("swaps",), sometimes=sometimes, events=("swap", "abort"))

    def test_pauses(self) -> None:
        """Some requests get no tokens for a while, or nobody does."""
        sometimes = ("asynchronous", "transfers", "drafts", "grammars", "timeouts")
        events = ("pause_new", "pause_all", "resume", "abort", "advance", "reset_all")
        self._situation(150, always=("pauses",), sometimes=sometimes, events=events)
        self._situation(150, pauses(self._refusals()))

    def test_together(self) -> None:
        """Everything at once."""
        self._situation(300, sometimes=tuple(FEATURES), events=EVENTS)

    def test_refusals(self) -> None:
        """What can never run is refused at once, and what is one too many."""
        self._once(_RULE, self._check_too_long, self._check_too_large, self._check_overload)

    def _situation(
        self, examples: int, scenario: st.SearchStrategy[Scenario] | None = None, **drawn: Any
    ) -> None:
        refusals = self._refusals()
        if words := refusals.of(set(drawn.get("always", ()))):
            pytest.skip(f"refused: {words}")

        more: dict[str, Any] = {"options": self.options} if self.options else {}
        if not self.asks_policy:
            more |= {"asks_policy": False, "policy": "fcfs"}

        def check(scenario: Scenario) -> None:
            play(self.scheduler, scenario, **more)

        scenario = scenarios(refusals, **drawn) if scenario is None else scenario
        self._search(_RULE, examples, check, scenario=scenario)

    def _refusals(self) -> Refusals:
        return find_refusals(self.scheduler, self.options)

    def _rig(self, **settings: Any) -> SchedulerRig:
        settings["asks_policy"] = self.asks_policy
        if not self.asks_policy:
            settings["policy"] = "fcfs"
        return SchedulerRig(self.scheduler, options=self.options, **settings)

    def _check_too_long(self) -> None:
        """A prompt that leaves no room for a token, and the longest that leaves some."""
        rig = self._rig(max_model_len=9)
        self._must_refuse(rig, "of max_model_len tokens", list(range(9)))
        rig.add("b", list(range(8)))
        rig.run()

    def _check_too_large(self) -> None:
        """A prompt that the whole cache has no room for, among others."""
        rig = self._rig(blocks=4, block_size=2, max_model_len=20)
        rig.add("b", [1, 2, 3])
        self._must_refuse(rig, "that needs 6 blocks of 4", list(range(11)))
        rig.run()

    def _check_overload(self) -> None:
        """One more than max_waiting is refused, and others are not disturbed."""
        rig = self._rig(max_waiting=2, max_num_seqs=1)
        for name in "bc":
            rig.add(name, [1, 2, 3])
        try:
            rig.add("a", [1])
        except OverloadedError:
            rig.run()
            return
        raise REFUSAL.broken("a third request was taken, max_waiting is 2")

    def _must_refuse(self, rig: SchedulerRig, words: str, prompt: list[int]) -> None:
        try:
            rig.add("a", prompt)
        except RequestError:
            return
        raise REFUSAL.broken(f"a prompt {words} was not refused")
