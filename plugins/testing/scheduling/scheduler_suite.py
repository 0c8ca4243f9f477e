"""The conformance suite for schedulers; the built-in one passes it too."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.errors import QueueFullError
from hardpoint.plugins import OverloadedError, RequestError, Scheduler
from hardpoint.plugins.component import Component
from hardpoint.plugins.requests.releases import BlockReleases
from hardpoint.testing.component_suite import ComponentSuite

from .features import FEATURES, UnsupportedFeatures, find_unsupported
from .groups import GroupRequest, check_groups, group_scenarios
from .rules import REJECTION
from .scenarios import EVENTS, Scenario, pause_scenarios, play, preemption_scenarios, scenarios
from .simulator import SchedulerSimulator

_RULE = "contract: the loader can check and build the class"


class SchedulerSuite(ComponentSuite):
    """Base class of a test class, which sets `scheduler`, and `options` if it has some.

    Each test is a situation, in which every rule must hold: the message names the broken one.
    Features that the scheduler rejects (ConfigError when it is built, RequestError in
    `add_request`) are not used; a test of such a feature is skipped with the scheduler's message.

    Attributes:
        scheduler: the class under test.
        uses_policy: False for a scheduler without a scheduling policy.
    """

    kind = "schedulers"
    scheduler: ClassVar[type[Scheduler]]
    uses_policy: ClassVar[bool] = True

    def _component(self) -> type[Component]:
        return self.scheduler

    def _check_construction(self) -> None:
        self._simulator().check()

    def test_limits(self) -> None:
        """No step exceeds a limit, and every request finishes within the step bound."""
        self._situation(
            100, sometimes=("threshold", "unchunked", "no_prefix_cache"), ample_cache=True
        )

    def test_blocks(self) -> None:
        """Requests preempt each other in a cache that hardly fits one of them."""
        sometimes = (
            "no_prefix_cache",
            "watermark",
            "windows",
            "lookahead",
            "salts",
            "threshold",
            "unchunked",
        )
        self._situation(300, sometimes=sometimes, events=("abort",))

    def test_victims(self) -> None:
        """A request is preempted after it was scheduled in the same step."""
        self._situation(400, preemption_scenarios(), always=("threshold",))

    def test_outputs(self) -> None:
        """Outputs carry the requested fields, go to their client, and end with the right reason."""
        sometimes = ("stops", "repetition", "logprobs", "prompt_logprobs", "clients")
        self._situation(100, sometimes=sometimes)

    def test_ends(self) -> None:
        """Requests are aborted, fail and time out at any moment; their ids are reused."""
        events = ("abort", "abort_between", "advance")
        self._situation(250, sometimes=("timeouts", "faults", "clients"), events=events)

    def test_drafts(self) -> None:
        """Drafts are accepted and rejected."""
        sometimes = ("lookahead", "windows", "unchunked", "logprobs", "stops", "threshold", "loras")
        self._situation(150, always=("drafts",), sometimes=sometimes, events=("abort",))

    def test_asynchronous(self) -> None:
        """Results arrive one step late."""
        sometimes = ("faults", "prompt_logprobs", "logprobs", "stops", "windows", "timeouts")
        events = ("abort", "abort_between", "advance")
        self._situation(200, always=("asynchronous",), sometimes=sometimes, events=events)

    def test_step_time(self) -> None:
        """Whatever steps cost, prompts get tokens while other requests generate."""
        sometimes = ("asynchronous", "drafts", "windows", "encoder", "transfers", "threshold")
        events = ("abort", "advance")
        self._situation(200, always=("step_time",), sometimes=sometimes, events=events)

    def test_transfers(self) -> None:
        """External KV blocks load at once, later, in part, or not at all."""
        sometimes = (
            "asynchronous",
            "salts",
            "drafts",
            "prompt_logprobs",
            "unchunked",
            "no_prefix_cache",
        )
        events = ("abort", "abort_between")
        self._situation(250, always=("transfers",), sometimes=sometimes, events=events)

    def test_grammars(self) -> None:
        """Grammars become ready late, or fail."""
        sometimes = ("timeouts", "asynchronous", "drafts")
        self._situation(80, always=("grammars",), sometimes=sometimes, events=("abort", "advance"))

    def test_encoder(self) -> None:
        """Features are encoded within budget and encoder cache."""
        sometimes = ("asynchronous", "threshold", "drafts", "lookahead")
        self._situation(150, always=("encoder",), sometimes=sometimes, events=("abort",))

    def test_adapters(self) -> None:
        """Requests with different adapters share no blocks."""
        sometimes = ("asynchronous", "salts", "stops")
        self._situation(200, always=("loras",), sometimes=sometimes, events=("abort",))

    def test_forks(self) -> None:
        """Requests come with outputs, as forks do: these are computed, and not sent again."""
        sometimes = (
            *("asynchronous", "drafts", "no_prefix_cache", "prompt_logprobs", "stops"),
            *("threshold", "windows", "unchunked", "repetition", "loras"),
        )
        events = ("abort", "lose", "reset")
        self._situation(150, always=("forks",), sometimes=sometimes, events=events)

    def test_lost_plans(self) -> None:
        """Plans are lost, executed or not."""
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
        """A pause holds new requests, or all of them."""
        sometimes = ("asynchronous", "transfers", "drafts", "grammars", "timeouts")
        events = ("pause_new", "pause_all", "resume", "abort", "advance", "reset_all")
        self._situation(150, always=("pauses",), sometimes=sometimes, events=events)
        self._situation(150, pause_scenarios(self._unsupported()))

    def test_groups(self) -> None:
        """Requests and their members compute their last tokens in the same steps."""
        if not self.scheduler.keeps_groups:
            pytest.skip("rejected: it does not keep groups of requests")
        more: dict[str, Any] = {"options": self.options, "uses_policy": self.uses_policy}

        def check(scenario: tuple[list[GroupRequest], dict[str, Any]]) -> None:
            check_groups(self.scheduler, scenario, **more)

        self._search(_RULE, 200, check, scenario=group_scenarios())

    def test_together(self) -> None:
        """All features and events are combined."""
        self._situation(300, sometimes=tuple(FEATURES), events=EVENTS)

    def test_releases(self) -> None:
        """Blocks of running requests are released, in chunks, with drafts and preemptions."""
        if not self.scheduler.releases_blocks:
            pytest.skip("rejected: releases_blocks is False")
        self._run_checks(
            _RULE,
            functools.partial(self._check_releases, blocks=40),
            functools.partial(self._check_releases, blocks=14),
            functools.partial(self._check_releases, blocks=14, max_num_batched_tokens=5),
            functools.partial(self._check_releases, blocks=14, prefix_caching=False),
        )

    def test_rejections(self) -> None:
        """Requests that can never run, and requests beyond max_waiting, are rejected at once."""
        self._run_checks(
            _RULE,
            self._check_too_long,
            self._check_too_large,
            self._check_overload,
            self._check_waiting_tokens,
        )

    def _situation(
        self, examples: int, scenario: st.SearchStrategy[Scenario] | None = None, **drawn: Any
    ) -> None:
        unsupported = self._unsupported()
        if message := unsupported.message(set(drawn.get("always", ()))):
            pytest.skip(f"rejected: {message}")

        more: dict[str, Any] = {"options": self.options} if self.options else {}
        if not self.uses_policy:
            more |= {"uses_policy": False, "policy": "fcfs"}

        def check(scenario: Scenario) -> None:
            play(self.scheduler, scenario, **more)

        scenario = scenarios(unsupported, **drawn) if scenario is None else scenario
        self._search(_RULE, examples, check, scenario=scenario)

    def _unsupported(self) -> UnsupportedFeatures:
        return find_unsupported(self.scheduler, self.options)

    def _simulator(self, **settings: Any) -> SchedulerSimulator:
        settings["uses_policy"] = self.uses_policy
        if not self.uses_policy:
            settings["policy"] = "fcfs"
        return SchedulerSimulator(self.scheduler, options=self.options, **settings)

    def _check_too_long(self) -> None:
        """Reject a prompt of max_model_len tokens; accept a prompt with one token less."""
        simulator = self._simulator(max_model_len=9)
        self._must_reject(simulator, "of max_model_len tokens", list(range(9)))
        simulator.add("b", list(range(8)))
        simulator.run()

    def _check_too_large(self) -> None:
        """Reject a prompt larger than the whole cache; run the others."""
        simulator = self._simulator(blocks=4, block_size=2, max_model_len=20)
        simulator.add("b", [1, 2, 3])
        self._must_reject(simulator, "that needs 6 blocks of 4", list(range(11)))
        simulator.run()

    def _check_overload(self) -> None:
        """Reject a request beyond max_waiting; run the others."""
        simulator = self._simulator(max_waiting=2, max_num_seqs=1)
        for name in "bc":
            simulator.add(name, [1, 2, 3])
        try:
            simulator.add("a", [1])
        except OverloadedError:
            simulator.run()
            return
        raise REJECTION.violation("a third request was accepted, max_waiting is 2")

    def _check_waiting_tokens(self) -> None:
        """Reject a prompt beyond max_waiting_tokens, if the scheduler has that limit.

        A longer prompt is accepted if none waits.
        """
        if not self.scheduler.limits_waiting_tokens:
            return
        simulator = self._simulator(max_waiting_tokens=6, max_num_seqs=1)
        simulator.add("b", list(range(9)))
        try:
            simulator.add("a", [1])
        except QueueFullError:
            simulator.run()
            return
        raise REJECTION.violation("a prompt was accepted beyond max_waiting_tokens, which is 6")

    def _check_releases(self, **settings: Any) -> None:
        """Release blocks of prompts and outputs; run the requests to their end."""
        simulator = self._simulator(block_size=2, max_model_len=24, **settings)
        for name in "abcd":
            simulator.add(name, [3, 1, 4, 1, 5, 9, 2, 6], max_tokens=14)
            if (request := simulator.scheduler.live_request(name)) is None:
                raise REJECTION.violation(f"live_request({name!r}) is None, expected the request")
            releases = request.releases = BlockReleases()
            for at, blocks in (
                (5, range(1, 2)),
                (8, range(0)),
                (11, range(0, 4)),
                (16, range(5, 8)),
            ):
                releases.add(blocks, at, 2)
        simulator.run()

    def _must_reject(
        self, simulator: SchedulerSimulator, description: str, prompt: list[int]
    ) -> None:
        try:
            simulator.add("a", prompt)
        except RequestError:
            return
        raise REJECTION.violation(f"a prompt {description} was not rejected")
