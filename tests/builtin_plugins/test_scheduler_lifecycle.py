"""Ends, deadlines, lost plans, resets, and another policy on the way."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import (
    Connector,
    FirstComeFirstServed,
    Grammars,
    Priority,
    Simulator,
    make_policy,
    next_token,
    reference,
)

from hardpoint.builtin_plugins.policies import Fair
from hardpoint.plugins import (
    FinishReason,
    ModelRunnerOutput,
    RequestFault,
    RequestStatus,
)

# Ends


def test_the_length_ends_a_request():
    sim = Simulator()
    sim.add("a", max_tokens=2)
    sim.step()
    outputs = sim.update(sim.plan())
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    assert sim.live("a") is None
    assert sim.cache.num_free_blocks == 64
    assert sim.scheduler.num_unfinished_requests() == 0


@pytest.mark.parametrize("is_eos", [True, False])
def test_a_stop_token_ends_it_and_is_named_unless_it_is_the_models_own(is_eos):
    token = next_token([7, 7])
    sim = Simulator()
    if is_eos:
        sim.add("a", prompt=[7, 7], eos_token_ids=[token])
    else:
        sim.add("a", prompt=[7, 7], params={"stop_token_ids": [token]})
    output = sim.update(sim.plan())["a"]
    assert output.new_token_ids == [token]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == (None if is_eos else token)


def test_a_fault_ends_one_request_and_no_other():
    sim = Simulator()
    sim.add("a")
    sim.add("b")
    plan = sim.plan()
    result = ModelRunnerOutput({"b": [5]}, faults={"a": RequestFault("it broke", "mirostat")})
    outputs = sim.update(plan, result)
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert (outputs["a"].error, outputs["a"].faulty_plugin) == ("it broke", "mirostat")
    assert outputs["b"].new_token_ids == [5]


@pytest.mark.parametrize("when", ["waiting", "running", "preempted", "compiling"])
def test_requests_end_from_outside_wherever_they_stand(when):
    sim = Simulator(context={"gates": Grammars(compiling={"g"})})
    name = "g" if when == "compiling" else "a"
    sim.add(name)
    if when in ("running", "preempted"):
        sim.step()
    if when == "preempted":
        sim.scheduler.reset_prefix_cache(recompute_running=True)
    outputs = sim.abort(name, "unknown", reason=FinishReason.ABORT)
    assert list(outputs) == [name]
    assert outputs[name].finish_reason is FinishReason.ABORT
    assert sim.abort(name, reason=FinishReason.ABORT) == {}
    plan = sim.step()
    assert plan.finished_request_ids == {name}
    assert plan.num_scheduled_tokens == {}
    assert sim.cache.num_free_blocks == 64


def test_all_requests_end_at_once():
    sim = Simulator(max_num_seqs=1)
    sim.add("a", client_index=1)
    sim.add("b", client_index=2)
    sim.step()
    outputs = sim.scheduler.finish_requests(None, FinishReason.ABORT)
    assert {client: out.outputs[0].request_id for client, out in outputs.items()} == {
        1: "a",
        2: "b",
    }
    assert sim.scheduler.num_unfinished_requests() == 0


def test_results_of_a_request_that_was_aborted_meanwhile_are_thrown_away():
    sim = Simulator()
    sim.add("a")
    plan = sim.plan()
    sim.abort("a", reason=FinishReason.ABORT)
    assert sim.update(plan, ModelRunnerOutput({"a": [1]})) == {}


def test_an_id_can_be_used_again():
    sim = Simulator()
    sim.add("a", max_tokens=1, timeout=5.0)
    sim.step()
    sim.ends.clear()
    sim.add("a", max_tokens=2, arrival_time=100.0)
    sim.clock.advance(50)  # the deadline of the first one is not that of the second
    plan = sim.step()
    assert plan.finished_request_ids == {"a"}
    assert [entry.source.request_id for entry in plan.new_requests] == ["a"]
    assert len(sim.run()["a"]) == 2


# Deadlines


@pytest.mark.parametrize("when", ["waiting", "running", "compiling", "loading"])
def test_a_deadline_ends_a_request_wherever_it_stands(when):
    sim = Simulator(
        max_num_seqs=1,
        context={
            "gates": Grammars(compiling={"g"}),
            "transfers": Connector(a=(3, True)) if when == "loading" else Connector(),
        },
    )
    if when == "waiting":
        sim.add("z")
    name = "g" if when == "compiling" else "a"
    sim.add(name, arrival_time=10.0, timeout=5.0)
    sim.clock.now = 14.9
    sim.step()
    assert sim.live(name) is not None
    sim.clock.now = 15.0
    plan = sim.plan()
    assert name not in plan.num_scheduled_tokens
    assert plan.finished_request_ids == {name}
    assert sim.records[-1].timed_out == [name]
    assert sim.live(name) is None
    outputs = sim.update(plan)  # the next update reports it
    assert outputs[name].finish_reason is FinishReason.TIMEOUT
    assert str(outputs[name].finish_reason) == "timeout"
    sim.step()
    assert sim.records[-1].timed_out == []


def test_a_deadline_is_reported_also_when_the_plan_was_lost():
    sim = Simulator()
    sim.add("a", arrival_time=0.0, timeout=1.0)
    sim.clock.advance(2)
    sim.lose(sim.plan())
    plan = sim.plan()
    assert plan.finished_request_ids == {"a"}
    assert sim.update(plan)["a"].finish_reason is FinishReason.TIMEOUT


def test_deadlines_of_many_ended_requests_take_no_memory():
    sim = Simulator(blocks=500)
    for i in range(400):
        sim.add(str(i), max_tokens=1, prompt=1, timeout=1e6)
        sim.step()
    assert len(sim.scheduler._tracker._deadlines) <= 70


# Lost plans


def test_a_lost_plan_is_made_again():
    sim = Simulator()
    sim.add("x", max_tokens=1)
    sim.step()
    sim.add("a", prompt=[5] * 9, max_tokens=4)
    sim.add("b", prompt=[5] * 9, max_tokens=4)
    lost = sim.plan()
    assert lost.finished_request_ids == {"x"}
    assert lost.new_requests[1].num_computed_tokens == 8
    sim.lose(lost)
    plan = sim.plan()
    assert plan.finished_request_ids == {"x"}
    assert plan.preempted_request_ids == {"a", "b"}
    assert [entry.num_computed_tokens for entry in plan.new_requests] == [0, 8]
    sim.update(plan)
    wanted = {"prompt": [5] * 9, "max_tokens": 4}
    assert sim.run() == {"x": sim.tokens["x"]} | reference(("a", wanted), ("b", wanted))


def test_a_request_that_lost_its_blocks_in_a_lost_plan_is_reported_again():
    sim = Simulator(blocks=3, block_size=4)
    sim.add("a", prompt=3)
    sim.add("b", prompt=6)
    sim.step()
    sim.step()
    lost = sim.plan()
    assert lost.preempted_request_ids == {"b"}
    assert list(lost.num_scheduled_tokens) == ["a"]
    sim.lose(lost)
    assert sim.plan().preempted_request_ids == {"a", "b"}


def test_what_was_computed_before_a_lost_plan_is_found_again():
    sim = Simulator(block_size=4)
    sim.add("a", prompt=11)
    sim.step()
    sim.step()
    sim.lose(sim.plan())
    assert sim.plan().new_requests[0].num_computed_tokens == 12


def test_plans_may_be_lost_over_and_over():
    sim = Simulator(blocks=4, block_size=4)
    sim.add("a", prompt=7, max_tokens=6)
    sim.add("b", prompt=3, max_tokens=6)
    for i in range(100):
        if not sim.scheduler.has_requests():
            break
        if i % 3 == 2:
            sim.lose(sim.plan())
        else:
            sim.step()
    alone = [("a", {"prompt": list(range(1000, 1007)), "max_tokens": 6})]
    alone += [("b", {"prompt": [2000, 2001, 2002], "max_tokens": 6})]
    assert sim.tokens == reference(*alone)


# Resets


def test_a_reset_forgets_what_was_cached_and_disturbs_no_request():
    sim = Simulator()
    sim.add("a", prompt=[5] * 9, max_tokens=5)
    sim.step()
    sim.scheduler.reset_prefix_cache()
    assert sim.live("a").status is RequestStatus.RUNNING
    sim.add("b", prompt=[5] * 9, max_tokens=5)
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 9}
    wanted = {"prompt": [5] * 9, "max_tokens": 5}
    assert sim.run() == reference(("a", wanted), ("b", wanted))


def test_a_reset_can_have_everything_computed_again():
    sim = Simulator()
    sim.add("a", prompt=9, max_tokens=5)
    sim.add("b", prompt=2, max_tokens=5)
    sim.step()
    plan = sim.plan()
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    assert sim.update(plan) == {}  # that step's results are void
    plan = sim.step()
    assert plan.preempted_request_ids == {"a", "b"}
    assert plan.num_scheduled_tokens == {"a": 10, "b": 3}
    sim.run()
    assert [len(sim.tokens[name]) for name in "ab"] == [5, 5]


# Another policy


def test_another_policy_puts_waiting_requests_in_its_order():
    sim = Simulator(max_num_seqs=1)
    sim.add("a", priority=9)
    sim.step()
    for i, name in enumerate("bcd"):
        sim.add(name, priority=-i)
    sim.scheduler.set_policy(make_policy(Priority))
    sim.abort("a", reason=FinishReason.ABORT)
    order = []
    while sim.scheduler.num_unfinished_requests():
        (entry,) = sim.step().new_requests
        order.append(entry.source.request_id)
        sim.abort(order[-1], reason=FinishReason.ABORT)
    assert order == ["d", "c", "b"]


def test_another_policy_chooses_the_victims():
    sim = Simulator(blocks=2, block_size=4)
    sim.add("a", prompt=3, priority=5)
    sim.add("b", prompt=3, priority=0)
    sim.step()
    sim.step()
    sim.scheduler.set_policy(make_policy(Priority))
    assert sim.step().preempted_request_ids == {"a"}


def test_another_policy_is_given_all_live_requests_in_order_of_arrival():
    class RecordsCalls(FirstComeFirstServed):
        def __init__(self, context):
            super().__init__(context)
            self.calls = []

        def added(self, request):
            self.calls.append(request.request_id)

        def scheduled(self, request, tokens):
            self.calls.append((request.request_id, tokens))

        def finished(self, request):
            self.calls.append(f"end of {request.request_id}")

        def preempted(self, request):
            self.calls.append(f"{request.request_id} preempted")

    sim = Simulator(max_num_seqs=1, context={"gates": Grammars(compiling={"g"})})
    sim.add("a")
    sim.step()
    sim.add("g")
    sim.add("b", max_tokens=1)
    policy = make_policy(RecordsCalls)
    sim.scheduler.set_policy(policy)
    assert policy.calls == ["a", "g", "b"]
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    sim.abort("g", reason=FinishReason.ABORT)
    sim.step()
    assert policy.calls[3:] == ["a preempted", "end of g", ("a", 5)]


def test_no_request_is_lost_when_policies_change_all_the_time():
    sim = Simulator(blocks=8, block_size=4, max_num_seqs=3)
    adds = [(f"r{i}", {"prompt": [i] * (2 + i), "max_tokens": 6}) for i in range(8)]
    policies = [Priority, Fair, FirstComeFirstServed]
    for name, fields in adds:
        sim.add(name, priority=-len(sim.tokens), **fields)
    for i in range(200):
        if not sim.scheduler.has_requests():
            break
        sim.scheduler.set_policy(make_policy(policies[i % 3]))
        sim.step()
    assert sim.tokens == reference(*adds)


def test_a_policy_that_fails_to_take_over_changes_nothing():
    class Broken(FirstComeFirstServed):
        def key(self, request):
            raise ValueError("no key")

    sim = Simulator(max_num_seqs=1)
    for name in "abc":
        sim.add(name)
    sim.step()
    with pytest.raises(ValueError, match="no key"):
        sim.scheduler.set_policy(make_policy(Broken))
    assert len(sim.run()) == 3


# Standing


def test_stats_describe_the_queues():
    sim = Simulator(blocks=8, block_size=4, max_num_seqs=1)
    sim.add("a", prompt=[5] * 9, max_tokens=2)
    sim.add("b", prompt=[5] * 9, max_tokens=2)
    sim.step()
    stats = sim.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.kv_cache_usage == 3 / 8
    sim.run()
    stats = sim.scheduler.stats()
    assert stats.kv_cache_usage == 0
    assert (stats.prefix_cache.queried_tokens, stats.prefix_cache.hit_tokens) == (18, 8)
