"""The waiting queue: passing others is bounded, and waiting costs nothing."""

from __future__ import annotations

from random import Random

from support.builtins.scheduler_harness import (
    Connector,
    HoldsBack,
    Simulator,
    admitted,
    make_policy,
)
from support.searching import searches_long

from hardpoint.builtin_plugins.scheduling.live_request import SchedulerRequest
from hardpoint.builtin_plugins.scheduling.waiting_queue import WaitingQueue
from hardpoint.plugins import EngineCoreRequest, SamplingParams, SchedulingPolicy, WaitingFor

# Overtaking is bounded


def looking_up(names, **settings):
    """Return a sim with a connector that never ends the lookup of some requests."""
    connector = Connector(**dict.fromkeys(names, (None, True)))
    return Simulator(context={"transfers": connector}, **settings)


def overtaken(sim):
    """Count the steps that admit a request before "b", while the lookup of "b" is pending."""
    sim.add("a", max_tokens=100)
    sim.add("b")
    steps = 0
    for i in range(40):
        sim.add(f"c{i}", prompt=1, max_tokens=1)
        sim.add(f"d{i}", prompt=1, max_tokens=1)
        new = admitted(sim.step())
        steps += any(name[0] in "cd" for name in new)
    return steps


def test_one_that_is_set_aside_is_passed_in_so_many_steps_only():
    sim = looking_up("b", options={"max_overtaken": 3}, blocks=200)
    assert overtaken(sim) == 3
    assert sim.live("b").num_overtaken == 3
    assert sim.records[-1].admission_stopped.waiting_for is WaitingFor.REMOTE_KV
    assert sim.why("c20").waiting_for is WaitingFor.BEHIND


def test_no_request_is_passed_where_none_may():
    assert overtaken(looking_up("b", options={"max_overtaken": 0}, blocks=200)) == 0


def test_being_set_aside_without_being_passed_does_not_count():
    sim = looking_up("b", options={"max_overtaken": 3})
    sim.add("a")
    sim.add("b")
    for _ in range(9):
        sim.step()
    assert sim.live("b").num_overtaken == 0


def test_a_step_sets_so_many_aside_only():
    sim = looking_up("bcd", options={"max_set_aside": 2})
    sim.add("a")
    for name in "bcd":
        sim.add(name)
    sim.add("e")
    assert admitted(sim.step()) == ["a"]
    assert list(sim.records[-1].waiting) == ["b", "c"]
    assert (sim.why("d").waiting_for, sim.why("d").ahead) == (WaitingFor.BEHIND, 2)


# What waits costs nothing


class Counts(HoldsBack):
    """Counts its calls."""

    def __init__(self, context):
        super().__init__(context)
        self.calls = 0

    def key(self, request):
        self.calls += 1
        return super().key(request)

    def admit(self, request, load):
        self.calls += 1
        return super().admit(request, load)


def work_of_steps(waiting, monkeypatch):
    """Return the calls of the policy, of the queue and of the cache in four steps."""
    sim = Simulator(policy=Counts, max_num_seqs=2)
    params = SamplingParams(max_tokens=2)
    for i in range(waiting):
        request = EngineCoreRequest(request_id=str(i), prompt_token_ids=[1], params=params)
        sim.tokens[str(i)] = []
        sim.scheduler.add_request(request)
    touched = []
    for name in ("__contains__", "in_order", "push", "remove"):
        method = getattr(WaitingQueue, name)
        monkeypatch.setattr(
            WaitingQueue, name, lambda *args, f=method: touched.append(1) or f(*args)
        )
    lookups, calls = sim.cache.stats().requests, sim.policy.calls
    for _ in range(4):
        sim.step()
    monkeypatch.undo()
    return sim.policy.calls - calls, len(touched), sim.cache.stats().requests - lookups


def test_many_waiting_requests_add_no_work_to_a_step(monkeypatch):
    few = work_of_steps(10, monkeypatch)
    assert few[0] == few[2] == 4  # two requests were admitted twice
    assert work_of_steps(100_000 if searches_long() else 5_000, monkeypatch) == few


class Shuffled(SchedulingPolicy):
    """Orders by a number in the id, in two groups."""

    contract = 1

    def key(self, request):
        return int(request.request_id) // 3

    def group(self, request):
        return int(request.request_id) % 2


def test_the_queue_is_in_order_after_thousands_of_arrivals_and_ends():
    random = Random(5)
    queue = WaitingQueue(make_policy(Shuffled))
    naive = {0: [], 1: []}
    for order, name in enumerate(random.sample(range(3000), 3000)):
        source = EngineCoreRequest(
            request_id=str(name), prompt_token_ids=[1], params=SamplingParams()
        )
        request = SchedulerRequest(source, order, 100)
        request.num_preemptions = random.randrange(2)
        queue.push(request)
        naive[name % 2].append((name // 3, request.num_preemptions == 0, order, request))
        if order % 3 == 2:
            group = naive[random.randrange(2)]
            queue.remove(group.pop(random.randrange(len(group)))[3])
    for group, entries in naive.items():
        expected = [entry[3] for entry in sorted(entries)]
        assert list(queue.in_order(group)) == expected
        assert [queue.num_ahead(request) for request in expected] == [*range(len(expected))]
    assert len(queue) == len(list(queue)) == 2000


class Compared(SchedulingPolicy):
    """Its keys count how often they are compared."""

    contract = 1
    count = 0

    def key(self, request):
        return CountingKey(request.order)


class CountingKey(int):
    def __lt__(self, other):
        Compared.count += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_why_the_last_of_thousands_waits_is_answered_without_comparing_it_with_each():
    sim = Simulator(policy=Compared, max_num_seqs=1)
    for i in range(10_000):
        sim.tokens[str(i)] = []
        sim.scheduler.add_request(
            EngineCoreRequest(request_id=str(i), prompt_token_ids=[1], params=SamplingParams())
        )
    sim.step()
    before = Compared.count
    assert sim.why("9999").ahead == 9_998
    assert Compared.count == before
