"""AsyncLLM before a request is in the engine, and around its calls."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import Future

import pytest
from support.async_requests import GREEDY, collect
from support.internals import client_of, send_queue_of
from support.waiting import PATIENCE_S, until, wait_until

from hardpoint import AsyncLLM
from hardpoint.plugins import StatSink
from hardpoint.testing import scripted_config

LONG = "y" * 3000


class Ends(StatSink):
    """Keeps why requests ended."""

    contract = 1
    reasons: list[str] = []

    def record(self, stats):
        self.reasons.extend(ended.finish_reason for ended in stats.finished)


@pytest.fixture(scope="module")
def shared(scripted):
    """A runner of one loop, and an engine that belongs to it."""
    with asyncio.Runner() as runner:
        extra = {"stats": {"sinks": [f"{__name__}:Ends"]}, "max_model_len": 512}
        llm = AsyncLLM(config=scripted_config(scripted, extra))
        yield runner, llm
        runner.run(llm.aclose())


@pytest.fixture
def run(shared):
    runner, llm = shared
    return lambda main: runner.run(asyncio.wait_for(main(llm), 4 * PATIENCE_S))


@pytest.fixture
def llm(run, shared):
    """The engine, for tests that are coroutine functions; `run` runs them."""
    return shared[1]


async def test_a_tokenizer_is_asked_for_one_text_at_a_time(llm, monkeypatch):
    lock, clashes, threads = threading.Lock(), [], []
    begun, go_on = threading.Event(), threading.Event()
    encode = llm.tokenizer.encode

    def slowly(text, **given):
        if not lock.acquire(blocking=False):
            clashes.append(text)
            return encode(text, **given)
        threads.append(threading.current_thread() is threading.main_thread())
        if len(text) > 100:
            begun.set()
            assert go_on.wait(PATIENCE_S)
        lock.release()
        return encode(text[:8], **given)

    monkeypatch.setattr(llm.tokenizer, "encode", slowly, raising=False)
    tasks = [asyncio.create_task(collect(llm.generate(LONG, GREEDY)))]
    await until(begun.is_set, "the tokenizer to be asked")
    tasks += [asyncio.create_task(collect(llm.generate("say abc", GREEDY))) for _ in range(3)]
    await asyncio.sleep(0.02)
    tasks[0].cancel()  # the thread goes on with its text
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(collect(llm.generate("say abc", GREEDY)))]
    await asyncio.sleep(0.02)
    go_on.set()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(told[0], asyncio.CancelledError)
    assert {outputs[-1].outputs[0].text for outputs in told[1:]} == {" abc abc abc"}
    assert clashes == []
    threads.clear()
    await collect(llm.generate("say abc", GREEDY))
    assert threads == [True]  # nothing to wait for, so no thread


async def test_a_cancelled_call_is_given_up(llm, monkeypatch):
    await llm.plugins.health()
    pending: Future = Future()
    called = threading.Event()
    monkeypatch.setattr(client_of(llm), "call", lambda *_, **__: called.set() or pending)
    task = asyncio.create_task(llm.engines.scheduler_stats())
    await until(called.is_set, "the call")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert pending.cancelled()


async def test_one_cancelled_while_it_is_sent_counts_as_aborted(llm, monkeypatch):
    await llm.plugins.health()
    Ends.reasons.clear()
    with monkeypatch.context() as patch:
        patch.setattr(client_of(llm), "offer_requests", lambda _: lambda: False)
        task = asyncio.create_task(collect(llm.generate("say abc", GREEDY)))
        await until(lambda: send_queue_of(llm).num_waiting, "the attempt to send it")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await collect(llm.generate("say abc", GREEDY))
    assert Ends.reasons == ["abort", "stop"]


def test_why_it_is_dead_does_not_depend_on_what_was_asked_first(scripted):
    llm = AsyncLLM(config=scripted_config(scripted))
    assert llm.dead_error is None
    os.kill(llm.engines.pid, signal.SIGKILL)
    wait_until(lambda: not llm.is_running, PATIENCE_S, "the word of its death")
    assert "was killed by signal 9" in str(llm.dead_error)
    assert llm.errored
    assert "was killed by signal 9" in str(llm.dead_error)
    llm.close()
