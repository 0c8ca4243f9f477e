"""The step of executors that are pipelines, with steps that are done when a test ends them."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core.engine_harness import Rig, ScriptedExecutor, expected, interrupt_of_user
from support.searching import examples

from hardpoint.core.engine.batch_queue import Batch, BatchQueue, start_batch
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput

PLAN = SchedulerOutput(step=1, total_num_scheduled_tokens=3)


def done(result=None, error=None):
    future = Future()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future


def pipeline(depth=2, **settings):
    return Rig(ScriptedExecutor(depth, late=True), **settings)


class TestBatch:
    def test_sampling_has_the_result(self):
        output = ModelRunnerOutput()
        assert Batch(PLAN, done(None), done(output)).result("the executor") is output

    def test_a_forward_pass_that_gives_a_result_needs_no_sampling(self):
        output = ModelRunnerOutput()
        batch = Batch(PLAN, done(output), done(error=RuntimeError("nothing to sample")))
        assert batch.result("the executor") is output

    def test_the_error_of_the_forward_pass_is_the_one_that_is_raised(self):
        original = ValueError("out of memory")
        batch = Batch(PLAN, done(error=original), done(error=RuntimeError("no forward pass")))
        with pytest.raises(ValueError, match="out of memory") as caught:
            batch.result("the executor")
        assert caught.value is original

    def test_an_error_of_sampling_alone_is_raised(self):
        with pytest.raises(RuntimeError, match="sampler broke"):
            Batch(PLAN, done(None), done(error=RuntimeError("sampler broke"))).result(
                "the executor"
            )

    @pytest.mark.parametrize("sampling", [None, done(None)])
    def test_no_result_at_all_is_an_error(self, sampling):
        with pytest.raises(PluginFaultError, match="executor: it returned no result for step 1"):
            Batch(PLAN, done(None), sampling).result("the executor")

    def test_it_is_done_when_both_are(self):
        forward, sampling = Future(), Future()
        batch = Batch(PLAN, forward, sampling)
        assert not batch.done
        forward.set_result(None)
        assert not batch.done
        sampling.set_result(ModelRunnerOutput())
        assert batch.done

    def test_a_plan_without_tokens_samples_nothing(self):
        output = ModelRunnerOutput()
        batch = start_batch(SchedulerOutput(step=2), lambda _: done(output), pytest.fail)
        assert batch.sampling is None
        assert batch.result("the executor") is output

    def test_what_fails_at_the_start_fails_when_its_turn_comes(self):
        def broken(plan):
            raise OSError(f"no worker for step {plan.step}")

        batch = start_batch(PLAN, broken, lambda _: Future())
        with pytest.raises(OSError, match="no worker for step 1"):
            batch.result("the executor")


class TestBatchQueue:
    def test_a_full_queue_takes_no_more(self):
        queue = BatchQueue(2)
        queue.push(Batch(PLAN, Future(), None))
        queue.push(Batch(PLAN, Future(), None))
        with pytest.raises(RuntimeError, match="2 batches are under way, the queue has no room"):
            queue.push(Batch(PLAN, Future(), None))
        assert len(queue.batches) == 2

    def test_there_is_time_while_it_has_room_and_the_oldest_is_not_done(self):
        queue, oldest = BatchQueue(2), Future()
        queue.push(Batch(PLAN, oldest, None))
        assert queue.can_start_another
        oldest.set_result(None)
        assert not queue.can_start_another
        queue.pop()
        queue.push(Batch(PLAN, Future(), None))
        queue.push(Batch(PLAN, Future(), None))
        assert not queue.can_start_another


class TestStep:
    def test_the_variant_is_chosen_at_the_start(self):
        plain, piped = Rig(ScriptedExecutor(1)), pipeline()
        assert plain.core.step.__name__ == "step"
        assert piped.core.step.__name__ == "step_with_batch_queue"

    def test_without_work_nothing_is_called(self):
        rig = pipeline()
        assert rig.core.step() == ({}, False)
        assert rig.executor.calls == []

    def test_filling_comes_before_draining(self):
        rig = pipeline()
        rig.add("a", max_tokens=8)
        assert rig.core.step() == ({}, True)
        assert rig.executor.calls == [("execute", 1), ("sample", 1)]
        rig.executor.finish(1)
        # The oldest is done, yet the next one is started first.
        assert rig.step() is True
        assert ("execute", 2) in rig.executor.calls
        assert rig.tokens["a"] == expected([1, 2, 3], 1)

    def test_sampling_is_asked_for_before_the_forward_pass_is_done(self):
        rig = pipeline()
        rig.add("a")
        rig.step()
        assert ("sample", 1) in rig.executor.calls
        assert len(rig.executor.pending) == 2

    def test_a_full_queue_waits_for_the_oldest(self):
        rig = pipeline()
        rig.add("a", max_tokens=8)
        rig.step()
        waited = threading.Event()

        def finish_late():
            waited.set()
            time.sleep(0.05)
            rig.executor.finish(1)

        thread = threading.Thread(target=finish_late)
        thread.start()
        assert rig.step() is True
        thread.join()
        assert waited.is_set()
        assert rig.tokens["a"] == expected([1, 2, 3], 1)

    def test_results_that_come_out_of_order_are_taken_in_order(self):
        rig = pipeline(3, max_num_seqs=1)
        rig.add("a", max_tokens=8)
        rig.step()
        rig.step()
        rig.executor.finish(2)
        assert rig.tokens == {}
        threading.Timer(0.05, lambda: rig.executor.finish(1)).start()
        rig.step()  # the queue is full now
        assert rig.tokens["a"] == expected([1, 2, 3], 1)
        threading.Timer(0.05, lambda: rig.executor.finish(3)).start()
        rig.executor.late = False
        rig.run()
        assert rig.tokens["a"] == expected([1, 2, 3], 8)

    def test_when_no_token_can_be_scheduled_it_waits(self):
        rig = pipeline(4)
        rig.add("a", max_tokens=1)
        rig.step()
        threading.Timer(0.05, rig.executor.finish).start()
        rig.executor.late = False
        rig.step()  # nothing but the end of "a" is to come
        assert rig.ends == {"a": "length"}

    def test_an_aborted_request_gets_no_token_of_a_step_that_is_under_way(self):
        rig = pipeline()
        rig.add("a", max_tokens=8)
        rig.add("b", max_tokens=8)
        rig.step()
        rig.executor.late = False
        rig.executor.finish()
        rig.step("a")
        assert "a" not in rig.tokens or rig.tokens["a"] == []
        assert rig.tokens["b"] == expected([1, 2, 3], 1)
        rig.run()
        assert rig.ends == {"a": "abort", "b": "length"}
        assert rig.tokens["b"] == expected([1, 2, 3], 8)

    def test_requests_that_come_between_are_in_the_next_batch(self):
        rig = pipeline()
        rig.add("a", max_tokens=3)
        rig.step()
        rig.add("b", prompt=[7, 8], max_tokens=3)
        rig.executor.late = False
        rig.executor.finish()
        rig.run()
        assert rig.tokens == {"a": expected([1, 2, 3], 3), "b": expected([7, 8], 3)}


class TestFlush:
    def test_what_nobody_was_told_comes_out_in_the_end(self):
        rig = pipeline(3)
        rig.add("a", max_tokens=8, timeout=5.0)
        rig.step()
        rig.now = 10.0
        rig.add("b", max_tokens=8)
        rig.step()  # plans without "a", whose end is told with the results of a step
        assert rig.ends == {}
        rig.executor.finish()
        for outputs in rig.core.flush():
            rig.take(outputs)
        assert rig.ends == {"a": "timeout"}
        assert rig.tokens["b"] == expected([1, 2, 3], 1)
        assert rig.core.flush() == []


class TestFailures:
    def test_the_original_error_is_raised_and_the_plan_is_given_back(self, caplog):
        rig = Rig(ScriptedExecutor(2))
        rig.executor.fail_at[2] = ValueError("CUDA error: misaligned address")
        rig.add("a", max_tokens=6)
        with (
            caplog.at_level(logging.ERROR, "hardpoint"),
            pytest.raises(ValueError, match="CUDA") as caught,
        ):
            rig.run()
        assert caught.value is rig.executor.fail_at[2]
        assert "step 2 failed: ValueError: CUDA error" in caplog.text
        rig.executor.fail_at.clear()
        rig.run()
        assert rig.tokens["a"] == expected([1, 2, 3], 6)

    def test_an_interrupt_loses_nothing(self):
        rig = Rig(ScriptedExecutor(2))
        rig.executor.fail_at[2] = interrupt_of_user()
        rig.add("a", max_tokens=6)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
        rig.run()
        assert rig.tokens["a"] == expected([1, 2, 3], 6)


@examples(60)
@given(
    depth=st.integers(2, 4),
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    pattern=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    seqs=st.integers(1, 4),
)
def test_a_pipeline_gives_what_a_plain_engine_gives(depth, lengths, pattern, seqs):
    rig = pipeline(depth, max_num_seqs=seqs, max_num_batched_tokens=16, blocks=20)
    rig.executor.patient = True
    jobs = {
        f"r{i}": ([100 * i + k for k in range(prompt)], count)
        for i, (prompt, count) in enumerate(lengths)
    }
    joining = list(jobs.items())
    turn = 0
    while joining or rig.core.has_requests():
        if joining:
            name, (prompt, count) = joining.pop(0)
            rig.add(name, prompt=prompt, max_tokens=count)
        for _ in range(pattern[turn % len(pattern)]):
            steps = sorted({step for step, *_ in rig.executor.pending})
            if steps:  # any of them: the order in which they end is not that of their start
                rig.executor.finish(steps[turn % len(steps)])
        turn += 1
        rig.step()
        assert turn < 1000
    assert rig.tokens == {name: expected(prompt, count) for name, (prompt, count) in jobs.items()}
    assert rig.cache.num_free_blocks == rig.cache.num_usable_blocks
