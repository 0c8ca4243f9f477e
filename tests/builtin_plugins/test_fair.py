"""fair: the virtual token counter, against the paper's bound and a naive book-keeper."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.fair_harness import Job, Loop, Service
from support.plugins.policies import LOAD, build, request
from support.searching import examples

from hardpoint.builtin_plugins.policies import Fair, FirstComeFirstServed
from hardpoint.builtin_plugins.policies.virtual_counters import VirtualCounters
from hardpoint.plugins import ConfigError, RequestStatus

CAPACITY = 120
LONGEST = 40


class TestCharges:
    def test_prompt_and_output_tokens_cost_as_configured(self):
        fair = build(Fair, input_cost=3, output_cost=5)
        it = request("a", prompt=4)
        fair.added(it)
        fair.scheduled(it, 3)
        assert fair.group_key("", 0.0) == 9
        it.num_computed_tokens = 3
        fair.scheduled(it, 1)  # the prompt's last token gives an output
        assert fair.group_key("", 0.0) == 12 + 5
        it.num_computed_tokens = 4
        fair.scheduled(it, 1)
        assert fair.group_key("", 0.0) == 12 + 10

    def test_a_tenant_of_weight_two_pays_half(self):
        fair = build(Fair, weights={"gold": 2.0})
        both = [request(tenant, prompt=8, tenant=tenant) for tenant in ("gold", "iron")]
        for it in both:
            fair.added(it)
        for it in both:
            fair.scheduled(it, 6)
        assert (fair.group_key("gold", 0.0), fair.group_key("iron", 0.0)) == (3, 6)

    def test_what_the_prefix_cache_has_is_free(self):
        fair = build(Fair)
        it = request("a", prompt=10)
        fair.added(it)
        it.num_computed_tokens = 8
        fair.scheduled(it, 1)
        assert fair.group_key("", 0.0) == 1

    def test_what_is_computed_again_was_paid(self):
        fair = build(Fair)
        it = request("a", prompt=10)
        fair.added(it)
        fair.scheduled(it, 7)
        it.num_computed_tokens = 0
        fair.preempted(it)
        fair.scheduled(it, 5)
        assert fair.group_key("", 0.0) == 7
        it.num_computed_tokens = 5
        fair.scheduled(it, 4)
        assert fair.group_key("", 0.0) == 9

    def test_a_rejected_draft_is_paid_once(self):
        fair = build(Fair)
        it = request("a", prompt=1)
        fair.added(it)
        fair.scheduled(it, 1)
        it.num_computed_tokens = 1
        fair.scheduled(it, 4)  # three of them drafts
        paid = fair.group_key("", 0.0)
        it.num_computed_tokens = 2  # none was right
        fair.scheduled(it, 3)
        assert fair.group_key("", 0.0) == paid

    @examples(8)
    @given(st.data())
    def test_a_tenant_pays_for_what_it_got_whatever_happens_on_the_way(self, data):
        """Chunks, cached prefixes, preemptions and aborts; alone a tenant is never lifted."""
        fair = build(Fair, weights={"a": 2.0}, input_cost=1, output_cost=2)
        loop = loop_of(fair, data.draw(st.integers(1, 30)))
        loop.add(Job("a", 1, 60))  # stays, so that its client is kept
        for _ in range(data.draw(st.integers(1, 25))):
            for _ in range(data.draw(st.integers(0, 2))):
                prompt = data.draw(st.integers(1, LONGEST))
                cached = data.draw(st.integers(0, prompt - 1))
                loop.add(Job("a", prompt, data.draw(st.integers(1, 9)), cached))
            if loop.running and data.draw(st.booleans()):
                loop.preempt()
            if len(loop.live) > 1 and data.draw(st.integers(0, 4)) == 0:
                loop.abort(loop.live[-1])
            loop.step()
            assert fair.group_key("a", 0.0) == loop.service.of("a", 1, 2) / 2 > 0


def spread(service: Service, pair, costs, weights):
    """Return the largest difference of weighted service over an interval with both backlogged."""
    worst, inside = 0.0, []
    for backlogged, given_to in service.history:
        if not set(pair) <= backlogged:
            inside = []
            continue
        first, other = (Service.cost(given_to[t], *costs) / weights.get(t, 1.0) for t in pair)
        inside.append(first - other)
        worst = max(worst, max(inside) - min(inside))
    return worst


def bound(costs, weights):
    """The paper's, theorem 4.4, for weighted tenants."""
    smallest = min([1.0, *weights.values()])
    return 2 * max(costs[0] * LONGEST, costs[1] * CAPACITY) / smallest


def backlogged(loop, sizes, steps):
    """Run a loop for some steps in which both tenants always have requests waiting."""
    draws = {tenant: itertools.cycle(of) for tenant, of in sizes.items()}
    begin = None
    for _ in range(steps):
        for tenant in sizes:
            while loop.num_waiting(tenant) <= CAPACITY // 2:  # a step cannot admit so many
                loop.add(Job(tenant, *next(draws[tenant])))
        begin = begin or len(loop.service.history)
        loop.step()
    assert all(set(sizes) <= waiting for waiting, _ in loop.service.history[begin:])
    return loop.service


def loop_of(policy, budget=64):
    return Loop(policy, budget=budget, capacity=CAPACITY)


sizes = st.lists(
    st.tuples(st.integers(1, LONGEST), st.integers(1, CAPACITY - LONGEST)), min_size=1, max_size=12
)
costs = st.sampled_from([(1, 2), (1, 1), (0, 1), (3, 10)])
weights = st.sampled_from([{}, {"a": 2.0}, {"a": 4.0, "b": 0.5}, {"b": 10.0}])


class TestBound:
    @examples(8)
    @given(sizes, sizes, costs, weights, st.integers(1, 2 * CAPACITY))
    def test_two_backlogged_tenants_stay_within_it(self, first, other, costs, weights, budget):
        fair = build(Fair, input_cost=costs[0], output_cost=costs[1], weights=weights)
        service = backlogged(loop_of(fair, budget), {"a": first, "b": other}, 120)
        assert spread(service, "ab", costs, weights) <= bound(costs, weights) + 1e-6

    @examples(8)
    @given(st.data(), costs, weights)
    def test_tenants_that_come_and_go_stay_within_it(self, data, costs, weights):
        """Every pair of three, over every interval in which both wait: idling earns nothing."""
        fair = build(Fair, input_cost=costs[0], output_cost=costs[1], weights=weights)
        loop = loop_of(fair, data.draw(st.integers(5, 2 * CAPACITY)))
        bursts = st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 8), st.integers(0, 12), sizes),
            min_size=1,
            max_size=12,
        )
        for tenant, number, steps, of in data.draw(bursts):
            for size in itertools.islice(itertools.cycle(of), number):
                loop.add(Job(tenant, *size))
            for _ in range(steps):
                loop.step()
        while loop.live:
            loop.step()
        for pair in itertools.combinations("abc", 2):
            assert spread(loop.service, pair, costs, weights) <= bound(costs, weights) + 1e-6

    def test_fcfs_does_not_keep_it(self):
        """So the test above can fail."""
        jobs = {"a": [(40, 60)], "b": [(1, 1)]}
        service = backlogged(loop_of(build(FirstComeFirstServed)), jobs, 1500)
        assert spread(service, "ab", (1, 2), {}) > bound((1, 2), {})

    def test_weights_divide_the_service(self):
        fair = build(Fair, weights={"a": 3.0})
        jobs = {"a": [(10, 10)], "b": [(10, 10)]}
        service = backlogged(loop_of(fair), jobs, 600)
        shares = [service.of(tenant, 1, 2) for tenant in "ab"]
        assert shares[0] / shares[1] == pytest.approx(3, rel=0.05)

    def test_a_tenant_that_was_away_gets_no_credit(self):
        fair = build(Fair)
        loop = loop_of(fair)
        loop.add(Job("b", 5, 5))
        backlogged(loop, {"a": [(10, 10)]}, 300)  # b leaves, a has the engine for itself
        before = {tenant: loop.service.of(tenant, 1, 2) for tenant in "ab"}
        assert before["a"] > 10 * bound((1, 2), {})
        backlogged(loop, {"a": [(10, 10)], "b": [(10, 10)]}, 200)
        gained = [loop.service.of(tenant, 1, 2) - before[tenant] for tenant in "ab"]
        assert abs(gained[0] - gained[1]) <= bound((1, 2), {})
        assert min(gained) > bound((1, 2), {})


class NaiveCounters:
    """The paper's algorithm 2 unchanged: no client is ever dropped."""

    def __init__(self):
        self.counters, self.waiting, self.last = {}, {}, None

    def wait(self, name):
        self.counters.setdefault(name, 0.0)
        queued = [n for n, number in self.waiting.items() if number]
        if not self.waiting.get(name):
            if queued:
                level = min(self.counters[n] for n in queued)
            else:
                level = self.counters.get(self.last, 0.0)
            self.counters[name] = max(self.counters[name], level)
        self.waiting[name] = self.waiting.get(name, 0) + 1

    def run(self, name):
        self.waiting[name] -= 1
        if not self.waiting[name]:
            self.last = name


class TestCounters:
    @examples(10)
    @given(st.data())
    def test_agree_with_those_that_forget_no_client(self, data):
        counters, naive = VirtualCounters({}), NaiveCounters()
        waiting, running, level = [], [], -math.inf
        actions = st.sampled_from(
            ["come", "come", "run", "run", "charge", "preempt", "end", "abort"]
        )
        for _ in range(data.draw(st.integers(1, 60))):
            action = data.draw(actions)
            if action == "come":
                client = counters.add(data.draw(st.sampled_from("abcdefgh")))
                counters.wait(client)
                naive.wait(client.name)
                waiting.append(client)
            elif action in ("run", "abort") and waiting:
                client = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
                counters.run(client)
                naive.run(client.name)
                if action == "abort":
                    counters.remove(client)
                else:
                    running.append(client)
            elif running:
                client = running.pop(data.draw(st.integers(0, len(running) - 1)))
                if action == "preempt":
                    counters.wait(client)
                    naive.wait(client.name)
                    waiting.append(client)
                elif action == "end":
                    counters.remove(client)
                else:
                    cost = data.draw(st.integers(1, 9))
                    client.counter += cost
                    naive.counters[client.name] += cost
                    running.append(client)
            for client in waiting + running:
                assert counters.counter(client.name) == naive.counters[client.name]
            assert counters.level() >= level
            level = counters.level()

    def test_a_million_tenants_that_come_once_leave_nothing(self):
        counters = VirtualCounters({})
        largest = 0
        for number in range(20_000):
            client = counters.add(str(number))
            counters.wait(client)
            counters.run(client)
            client.counter += number % 7
            counters.remove(client)
            largest = max(largest, len(counters), len(counters._heap))
        assert largest <= 1

    def test_tenants_that_were_served_beyond_the_others_are_kept_until_they_are_caught_up_with(
        self,
    ):
        counters = VirtualCounters({})
        steady = counters.add("steady")
        counters.wait(steady)
        for number in range(100):
            client = counters.add(str(number))
            counters.wait(client)
            counters.run(client)
            client.counter += 5
            counters.remove(client)
        assert len(counters) == 101
        back = counters.add("7")
        counters.wait(back)
        assert back.counter == 5
        counters.run(back)
        counters.remove(back)
        steady.counter = 6.0
        assert counters.level() == 6
        assert len(counters) == 1

    def test_a_tenant_that_flips_while_the_level_stands_has_one_entry(self):
        counters = VirtualCounters({})
        counters.wait(counters.add("steady"))
        for _ in range(100):
            client = counters.add("flips")
            counters.wait(client)
            counters.run(client)
            client.counter += 1
            counters.remove(client)
        assert len(counters._heap) == 2


class TestQueues:
    def test_tenants_have_queues_of_their_own(self):
        fair = build(Fair)
        assert fair.group(request("a", tenant="acme")) == "acme"
        assert fair.group(request("b")) == fair.group(request("c")) == ""

    def test_the_operator_chooses_the_tag_of_tenants(self):
        fair = build(Fair, tag="team")
        assert fair.group(request("a", tags={"team": "red", "tenant": "acme"})) == "red"

    def test_within_a_tenant_by_arrival(self):
        fair = build(Fair)
        requests = [request("a", arrival=2.0, prompt=1), request("b", arrival=1.0, prompt=9)]
        assert [r.request_id for r in sorted(requests, key=fair.key)] == ["b", "a"]

    def test_the_latest_of_the_tenant_that_had_most_gives_way(self):
        fair = build(Fair)
        tenants = {"1": "big", "2": "small", "3": "big", "4": "small"}
        running = [request(name, prompt=50, tenant=t) for name, t in tenants.items()]
        for it in running:
            fair.added(it)
        for it in running:
            fair.scheduled(it, 20 if it.tags["tenant"] == "big" else 5)
        assert fair.victim(running, LOAD) is running[2]
        assert fair.victim([running[1], running[3]], LOAD) is running[3]

    def test_finished_requests_are_forgotten(self):
        fair = build(Fair)
        for number in range(1000):
            it = request(str(number), tenant=str(number))
            fair.added(it)
            if number % 2:
                fair.scheduled(it, 1)
            fair.finished(it)
        assert fair.export_state()["charged"] == {}
        assert len(fair.export_state()["counters"]) <= 1


class TestSwap:
    @staticmethod
    def busy():
        """Two tenants, one far ahead, with one request running and one waiting each."""
        fair = build(Fair)
        live = [request(f"{t}{n}", prompt=30, tenant=t) for n in "12" for t in ("big", "small")]
        for it in live:
            fair.added(it)
        for it in live[:2]:
            fair.scheduled(it, 20 if it.tags["tenant"] == "big" else 5)
            it.status = RequestStatus.RUNNING
        return fair, live

    def test_imported_state_goes_on(self):
        old, live = self.busy()
        new = build(Fair, weights={"big": 2.0})
        assert new.state_format == old.state_format
        new.import_state(old.export_state())
        for it in live:
            new.added(it)
        for tenant in ("big", "small"):
            assert new.group_key(tenant, 0.0) == old.group_key(tenant, 0.0)
        new.scheduled(live[0], 20)  # rolled back by the swap: paid already
        assert new.group_key("big", 0.0) == 20
        live[0].num_computed_tokens = 20
        new.scheduled(live[0], 10)
        assert new.group_key("big", 0.0) == 20 + (10 + 2) / 2

    def test_a_tenant_that_only_runs_keeps_its_counter(self):
        old, live = self.busy()
        late = request("z", prompt=30, tenant="late")
        old.added(late)
        old.scheduled(late, 1)
        late.status = RequestStatus.RUNNING
        old.scheduled(live[3], 20)
        new = build(Fair)
        new.import_state(old.export_state())
        for it in [*live, late]:
            new.added(it)
        assert old.group_key("late", 0.0) == 6 < old.export_state()["level"]
        assert new.group_key("late", 0.0) == 6

    def test_a_newcomer_after_the_swap_is_lifted_to_the_old_level(self):
        old, live = self.busy()
        new = build(Fair)
        new.import_state(old.export_state())
        for it in [*live, request("n", tenant="new")]:
            new.added(it)
        assert new.group_key("new", 0.0) == old.group_key("small", 0.0) == 5

    def test_what_tenants_had_is_not_taken_over_from_another_tag(self):
        old, live = self.busy()
        new = build(Fair, tag="team")
        new.import_state(old.export_state())
        for it in live:
            new.added(it)
        assert new.group_key("", 0.0) == 0
        new.scheduled(live[0], 20)
        assert new.group_key("", 0.0) == 0  # but what is paid stays paid

    def test_what_another_policy_let_run_is_not_charged(self):
        fair = build(Fair)
        it = request("a", prompt=10)
        for _ in range(4):
            it.append(1)
        it.status = RequestStatus.PREEMPTED
        fair.added(it)
        fair.scheduled(it, 13)
        assert fair.group_key("", 0.0) == 0
        it.num_computed_tokens = 13
        fair.scheduled(it, 1)
        assert fair.group_key("", 0.0) == 2

    def test_a_request_that_runs_when_it_is_handed_over_does_not_wait(self):
        fair = build(Fair)
        runs, waits = request("a", tenant="a"), request("b", tenant="b")
        runs.status, runs.num_computed_tokens = RequestStatus.RUNNING, 1
        fair.added(runs)
        fair.scheduled(runs, 40)
        fair.added(waits)
        assert fair.group_key("b", 0.0) == 0  # no client waited before it
        fair.preempted(runs)
        fair.finished(runs)
        fair.finished(waits)

    def test_invalid_state_is_refused(self):
        with pytest.raises(KeyError, match="charged"):
            build(Fair).import_state({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"a": 0}}, "plugin.it.weights.a: expected a number > 0, got 0"),
        ({"weights": {"a": "x"}}, "plugin.it.weights.a: expected a number"),
        ({"output_cost": -1}, "plugin.it.output_cost: expected a number >= 0, got -1"),
        ({"tags": "x"}, "plugin.it.tags: unknown field"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build(Fair, **options)
