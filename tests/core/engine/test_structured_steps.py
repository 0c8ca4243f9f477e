"""Steps with grammars and with drafts: what is asked of whom, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core.engine_harness import Rig, ScriptedExecutor, expected, interrupt_of_user
from support.searching import examples

from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.core.engine.batch_queue import Batch, BatchQueue
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import EngineHalf, GrammarBitmask, SchedulerOutput


class Masks(EngineHalf):
    """Constrains those whose id begins with "g", and notes when it is asked in the same list.

    Attributes:
        gives: whether it has a bitmask at all.
    """

    def __init__(self, executor):
        self.executor = executor
        self.gives = True
        self.scheduler = None
        self.running = []

    def uses(self, request):
        return request.request_id.startswith("g")

    def needs_results(self, plan):
        return [name for name in plan.num_scheduled_tokens if name.startswith("g")]

    def mask(self, plan):
        if not (names := self.needs_results(plan)):
            return None
        self.executor.calls.append(("bitmask", plan.step))
        self.running.append(len(self.executor.pending))
        for name in names:
            live = self.scheduler.live_request(name)
            on_their_way = 0 if live is None else live.num_output_placeholders
            assert on_their_way <= 1, "it has not seen the tokens of an earlier step"
        if not self.gives:
            return None
        drafts = plan.draft_token_ids
        rows = [name for name in names for _ in range(1 + len(drafts.get(name, ())))]
        return GrammarBitmask(rows, np.full((len(rows), 2048), -1, np.int32))


class Watched(DefaultScheduler):
    """Notes results that are taken among the executor's calls."""

    contract = 1
    calls = None

    def update(self, plan, result):
        self.calls.append(("update", plan.step))
        return super().update(plan, result)

    def update_drafts(self, draft_token_ids):
        self.calls.append(("update_drafts", dict(draft_token_ids)))
        super().update_drafts(draft_token_ids)


def rig_of(executor=None, scheduler=Watched, half=Masks, **limits):
    executor = executor or ScriptedExecutor()
    masks = half(executor)
    rig = Rig(executor, scheduler=scheduler, half=masks, **limits)
    rig.scheduler.calls = executor.calls
    masks.scheduler = rig.scheduler
    rig.masks = masks
    return rig


def pipeline(depth=2, **settings):
    return rig_of(ScriptedExecutor(depth), **settings)


class TestPlainStep:
    def test_the_bitmask_is_made_while_the_model_runs(self):
        executor = ScriptedExecutor(late=True)
        executor.patient = True
        rig = rig_of(executor)
        rig.add("g", max_tokens=2)
        rig.step()
        assert executor.calls == [("execute", 1), ("bitmask", 1), ("sample", 1), ("update", 1)]
        assert rig.masks.running == [1]
        plan, bitmask = executor.sampled[1]
        assert (list(plan.num_scheduled_tokens), bitmask.request_ids) == (["g"], ["g"])
        assert bitmask.bitmask.shape == (1, 2048)
        assert rig.run()["g"] == expected([1, 2, 3], 2)

    def test_who_is_in_no_grammar_costs_nothing(self):
        rig = rig_of()
        rig.add("a", max_tokens=2)
        rig.run()
        assert not any(call[0] == "bitmask" for call in rig.executor.calls)
        assert [bitmask for _, bitmask in rig.executor.sampled.values()] == [None, None]

    def test_grammars_may_allow_everything(self):
        rig = rig_of()
        rig.masks.gives = False
        rig.add("g", max_tokens=1)
        rig.step()
        assert rig.executor.sampled[1][1] is None

    def test_a_bitmask_that_fails_fails_the_step(self):
        rig = rig_of()
        rig.masks.mask = lambda plan: 1 / 0
        rig.add("g", max_tokens=2)
        with pytest.raises(PluginFaultError, match=r"its mask\(\) failed: ZeroDivisionError"):
            rig.step()
        del rig.masks.mask
        assert rig.run()["g"] == expected([1, 2, 3], 2)


class TestPipeline:
    def test_nothing_is_deferred_where_nothing_is_under_way(self):
        rig = pipeline()
        rig.executor.late = True
        rig.add("g", max_tokens=4)
        assert rig.core.step() == ({}, True)
        assert rig.executor.calls == [("execute", 1), ("bitmask", 1), ("sample", 1)]

    def test_the_batch_before_comes_first_where_a_grammar_waits_for_it(self):
        executor = ScriptedExecutor(2, late=True)
        executor.patient = True
        rig = rig_of(executor)
        rig.add("g", max_tokens=3)
        rig.step()
        del executor.calls[:]
        assert rig.step() is True
        assert executor.calls == [("execute", 2), ("update", 1), ("bitmask", 2), ("sample", 2)]
        assert rig.tokens["g"] == expected([1, 2, 3], 1)
        assert rig.run()["g"] == expected([1, 2, 3], 3)

    def test_what_others_wait_for_is_of_no_concern(self):
        queue = BatchQueue(3)
        queue.push(Batch.lost(SchedulerOutput(step=1, num_scheduled_tokens={"a": 1, "g": 1})))
        plans = [
            (SchedulerOutput(step=2, num_scheduled_tokens={"a": 1}), []),
            (SchedulerOutput(step=2, num_scheduled_tokens={"gg": 1}), ["gg"]),
            (SchedulerOutput(step=2, num_scheduled_tokens={"gg": 1, "g": 1}), ["gg", "g"]),
        ]
        assert [queue.delays(plan, names) for plan, names in plans] == [[], [], ["g"]]

    def test_while_one_is_deferred_no_other_is_started(self):
        executor = ScriptedExecutor(4, late=True)
        executor.patient = True
        rig = rig_of(executor, max_num_batched_tokens=4)
        rig.add("g", prompt=range(8), max_tokens=4)
        for _ in range(40):
            if not rig.core.has_requests():
                break
            rig.step()
        assert rig.tokens["g"] == expected(range(8), 4)
        order = [call for call in executor.calls if call[0] in ("execute", "sample")]
        steps = [step for what, step in order if what == "sample"]
        for step in steps:
            after = order[order.index(("execute", step)) + 1]
            assert after == ("sample", step)

    def test_a_failure_before_it_does_not_lose_the_deferred_one(self):
        rig = pipeline()
        rig.executor.late = rig.executor.patient = True
        rig.executor.fail_at[1] = interrupt_of_user()
        rig.add("g", max_tokens=3)
        rig.add("b", prompt=[7], max_tokens=3)
        rig.step()
        with pytest.raises(KeyboardInterrupt):
            rig.step()
        assert ("sample", 2) not in rig.executor.calls
        assert rig.run() == {"g": expected([1, 2, 3], 3), "b": expected([7], 3)}
        assert ("sample", 2) in rig.executor.calls

    def test_a_sampling_that_gives_nothing_raises_what_the_forward_pass_did(self):
        rig = pipeline()
        original = ValueError("CUDA error: out of memory")
        sample = rig.executor.sample_tokens

        def nothing(plan, bitmask=None):
            rig.executor.fail_at.clear()
            future = sample(plan, bitmask)
            future._result = None
            return future

        rig.executor.sample_tokens = nothing
        rig.executor.fail_at[1] = original
        rig.add("g", max_tokens=3)
        with pytest.raises(ValueError, match="out of memory") as caught:
            rig.run()
        assert caught.value is original


class Drafting(Masks):
    """Drafts what `guesses` has, and notes in the same list when it is asked."""

    num_draft_tokens = 2

    def __init__(self, executor):
        super().__init__(executor)
        self.guesses = {}

    def uses(self, request):
        return True

    def drafts(self):
        self.executor.calls.append(("drafts",))
        return self.guesses


class TestDrafts:
    def rig(self, executor=None, **limits):
        return rig_of(executor, half=Drafting, num_draft_tokens=2, **limits)

    def test_the_scheduler_gets_them_after_the_results(self):
        rig = self.rig()
        rig.add("a", max_tokens=5)
        first, second, third = expected([1, 2, 3], 3)
        rig.masks.guesses = {"a": [second, third + 1]}
        rig.step()
        assert rig.executor.calls == [
            ("execute", 1),
            ("sample", 1),
            ("update", 1),
            ("drafts",),
            ("update_drafts", {"a": [second, third + 1]}),
        ]
        rig.masks.guesses = {}
        rig.step()
        plan, _ = rig.executor.sampled[2]
        assert plan.draft_token_ids == {"a": [second, third + 1]}
        assert rig.tokens["a"] == [first, second, third]  # one draft was right
        assert rig.executor.calls[-2:] == [("drafts",), ("update_drafts", {})]
        assert rig.run()["a"] == expected([1, 2, 3], 5)

    def test_a_step_that_computes_nothing_has_none(self):
        rig = self.rig()
        rig.add("a", max_tokens=1)
        rig.step()
        asked = rig.executor.calls.count(("drafts",))
        assert rig.step() is False
        assert rig.executor.calls.count(("drafts",)) == asked == 1

    @pytest.mark.parametrize("depth", [1, 2])
    def test_without_speculation_nobody_is_asked(self, depth):
        rig = rig_of(ScriptedExecutor(depth), half=Drafting)
        assert rig.limits.asynchronous is (depth > 1)
        rig.add("a", max_tokens=4)
        rig.run()
        assert ("drafts",) not in rig.executor.calls

    def test_a_pipeline_that_does_not_plan_ahead_hands_them_on_too(self):
        rig = self.rig(ScriptedExecutor(2), asynchronous=False)
        rig.add("a", max_tokens=2)
        rig.masks.guesses = {"a": [7, 7]}
        rig.step()
        assert rig.executor.calls[-1] == ("update_drafts", {"a": [7, 7]})
        rig.masks.guesses = {}
        assert rig.run()["a"] == expected([1, 2, 3], 2)


@examples(40)
@given(
    depth=st.integers(2, 4),
    lengths=st.lists(
        st.tuples(st.sampled_from("gr"), st.integers(1, 9), st.integers(1, 9)),
        min_size=1,
        max_size=6,
    ),
    pattern=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_a_pipeline_with_grammars_gives_what_a_plain_engine_gives(depth, lengths, pattern):
    executor = ScriptedExecutor(depth, late=True)
    executor.patient = True
    rig = rig_of(executor, max_num_batched_tokens=16, blocks=20)
    jobs = {
        f"{kind}{i}": ([100 * i + k for k in range(prompt)], count)
        for i, (kind, prompt, count) in enumerate(lengths)
    }
    for turn, (name, (prompt, count)) in enumerate(jobs.items()):
        rig.add(name, prompt=prompt, max_tokens=count)
        for _ in range(pattern[turn % len(pattern)]):
            rig.step()
    assert rig.run() == {name: expected(prompt, count) for name, (prompt, count) in jobs.items()}
    assert executor.rows == {}
