"""fcfs, priority and shortest_first: whom they prefer, and whom they send away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plugins.policies import LOAD, build, request
from support.searching import examples

from hardpoint.builtin_plugins.policies import FirstComeFirstServed, Priority, ShortestFirst
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import ConfigError, EngineConfig, PolicyContext, SchedulingPolicy
from hardpoint.typed import convert


def order(policy, *requests):
    return "".join(r.request_id for r in sorted(requests, key=policy.key))


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair", "shortest_first"])
def test_each_is_chosen_by_its_name(name):
    config = convert({"scheduler": {"policy": name}}, EngineConfig, path="")
    plugins = resolve_plugins(config)
    entry = plugins.one("scheduling_policies")
    assert (entry.name, entry.distribution) == (name, "hardpoint")
    policy = plugins.create(entry, PolicyContext)
    assert isinstance(policy, SchedulingPolicy)
    assert policy.contract == KINDS["scheduling_policies"].contract


class TestFcfs:
    def test_goes_by_arrival(self):
        a = request("a", arrival=2.0, priority=-1)
        b = request("b", arrival=1.0, prompt=100)
        assert order(build(FirstComeFirstServed), a, b) == "ba"

    def test_a_request_that_came_together_stays_in_order(self):
        policy = build(FirstComeFirstServed)
        assert policy.key(request(arrival=1.0)) == policy.key(request(arrival=1.0, prompt=9))

    def test_the_latest_admitted_gives_way(self):
        running = [request("a", arrival=9.0), request("b", arrival=1.0)]
        assert build(FirstComeFirstServed).victim(running, LOAD) is running[1]

    def test_all_stand_in_one_queue(self):
        assert build(FirstComeFirstServed).group(request()) is None


class TestPriority:
    def test_smaller_numbers_first_then_arrival(self):
        requests = [
            request("a", priority=1, arrival=0.0),
            request("b", priority=0, arrival=2.0),
            request("c", priority=0, arrival=1.0),
            request("d", priority=-3, arrival=9.0),
        ]
        assert order(build(Priority), *requests) == "dcba"

    def test_the_least_important_gives_way_the_latest_of_equals(self):
        policy = build(Priority)
        a = request("a", priority=5, arrival=1.0)
        b = request("b", priority=5, arrival=2.0)
        c = request("c", priority=0, arrival=3.0)
        assert policy.victim([a, b, c], LOAD) is b
        assert policy.victim([b, a, c], LOAD) is b
        assert policy.victim([a, c], LOAD) is a

    def test_of_those_that_came_together_the_latest_admitted_gives_way(self):
        running = [request("a"), request("b"), request("c", priority=-1)]
        assert build(Priority).victim(running, LOAD) is running[1]


class TestShortestFirst:
    def test_less_work_goes_first(self):
        policy = build(ShortestFirst)
        a = request("a", prompt=100, max_tokens=10)
        b = request("b", prompt=10, max_tokens=10, arrival=0.5)
        c = request("c", prompt=10, max_tokens=500)
        assert order(policy, a, b, c) == "bac"

    def test_a_request_that_waited_long_enough_goes_before_shorter_ones(self):
        policy = build(ShortestFirst, seconds_per_token=0.5)
        old = request("a", prompt=20, max_tokens=1)
        assert order(policy, old, request("b", prompt=1, max_tokens=1, arrival=9.4)) == "ba"
        assert order(policy, old, request("b", prompt=1, max_tokens=1, arrival=9.6)) == "ab"

    def test_outputs_weigh_as_configured(self):
        long_prompt = request("a", prompt=50, max_tokens=1)
        long_answer = request("b", prompt=1, max_tokens=30)
        assert order(build(ShortestFirst), long_prompt, long_answer) == "ba"
        assert order(build(ShortestFirst, output_weight=4), long_prompt, long_answer) == "ab"
        assert order(build(ShortestFirst, output_weight=0), long_prompt, long_answer) == "ba"

    def test_the_order_of_a_request_without_max_tokens_is_that_of_its_prompt(self):
        policy = build(ShortestFirst)
        a, b = request("a", prompt=5, max_tokens=None), request("b", prompt=4, max_tokens=None)
        assert order(policy, a, b) == "ba"

    def test_no_seconds_per_token_is_fcfs(self):
        policy = build(ShortestFirst, seconds_per_token=0)
        assert policy.key(request(prompt=500, arrival=3.5)) == 3.5

    @examples(50)
    @given(
        st.floats(0, 10),
        st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1000)), min_size=2, max_size=8),
    )
    def test_no_request_overtakes_after_the_stated_time(self, seconds, jobs):
        """The bound: seconds_per_token times the lead in work."""
        policy = build(ShortestFirst, seconds_per_token=seconds, output_weight=0)
        requests = [request(str(i), prompt=p, arrival=t) for i, (p, t) in enumerate(jobs)]
        for late in requests:
            for early in requests:
                lead = early.num_prompt_tokens - late.num_prompt_tokens
                if late.arrival_time > early.arrival_time + seconds * max(lead, 0) + 1e-6:
                    assert policy.key(early) < policy.key(late)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"seconds_per_token": -1}, "plugin.it.seconds_per_token: expected a number >= 0"),
            ({"output_weight": "x"}, "plugin.it.output_weight: expected a number >= 0, got 'x'"),
            ({"seconds": 1}, "plugin.it.seconds: unknown field"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            build(ShortestFirst, **options)
