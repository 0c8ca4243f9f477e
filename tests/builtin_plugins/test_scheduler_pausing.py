"""What a pause holds, and what goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import Connector, HoldsBack, Rig, admitted, reference
from support.searching import examples

from hardpoint.plugins import FinishReason, PauseState, WaitingFor

NEW, ALL, NONE = PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, PauseState.UNPAUSED


class TestPausedAll:
    def test_nobody_gets_tokens_and_nothing_is_to_do(self):
        rig = Rig()
        rig.add("runs")
        rig.step()
        rig.add("waits")
        rig.scheduler.set_pause(ALL)
        assert not rig.scheduler.has_requests()
        assert rig.scheduler.num_unfinished_requests() == 2
        assert rig.plan().num_scheduled_tokens == {}
        assert rig.why("runs").waiting_for is WaitingFor.PAUSED
        assert rig.why("waits").message == "the engine is paused"

    def test_requests_go_on_as_if_nothing_had_been(self):
        rig = Rig()
        for name in ("a", "b"):
            rig.add(name, prompt=[1, 2, 3, len(name)], max_tokens=6)
        rig.step()
        rig.step()
        rig.scheduler.set_pause(ALL)
        rig.step()
        rig.scheduler.set_pause(NONE)
        assert rig.scheduler.has_requests()
        alone = reference(("a", {"prompt": [1, 2, 3, 1], "max_tokens": 6}))
        assert rig.run()["a"] == alone["a"]

    def test_kept_requests_whose_blocks_are_taken_are_computed_anew(self):
        rig = Rig()
        rig.add("a", prompt=[1] * 9, max_tokens=6)
        rig.step()
        rig.step()
        rig.scheduler.set_pause(ALL)
        rig.scheduler.reset_prefix_cache(recompute_running=True)
        assert rig.cache.num_free_blocks == rig.cache.num_usable_blocks
        assert not rig.scheduler.has_requests()
        rig.scheduler.set_pause(NONE)
        assert rig.run() == reference(("a", {"prompt": [1] * 9, "max_tokens": 6}))

    def test_aborted_requests_are_still_told(self):
        rig = Rig()
        rig.add("a")
        rig.step()
        rig.scheduler.set_pause(ALL)
        rig.abort("a", reason=FinishReason.ABORT)
        assert rig.scheduler.has_requests()
        assert rig.step().finished_request_ids == {"a"}
        assert not rig.scheduler.has_requests()

    def test_a_deadline_passes_during_a_pause(self):
        rig = Rig()
        rig.add("a", timeout=5.0, arrival_time=0.0)
        rig.step()
        rig.scheduler.set_pause(ALL)
        assert not rig.scheduler.has_requests()
        rig.clock.advance(100.0)
        assert rig.scheduler.has_requests()
        rig.step()
        assert rig.ends["a"].finish_reason is FinishReason.TIMEOUT


class TestPausedNew:
    def test_who_runs_ends_and_who_came_later_waits(self):
        rig = Rig()
        rig.add("old", max_tokens=3)
        rig.step()
        rig.scheduler.set_pause(NEW)
        rig.add("new", max_tokens=3)
        assert rig.why("new").waiting_for is WaitingFor.PAUSED
        while rig.scheduler.has_requests():
            assert "new" not in rig.step().num_scheduled_tokens
        assert set(rig.ends) == {"old"}
        assert rig.scheduler.num_unfinished_requests() == 1
        rig.scheduler.set_pause(NONE)
        rig.run()
        assert set(rig.ends) == {"old", "new"}

    def test_who_waited_before_the_pause_and_never_ran_waits_on(self):
        rig = Rig(max_num_seqs=1)
        rig.add("first", max_tokens=2)
        rig.add("second", max_tokens=2)
        rig.step()
        rig.scheduler.set_pause(NEW)
        while rig.scheduler.has_requests():
            rig.step()
        assert set(rig.ends) == {"first"}

    def test_a_preempted_request_comes_back_though_new_ones_are_before_it(self):
        rig = Rig(blocks=9)
        rig.add("a", prompt=4, max_tokens=16)
        rig.add("b", prompt=4, max_tokens=16)
        rig.step()
        rig.scheduler.set_pause(NEW)
        rig.add("new", max_tokens=2, priority=-1)
        while rig.scheduler.has_requests():
            rig.step()
        assert rig.scheduler.stats().num_preemptions > 0
        assert set(rig.ends) == {"a", "b"}
        assert rig.scheduler.stats().num_waiting == 1

    def test_the_policy_cannot_keep_a_pause_from_its_end(self):
        rig = Rig(blocks=9, policy=HoldsBack)
        tags = {}
        rig.add("a", prompt=4, max_tokens=16, tags=tags)
        rig.add("b", prompt=4, max_tokens=16, tags=tags)
        rig.step()
        tags["hold"] = "not now"
        rig.scheduler.set_pause(NEW)
        for _ in range(100):
            if not rig.scheduler.has_requests():
                break
            rig.step()
        assert set(rig.ends) == {"a", "b"}

    def test_what_loads_beside_the_steps_is_waited_for_and_computed(self):
        rig = Rig(surroundings={"connector": Connector(a=(8, True))})
        rig.add("a", prompt=12, max_tokens=2)
        rig.step()
        rig.scheduler.set_pause(NEW)
        assert rig.scheduler.has_requests()
        request = rig.live("a")
        rig.executor.fill(request, rig.cache.block_ids(request), 8)
        rig.step(kv_loaded=frozenset({"a"}))
        while rig.scheduler.has_requests():
            rig.step()
        assert set(rig.ends) == {"a"}

    def test_a_step_record_says_that_the_pause_stopped_admission(self):
        rig = Rig()
        rig.scheduler.set_pause(NEW)
        rig.add("a")
        plan = rig.plan()
        assert admitted(plan) == []
        assert rig.records[-1].admission_stopped.waiting_for is WaitingFor.PAUSED


@examples(60)
@given(
    states=st.lists(st.sampled_from([NEW, ALL, NONE]), min_size=1, max_size=12),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    reset=st.booleans(),
)
def test_pauses_change_no_token(states, steps, reset):
    jobs = [(f"r{i}", {"prompt": [i + 1] * (3 + i), "max_tokens": 5 + i}) for i in range(5)]
    rig = Rig(blocks=14, max_num_seqs=3)
    for i, state in enumerate(states):
        if i < len(jobs):
            rig.add(jobs[i][0], **jobs[i][1])
        rig.scheduler.set_pause(state)
        if reset and state is ALL:
            rig.scheduler.reset_prefix_cache(recompute_running=True)
        for _ in range(steps[i % len(steps)]):
            rig.step()
    for name, fields in jobs[len(states) :]:
        rig.add(name, **fields)
    rig.scheduler.set_pause(NONE)
    assert rig.run() == reference(*jobs)
