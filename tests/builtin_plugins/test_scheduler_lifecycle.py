"""Ends, deadlines, lost plans, resets, and another policy on the way."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import (
    Connector,
    FirstComeFirstServed,
    Grammars,
    Priority,
    Rig,
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
    rig = Rig()
    rig.add("a", max_tokens=2)
    rig.step()
    outputs = rig.update(rig.plan())
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    assert rig.live("a") is None
    assert rig.cache.num_free_blocks == 64
    assert rig.scheduler.num_unfinished_requests() == 0


@pytest.mark.parametrize("own", [True, False])
def test_a_stop_token_ends_it_and_is_named_unless_it_is_the_models_own(own):
    token = next_token([7, 7])
    rig = Rig()
    if own:
        rig.add("a", prompt=[7, 7], eos_token_ids=[token])
    else:
        rig.add("a", prompt=[7, 7], params={"stop_token_ids": [token]})
    output = rig.update(rig.plan())["a"]
    assert output.new_token_ids == [token]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == (None if own else token)


def test_a_fault_ends_one_request_and_no_other():
    rig = Rig()
    rig.add("a")
    rig.add("b")
    plan = rig.plan()
    result = ModelRunnerOutput({"b": [5]}, faults={"a": RequestFault("it broke", "mirostat")})
    outputs = rig.update(plan, result)
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert (outputs["a"].error, outputs["a"].faulty_plugin) == ("it broke", "mirostat")
    assert outputs["b"].new_token_ids == [5]


@pytest.mark.parametrize("when", ["waiting", "running", "preempted", "compiling"])
def test_requests_end_from_outside_wherever_they_stand(when):
    rig = Rig(surroundings={"grammars": Grammars(compiling={"g"})})
    name = "g" if when == "compiling" else "a"
    rig.add(name)
    if when in ("running", "preempted"):
        rig.step()
    if when == "preempted":
        rig.scheduler.reset_prefix_cache(recompute_running=True)
    outputs = rig.abort(name, "nobody", reason=FinishReason.ABORT)
    assert list(outputs) == [name]
    assert outputs[name].finish_reason is FinishReason.ABORT
    assert rig.abort(name, reason=FinishReason.ABORT) == {}
    plan = rig.step()
    assert plan.finished_request_ids == {name}
    assert plan.num_scheduled_tokens == {}
    assert rig.cache.num_free_blocks == 64


def test_all_requests_end_at_once():
    rig = Rig(max_num_seqs=1)
    rig.add("a", client_index=1)
    rig.add("b", client_index=2)
    rig.step()
    outputs = rig.scheduler.finish_requests(None, FinishReason.ABORT)
    assert {client: out.outputs[0].request_id for client, out in outputs.items()} == {
        1: "a",
        2: "b",
    }
    assert rig.scheduler.num_unfinished_requests() == 0


def test_results_of_a_request_that_was_aborted_meanwhile_are_thrown_away():
    rig = Rig()
    rig.add("a")
    plan = rig.plan()
    rig.abort("a", reason=FinishReason.ABORT)
    assert rig.update(plan, ModelRunnerOutput({"a": [1]})) == {}


def test_an_id_can_be_used_again():
    rig = Rig()
    rig.add("a", max_tokens=1, timeout=5.0)
    rig.step()
    rig.ends.clear()
    rig.add("a", max_tokens=2, arrival_time=100.0)
    rig.clock.advance(50)  # the deadline of the first one is not that of the second
    plan = rig.step()
    assert plan.finished_request_ids == {"a"}
    assert [entry.source.request_id for entry in plan.new_requests] == ["a"]
    assert len(rig.run()["a"]) == 2


# Deadlines


@pytest.mark.parametrize("when", ["waiting", "running", "compiling", "loading"])
def test_a_deadline_ends_a_request_wherever_it_stands(when):
    rig = Rig(
        max_num_seqs=1,
        surroundings={
            "grammars": Grammars(compiling={"g"}),
            "connector": Connector(a=(3, True)) if when == "loading" else Connector(),
        },
    )
    if when == "waiting":
        rig.add("z")
    name = "g" if when == "compiling" else "a"
    rig.add(name, arrival_time=10.0, timeout=5.0)
    rig.clock.now = 14.9
    rig.step()
    assert rig.live(name) is not None
    rig.clock.now = 15.0
    plan = rig.plan()
    assert name not in plan.num_scheduled_tokens
    assert plan.finished_request_ids == {name}
    assert rig.records[-1].timed_out == [name]
    assert rig.live(name) is None
    outputs = rig.update(plan)  # the next update tells
    assert outputs[name].finish_reason is FinishReason.TIMEOUT
    assert str(outputs[name].finish_reason) == "timeout"
    rig.step()
    assert rig.records[-1].timed_out == []


def test_a_deadline_is_told_also_when_the_plan_was_lost():
    rig = Rig()
    rig.add("a", arrival_time=0.0, timeout=1.0)
    rig.clock.advance(2)
    rig.scheduler.plan_lost(rig.plan())
    plan = rig.plan()
    assert plan.finished_request_ids == {"a"}
    assert rig.update(plan)["a"].finish_reason is FinishReason.TIMEOUT


def test_deadlines_of_many_ended_requests_take_no_memory():
    rig = Rig(blocks=500)
    for i in range(400):
        rig.add(str(i), max_tokens=1, prompt=1, timeout=1e6)
        rig.step()
    assert len(rig.scheduler._tracker._deadlines) <= 70


# Lost plans


def test_a_lost_plan_is_made_again():
    rig = Rig()
    rig.add("x", max_tokens=1)
    rig.step()
    rig.add("a", prompt=[5] * 9, max_tokens=4)
    rig.add("b", prompt=[5] * 9, max_tokens=4)
    lost = rig.plan()
    assert lost.finished_request_ids == {"x"}
    assert lost.new_requests[1].num_computed_tokens == 8
    rig.scheduler.plan_lost(lost)
    plan = rig.plan()
    assert plan.finished_request_ids == {"x"}
    assert plan.preempted_request_ids == {"a", "b"}
    assert [entry.num_computed_tokens for entry in plan.new_requests] == [0, 8]
    rig.update(plan)
    wanted = {"prompt": [5] * 9, "max_tokens": 4}
    assert rig.run() == {"x": rig.tokens["x"]} | reference(("a", wanted), ("b", wanted))


def test_who_lost_its_blocks_in_a_lost_plan_is_told_again():
    rig = Rig(blocks=3, block_size=4)
    rig.add("a", prompt=3)
    rig.add("b", prompt=6)
    rig.step()
    rig.step()
    lost = rig.plan()
    assert lost.preempted_request_ids == {"b"}
    assert list(lost.num_scheduled_tokens) == ["a"]
    rig.scheduler.plan_lost(lost)
    assert rig.plan().preempted_request_ids == {"a", "b"}


def test_what_was_computed_before_a_lost_plan_is_found_again():
    rig = Rig(block_size=4)
    rig.add("a", prompt=11)
    rig.step()
    rig.step()
    rig.scheduler.plan_lost(rig.plan())
    assert rig.plan().new_requests[0].num_computed_tokens == 12


def test_plans_may_be_lost_over_and_over():
    rig = Rig(blocks=4, block_size=4)
    rig.add("a", prompt=7, max_tokens=6)
    rig.add("b", prompt=3, max_tokens=6)
    for i in range(100):
        if not rig.scheduler.has_requests():
            break
        if i % 3 == 2:
            rig.scheduler.plan_lost(rig.plan())
        else:
            rig.step()
    alone = [("a", {"prompt": list(range(1000, 1007)), "max_tokens": 6})]
    alone += [("b", {"prompt": [2000, 2001, 2002], "max_tokens": 6})]
    assert rig.tokens == reference(*alone)


# Resets


def test_a_reset_forgets_what_was_cached_and_disturbs_nobody():
    rig = Rig()
    rig.add("a", prompt=[5] * 9, max_tokens=5)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    assert rig.live("a").status is RequestStatus.RUNNING
    rig.add("b", prompt=[5] * 9, max_tokens=5)
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 9}
    wanted = {"prompt": [5] * 9, "max_tokens": 5}
    assert rig.run() == reference(("a", wanted), ("b", wanted))


def test_a_reset_can_have_everything_computed_anew():
    rig = Rig()
    rig.add("a", prompt=9, max_tokens=5)
    rig.add("b", prompt=2, max_tokens=5)
    rig.step()
    plan = rig.plan()
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    assert rig.update(plan) == {}  # that step's results are void
    plan = rig.step()
    assert plan.preempted_request_ids == {"a", "b"}
    assert plan.num_scheduled_tokens == {"a": 10, "b": 3}
    rig.run()
    assert [len(rig.tokens[name]) for name in "ab"] == [5, 5]


# Another policy


def test_another_policy_puts_those_who_wait_in_its_order():
    rig = Rig(max_num_seqs=1)
    rig.add("a", priority=9)
    rig.step()
    for i, name in enumerate("bcd"):
        rig.add(name, priority=-i)
    rig.scheduler.set_policy(make_policy(Priority))
    rig.abort("a", reason=FinishReason.ABORT)
    order = []
    while rig.scheduler.num_unfinished_requests():
        (entry,) = rig.step().new_requests
        order.append(entry.source.request_id)
        rig.abort(order[-1], reason=FinishReason.ABORT)
    assert order == ["d", "c", "b"]


def test_another_policy_chooses_the_victims():
    rig = Rig(blocks=2, block_size=4)
    rig.add("a", prompt=3, priority=5)
    rig.add("b", prompt=3, priority=0)
    rig.step()
    rig.step()
    rig.scheduler.set_policy(make_policy(Priority))
    assert rig.step().preempted_request_ids == {"a"}


def test_another_policy_is_told_of_all_that_live_in_order_of_arrival():
    class Listens(FirstComeFirstServed):
        def __init__(self, context):
            super().__init__(context)
            self.heard = []

        def added(self, request):
            self.heard.append(request.request_id)

        def scheduled(self, request, tokens):
            self.heard.append((request.request_id, tokens))

        def finished(self, request):
            self.heard.append(f"end of {request.request_id}")

        def preempted(self, request):
            self.heard.append(f"{request.request_id} preempted")

    rig = Rig(max_num_seqs=1, surroundings={"grammars": Grammars(compiling={"g"})})
    rig.add("a")
    rig.step()
    rig.add("g")
    rig.add("b", max_tokens=1)
    policy = make_policy(Listens)
    rig.scheduler.set_policy(policy)
    assert policy.heard == ["a", "g", "b"]
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    rig.abort("g", reason=FinishReason.ABORT)
    rig.step()
    assert policy.heard[3:] == ["a preempted", "end of g", ("a", 5)]


def test_nobody_is_lost_when_policies_change_all_the_time():
    rig = Rig(blocks=8, block_size=4, max_num_seqs=3)
    adds = [(f"r{i}", {"prompt": [i] * (2 + i), "max_tokens": 6}) for i in range(8)]
    policies = [Priority, Fair, FirstComeFirstServed]
    for name, fields in adds:
        rig.add(name, priority=-len(rig.tokens), **fields)
    for i in range(200):
        if not rig.scheduler.has_requests():
            break
        rig.scheduler.set_policy(make_policy(policies[i % 3]))
        rig.step()
    assert rig.tokens == reference(*adds)


def test_a_policy_that_fails_to_take_over_changes_nothing():
    class Broken(FirstComeFirstServed):
        def key(self, request):
            raise ValueError("no key")

    rig = Rig(max_num_seqs=1)
    for name in "abc":
        rig.add(name)
    rig.step()
    with pytest.raises(ValueError, match="no key"):
        rig.scheduler.set_policy(make_policy(Broken))
    assert len(rig.run()) == 3


# Standing


def test_stats_say_how_it_stands():
    rig = Rig(blocks=8, block_size=4, max_num_seqs=1)
    rig.add("a", prompt=[5] * 9, max_tokens=2)
    rig.add("b", prompt=[5] * 9, max_tokens=2)
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.kv_cache_usage == 3 / 8
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.kv_cache_usage == 0
    assert (stats.prefix_cache.queried_tokens, stats.prefix_cache.hit_tokens) == (18, 8)
