"""Requests that a pause holds, and requests that continue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import Connector, HoldsBack, Simulator, admitted, reference
from support.searching import examples

from hardpoint.plugins import FinishReason, PauseState, WaitingFor

NEW, ALL, NONE = PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, PauseState.UNPAUSED


class TestPausedAll:
    def test_no_request_gets_tokens_and_nothing_is_to_do(self):
        sim = Simulator()
        sim.add("runs")
        sim.step()
        sim.add("waits")
        sim.scheduler.set_pause(ALL)
        assert not sim.scheduler.has_requests()
        assert sim.scheduler.num_unfinished_requests() == 2
        assert sim.plan().num_scheduled_tokens == {}
        assert sim.why("runs").waiting_for is WaitingFor.PAUSED
        assert sim.why("waits").message == "the engine is paused"

    def test_requests_go_on_as_if_nothing_had_been(self):
        sim = Simulator()
        for name in ("a", "b"):
            sim.add(name, prompt=[1, 2, 3, len(name)], max_tokens=6)
        sim.step()
        sim.step()
        sim.scheduler.set_pause(ALL)
        sim.step()
        sim.scheduler.set_pause(NONE)
        assert sim.scheduler.has_requests()
        alone = reference(("a", {"prompt": [1, 2, 3, 1], "max_tokens": 6}))
        assert sim.run()["a"] == alone["a"]

    def test_kept_requests_whose_blocks_are_taken_are_computed_again(self):
        sim = Simulator()
        sim.add("a", prompt=[1] * 9, max_tokens=6)
        sim.step()
        sim.step()
        sim.scheduler.set_pause(ALL)
        sim.scheduler.reset_prefix_cache(recompute_running=True)
        assert sim.cache.num_free_blocks == sim.cache.num_usable_blocks
        assert not sim.scheduler.has_requests()
        sim.scheduler.set_pause(NONE)
        assert sim.run() == reference(("a", {"prompt": [1] * 9, "max_tokens": 6}))

    def test_aborted_requests_are_still_reported(self):
        sim = Simulator()
        sim.add("a")
        sim.step()
        sim.scheduler.set_pause(ALL)
        sim.abort("a", reason=FinishReason.ABORT)
        assert sim.scheduler.has_requests()
        assert sim.step().finished_request_ids == {"a"}
        assert not sim.scheduler.has_requests()

    def test_a_deadline_passes_during_a_pause(self):
        sim = Simulator()
        sim.add("a", timeout=5.0, arrival_time=0.0)
        sim.step()
        sim.scheduler.set_pause(ALL)
        assert not sim.scheduler.has_requests()
        sim.clock.advance(100.0)
        assert sim.scheduler.has_requests()
        sim.step()
        assert sim.ends["a"].finish_reason is FinishReason.TIMEOUT


class TestPausedNew:
    def test_a_request_that_runs_ends_and_one_that_came_later_waits(self):
        sim = Simulator()
        sim.add("old", max_tokens=3)
        sim.step()
        sim.scheduler.set_pause(NEW)
        sim.add("new", max_tokens=3)
        assert sim.why("new").waiting_for is WaitingFor.PAUSED
        while sim.scheduler.has_requests():
            assert "new" not in sim.step().num_scheduled_tokens
        assert set(sim.ends) == {"old"}
        assert sim.scheduler.num_unfinished_requests() == 1
        sim.scheduler.set_pause(NONE)
        sim.run()
        assert set(sim.ends) == {"old", "new"}

    def test_a_request_that_waited_before_the_pause_and_never_ran_waits_on(self):
        sim = Simulator(max_num_seqs=1)
        sim.add("first", max_tokens=2)
        sim.add("second", max_tokens=2)
        sim.step()
        sim.scheduler.set_pause(NEW)
        while sim.scheduler.has_requests():
            sim.step()
        assert set(sim.ends) == {"first"}

    def test_a_preempted_request_comes_back_though_new_ones_are_before_it(self):
        sim = Simulator(blocks=9)
        sim.add("a", prompt=4, max_tokens=16)
        sim.add("b", prompt=4, max_tokens=16)
        sim.step()
        sim.scheduler.set_pause(NEW)
        sim.add("new", max_tokens=2, priority=-1)
        while sim.scheduler.has_requests():
            sim.step()
        assert sim.scheduler.stats().num_preemptions > 0
        assert set(sim.ends) == {"a", "b"}
        assert sim.scheduler.stats().num_waiting == 1

    def test_the_policy_cannot_keep_a_pause_from_its_end(self):
        sim = Simulator(blocks=9, policy=HoldsBack)
        tags = {}
        sim.add("a", prompt=4, max_tokens=16, tags=tags)
        sim.add("b", prompt=4, max_tokens=16, tags=tags)
        sim.step()
        tags["hold"] = "not now"
        sim.scheduler.set_pause(NEW)
        for _ in range(100):
            if not sim.scheduler.has_requests():
                break
            sim.step()
        assert set(sim.ends) == {"a", "b"}

    def test_what_loads_between_steps_is_waited_for_and_computed(self):
        sim = Simulator(context={"transfers": Connector(a=(8, True))})
        sim.add("a", prompt=12, max_tokens=2)
        sim.step()
        sim.scheduler.set_pause(NEW)
        assert sim.scheduler.has_requests()
        request = sim.live("a")
        sim.executor.fill(request, sim.cache.block_ids(request), 8)
        sim.step(kv_loaded=frozenset({"a"}))
        while sim.scheduler.has_requests():
            sim.step()
        assert set(sim.ends) == {"a"}

    def test_a_step_record_shows_that_the_pause_stopped_admission(self):
        sim = Simulator()
        sim.scheduler.set_pause(NEW)
        sim.add("a")
        plan = sim.plan()
        assert admitted(plan) == []
        assert sim.records[-1].admission_stopped.waiting_for is WaitingFor.PAUSED


@examples(8)
@given(
    states=st.lists(st.sampled_from([NEW, ALL, NONE]), min_size=1, max_size=12),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    reset=st.booleans(),
)
def test_pauses_change_no_token(states, steps, reset):
    jobs = [(f"r{i}", {"prompt": [i + 1] * (3 + i), "max_tokens": 5 + i}) for i in range(5)]
    sim = Simulator(blocks=14, max_num_seqs=3)
    for i, state in enumerate(states):
        if i < len(jobs):
            sim.add(jobs[i][0], **jobs[i][1])
        sim.scheduler.set_pause(state)
        if reset and state is ALL:
            sim.scheduler.reset_prefix_cache(recompute_running=True)
        for _ in range(steps[i % len(steps)]):
            sim.step()
    for name, fields in jobs[len(states) :]:
        sim.add(name, **fields)
    sim.scheduler.set_pause(NONE)
    assert sim.run() == reference(*jobs)
