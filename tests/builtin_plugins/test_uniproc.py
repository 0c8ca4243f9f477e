"""The executor of one worker, with steps in a separate thread when planned ahead."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time

import pytest
import torch
from support.driving import FINAL
from support.internals import engine_of
from support.waiting import call_interrupted, wait_until

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.executors import worker_thread
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.executors.worker_thread import WorkerThread
from hardpoint.errors import EngineDeadError
from hardpoint.plugins import LogitsProcessor, Phase
from hardpoint.testing import ScriptedModel, scripted_config
from hardpoint.testing.threads import until

AHEAD = {"scheduler": {"asynchronous": True}}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **FINAL)
HERE = __name__


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name == "HardpointWorker"]


@pytest.fixture
def thread():
    assert not worker_threads()
    thread = WorkerThread()
    yield thread
    thread.close(lambda: None)
    assert not worker_threads()


class TestThread:
    def test_calls_run_one_by_one_in_their_order_in_one_thread(self, thread):
        seen = []
        futures = [
            thread.submit(lambda i=i: seen.append((i, threading.get_ident())) or i)
            for i in range(50)
        ]
        assert [future.result(60) for future in futures] == list(range(50))
        assert [i for i, _ in seen] == list(range(50))
        (ident,) = {ident for _, ident in seen}
        assert ident != threading.get_ident()

    @pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
    def test_an_error_is_that_of_its_call_alone(self, thread, error):
        def fail():
            raise error

        failed, after = thread.submit(fail), thread.submit(lambda: 1)
        assert failed.exception(60) is error
        assert after.result(60) == 1

    @pytest.mark.parametrize("hands_out", [False, True])
    def test_a_result_waits_for_the_call_after_it_unless_that_hands_it_out(self, thread, hands_out):
        start, begun, end = threading.Event(), threading.Event(), threading.Event()

        def next_step():
            if hands_out:
                thread.hand_out()
            begun.set()
            return end.wait(60)

        thread.submit(lambda: start.wait(60))
        first, second = thread.submit(lambda: 1), thread.submit(next_step)
        start.set()
        assert begun.wait(60)
        assert first.done() is hands_out
        end.set()
        assert second.result(60)
        assert first.result(0) == 1

    def test_it_keeps_nothing_of_a_call(self, thread):
        class Plan:
            pass

        plans = [Plan() for _ in range(3)]
        for plan in plans:
            thread.submit(lambda plan=plan: plan).result(60)
        del plan
        wait_until(lambda: all(referrers == [plans] for referrers in map(gc.get_referrers, plans)))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_the_calls_of_one_that_has_died_fail(self, thread, monkeypatch):
        ident = thread.submit(threading.get_ident).result(60)
        began, blocked = threading.Event(), threading.Event()
        running = thread.submit(lambda: began.set() or blocked.wait())
        assert began.wait(60)
        # Between two calls, where what calls raise is not caught.
        monkeypatch.setattr(worker_thread, "_result", lambda *_: raise_in(ident))
        waiting = [thread.submit(lambda: 1) for _ in range(2)]
        blocked.set()
        assert running.result(60)
        assert until(lambda: not worker_threads(), 60)
        for future in (*waiting, thread.submit(lambda: 2)):
            with pytest.raises(EngineDeadError, match="the thread of the worker has ended"):
                future.result(60)
        closed = []
        thread.close(lambda: closed.append(threading.get_ident()))
        assert closed == [threading.get_ident()]

    def test_a_call_that_does_not_end_delays_closing_only_so_long(self, monkeypatch, caplog):
        monkeypatch.setattr(worker_thread, "_GRACE_S", 0.2)
        thread, blocked, closed = WorkerThread(), threading.Event(), []
        thread.submit(blocked.wait)
        began = time.monotonic()
        thread.close(lambda: closed.append(1))
        assert 0.2 < time.monotonic() - began < 60
        assert "a call of the worker does not end" in caplog.text
        assert not closed
        blocked.set()
        assert until(lambda: bool(closed) and not worker_threads(), 60)

    def test_signals_while_calls_are_submitted_do_not_end_it(self, thread):
        futures = []
        call_interrupted(lambda: futures.append(thread.submit(lambda: 1)))
        assert thread.submit(lambda: 2).result(60) == 2
        assert {future.result(60) for future in futures} == {1}

    def test_one_that_is_dropped_ends(self):
        thread = WorkerThread()
        assert worker_threads()
        del thread
        wait_until(lambda: not worker_threads())


def raise_in(ident):
    """Let a thread raise SystemExit, as if from outside."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))


class Notes(LogitsProcessor):
    """Records the thread, and torch's settings there."""

    contract = 1
    phase = Phase.BIAS
    seen: list[tuple[int, bool, int]] = []

    def apply(self, logits, rows):
        settings = torch.is_autocast_enabled("cpu"), torch.get_num_threads()
        self.seen.append((threading.get_ident(), *settings))
        return logits


class Counts(UniprocExecutor):
    """Counts the tokens of steps."""

    contract = 2
    tokens = 0

    def execute_model(self, plan):
        Counts.tokens += plan.total_num_scheduled_tokens
        return super().execute_model(plan)


@pytest.fixture
def open_llm(scripted):
    """Open engines, which leave no thread."""

    def open_one(**extra):
        return LLM(config=scripted_config(scripted, extra))

    assert not worker_threads()
    yield open_one
    wait_until(lambda: not worker_threads())


def test_without_planning_ahead_all_calls_are_in_the_callers_thread(open_llm):
    Notes.seen.clear()
    with open_llm(plugins={"enable": [f"{HERE}:Notes"]}) as llm:
        llm.generate("say", with_notes())
        assert not worker_threads()
    assert {ident for ident, *_ in Notes.seen} == {threading.get_ident()}


def with_notes():
    return SamplingParams(temperature=0.0, max_tokens=3, plugin_args={"notes": {}}, **FINAL)


def test_the_callers_modes_of_torch_do_not_reach_the_worker(open_llm):
    Notes.seen.clear()
    threads = torch.get_num_threads()
    config = {"plugins": {"enable": [f"{HERE}:Notes"]}, "executor": {"threads": threads + 1}}
    with open_llm(**AHEAD, **config) as llm:
        (thread,) = worker_threads()
        with torch.autocast("cpu"):
            llm.generate("say", with_notes())
        assert set(Notes.seen) == {(thread.ident, False, threads + 1)}
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == threads


def test_a_dropped_engine_leaves_no_thread(open_llm):
    llm = open_llm(**AHEAD)
    llm.generate("say", PARAMS)
    del llm
    gc.collect()


@pytest.mark.parametrize("error", [ValueError("it broke"), KeyboardInterrupt()])
def test_an_error_of_the_model_is_raised_to_the_caller(open_llm, monkeypatch, error):
    with open_llm(**AHEAD) as llm:
        forward, steps = ScriptedModel.forward, itertools.count()

        def fails(self, batch):
            if next(steps) == 3:
                raise error
            return forward(self, batch)

        monkeypatch.setattr(ScriptedModel, "forward", fails)
        with pytest.raises(EngineDeadError, match=f"ScriptedForCausalLM.*{type(error).__name__}"):
            llm.generate("say", PARAMS)


def test_a_stop_token_costs_one_row_and_no_token(open_llm, monkeypatch):
    results = {}
    for ahead in (False, True):
        monkeypatch.setattr(Counts, "tokens", 0)
        config = {"executor": {"use": f"{HERE}:Counts"}, "scheduler": {"asynchronous": ahead}}
        with open_llm(**config) as llm:
            (whole,) = llm.generate("say", PARAMS)
            tokens = whole.outputs[0].token_ids
            assert len(tokens) == 8
            Counts.tokens = 0
            stop = SamplingParams(
                temperature=0.0, max_tokens=8, stop_token_ids=[tokens[4]], **FINAL
            )
            outputs = llm.generate(["say"] * 3, stop)
            engine = engine_of(llm)
            while engine.has_unfinished_requests():
                engine.step()
        assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
        results[ahead] = Counts.tokens, [output.outputs[0].token_ids for output in outputs]
    end = next(i for i, token in enumerate(tokens) if token == tokens[4]) + 1
    assert results[True][1] == results[False][1] == [tokens[:end]] * 3
    assert results[True][0] == results[False][0] + 3
