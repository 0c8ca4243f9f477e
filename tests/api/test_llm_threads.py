"""Several threads on one LLM, and forks of the process that opened it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.process.harness import process_config, run_program
from support.process.slow_requests import SLOW, UNFINISHED
from support.waiting import PATIENCE_S, wait_until

from hardpoint import LLM, AsyncLLM, EngineClosedError, HardpointError, SamplingParams
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.host.system.engine_lock import EngineLock
from hardpoint.process.client.sockets import READER_THREAD
from hardpoint.testing import scripted_config

ONE = SamplingParams(max_tokens=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module", params=[True, False], ids=["in_process", "own_process"])
def llm(request, scripted):
    with LLM(config=scripted_config(scripted, {"engine": {"in_process": request.param}})) as llm:
        yield llm


class Thread(threading.Thread):
    """A thread whose result, or error, is waited for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.result = error

    def wait(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it hangs"
        return self.result


class Lock(EngineLock):
    """A lock that shows whether a thread waits for it."""

    @property
    def is_awaited(self) -> bool:
        return self._is_awaited


def in_fork(work: Callable[[], Any]) -> Any:
    """Call in a fork of this process; return the result, which is JSON, or the error's text."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            result = work()
        except HardpointError as error:
            result = str(error)
        except BaseException as error:
            result = repr(error)
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        result = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return result


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_each_thread_gets_its_own_outputs(llm):
    prompts = ["say abc", "long", "emoji"]
    alone = [llm.generate([prompt] * 2, LONG) for prompt in prompts]
    expected = [texts(outputs) for outputs in alone]
    threads = [Thread(lambda p=p: texts(llm.generate([p] * 2, LONG))) for p in prompts * 2]
    assert [thread.wait() for thread in threads] == expected * 2


def test_their_requests_share_a_batch(llm, monkeypatch):
    step, steps = llm.llm_engine.step, []
    monkeypatch.setattr(llm.llm_engine, "step", lambda: steps.append(1) or step())
    added = threading.Barrier(4)

    def stream(prompt: str) -> str:
        outputs = llm.stream(prompt, LONG)
        added.wait(PATIENCE_S)
        return "".join(texts(outputs))

    threads = [Thread(lambda n=n: stream(f"prompt {n}")) for n in range(4)]
    assert len({thread.wait() for thread in threads}) == 4
    assert len(steps) < 2 * LONG.max_tokens


@pytest.mark.parametrize("in_process", [True, False])
def test_closing_in_one_thread_ends_the_call_of_another(scripted, in_process):
    with LLM(config=scripted_config(scripted, {"engine": {"in_process": in_process}})) as llm:
        thread = Thread(lambda: llm.generate(["say abc"] * 2000, ENDLESS))
        llm.close()
        assert isinstance(thread.wait(), EngineClosedError)


def test_an_interrupt_of_one_call_is_an_error_of_the_others(llm, monkeypatch):
    def interrupt(**_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    stream = llm.stream("say abc", LONG)
    while next(stream).finished:  # the engine's process may run ahead of a slow reader
        stream = llm.stream("say abc", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.parts.client, "get_output", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("say abc", GREEDY)
    with pytest.raises(HardpointError, match="ended by an interrupt of another call"):
        next(stream)
    assert texts(llm.generate("say abc", GREEDY)) == [" abc abc abc"]


def test_threads_that_iterate_one_stream_share_its_outputs(llm):
    stream = llm.stream("long", LONG)
    threads = [Thread(lambda: [output.outputs[0].token_ids for output in stream]) for _ in "ab"]
    deltas = threads[0].wait() + threads[1].wait()
    assert sum(map(len, deltas)) == LONG.max_tokens


@pytest.mark.nightly
def test_a_daemon_thread_in_a_step_does_not_abort_the_end_of_the_program(scripted, tmp_path):
    """An atexit function that waits for the thread does not hang, either."""
    source = f"""
        import atexit, json, threading

        def wait():
            thread.join(60)
            print(json.dumps([not thread.is_alive(), *errors]))

        atexit.register(wait)  # before all others, so that it runs last

        from hardpoint import EngineClosedError, LLM, SamplingParams
        from hardpoint.testing import scripted_config

        def work():
            try:
                while True:
                    llm.generate(["say abc"] * 20, params)
                    begun.set()
            except EngineClosedError as error:
                errors.append(str(error))

        llm = LLM(config=scripted_config({str(scripted)!r}))
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        errors, begun = [], threading.Event()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        begun.wait(60)
    """
    expected = [True, "the program is ending, so the engine takes no more calls"]
    # A fork has imported the package, and registered its functions, before.
    assert run_program(source, folder=tmp_path) == [expected]


def test_a_fork_is_refused_and_harms_nothing(llm):
    stream = llm.stream("long", LONG)
    begun = next(stream).outputs[0].token_ids
    pid = os.getpid()

    def child() -> list[str]:
        answers = []
        for call in (
            lambda: llm.generate("say abc"),
            llm.plugins.health,
            stream.__next__,
            llm.engines.resume,
        ):
            try:
                answers.append(f"it answered: {call()}")
            except HardpointError as error:
                answers.append(str(error))
        stream.close()
        llm.close()
        vars(llm).clear()
        gc.collect()
        return answers

    for message in in_fork(child):
        assert message.startswith(f"the engine belongs to the process {pid}, which opened it; the")
        assert message.endswith("is a fork of it and cannot use it: open an engine after the fork")
    tokens = sum((list(output.outputs[0].token_ids) for output in stream), list(begun))
    assert len(tokens) == LONG.max_tokens
    assert texts(llm.generate("say abc", GREEDY)) == [" abc abc abc"]


def test_a_fork_of_a_program_with_an_event_loop_is_refused(scripted):
    async def answer() -> str:
        async for output in llm.generate("say abc", GREEDY):
            text = output.outputs[0].text
        return text

    llm = AsyncLLM(config=scripted_config(scripted))
    assert "is a fork of it and cannot use it" in in_fork(lambda: asyncio.run(answer()))
    assert in_fork(lambda: [llm.close(), asyncio.run(llm.aclose())]) == [None, None]

    async def life() -> str:
        async with llm:
            return await asyncio.wait_for(answer(), PATIENCE_S)

    assert asyncio.run(life()) == " abc abc abc"


def closed_by_a_generator(llm):
    with contextlib.closing(llm.stream("long", UNFINISHED)) as outputs:
        yield from outputs


def delegating(llm):
    yield from llm.generate_unordered([("a", ONE), ("long", UNFINISHED)])


ITERATORS = {
    "unordered": lambda llm: llm.generate_unordered([("a", ONE), ("long", UNFINISHED)]),
    "conversation": lambda llm: llm.open_conversation(UNFINISHED).send("long"),
    "stream": lambda llm: llm.stream("long", UNFINISHED),
    "in a generator": closed_by_a_generator,
    "delegated to": delegating,
}


@pytest.fixture(params=ITERATORS)
def abandoned(request):
    """Leaves a begun iterator of an LLM to the garbage collector, which runs when it is called."""

    def abandon(llm):
        cycle = [ITERATORS[request.param](llm)]
        next(cycle[0])
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    yield abandon
    gc.enable()


@pytest.fixture(scope="module")
def collecting_reader(scripted):
    """An LLM, and an event that lets the thread that reads its outputs collect garbage once."""
    due = threading.Event()

    def collect(*_: object) -> None:
        if due.is_set() and threading.current_thread().name == READER_THREAD:
            gc.collect()
            due.clear()

    threading.setprofile(collect)
    try:
        llm = LLM(config=process_config(scripted, SLOW))
    finally:
        threading.setprofile(None)
    with llm:
        yield llm, due


@pytest.mark.parametrize("is_busy", [True, False])
def test_the_collector_ends_iterators_in_the_thread_that_reads_outputs(
    collecting_reader, abandoned, is_busy
):
    llm, due = collecting_reader
    abandoned(llm)
    with llm.llm_engine.lock if is_busy else contextlib.nullcontext():
        due.set()
        wait_until(lambda: not due.is_set())
    assert Thread(lambda: texts(llm.generate("say abc", GREEDY))).wait() == [" abc abc abc"]
    assert llm.llm_engine.get_num_unfinished_requests() == 0


class Interrupted(DefaultScheduler):
    """Calls a function once, in the method that is due."""

    name, contract = "interrupted", 2
    due: dict[str, Callable[[], object]] = {}

    def add_request(self, request):
        self.due.pop("before it is added", gc.isenabled)()
        super().add_request(request)
        self.due.pop("after it is added", gc.isenabled)()

    def schedule(self):
        plan = super().schedule()
        self.due.pop("in a step", gc.isenabled)()
        return plan


@pytest.fixture(scope="module")
def interrupted(scripted):
    use = {"scheduler": {"use": f"{__name__}:Interrupted"}}
    with LLM(config=scripted_config(scripted, {**use, **SLOW})) as llm:
        yield llm


@pytest.mark.parametrize("moment", ["before it is added", "after it is added", "in a step"])
def test_the_collector_ends_iterators_within_a_call_of_the_engine(interrupted, abandoned, moment):
    abandoned(interrupted)
    Interrupted.due[moment] = gc.collect
    assert texts(interrupted.generate("say abc", GREEDY)) == [" abc abc abc"]
    assert not Interrupted.due
    assert interrupted.llm_engine.get_num_unfinished_requests() == 0


def test_a_signal_handler_may_abort_another_request_while_one_is_added(interrupted):
    engine = interrupted.llm_engine
    stream = interrupted.stream("long", UNFINISHED)
    request_id = next(stream).request_id
    Interrupted.due["after it is added"] = lambda: engine.abort_requests(request_id)
    assert texts(interrupted.generate("say abc", GREEDY)) == [" abc abc abc"]
    assert engine.get_num_unfinished_requests() == 0


def test_waiting_threads_are_not_passed_over():
    lock, order, number = Lock(), [], 30

    def take(name: str, other: str) -> None:
        for _ in range(number):
            with lock:
                order.append(name)
                # This thread comes again at once, and the other one waits, unless it has ended.
                wait_until(lambda: lock.is_awaited or order.count(other) == number)

    for thread in [Thread(lambda names=names: take(*names)) for names in ("ab", "ba")]:
        assert thread.wait() is None
    assert order in ([*"ab"] * number, [*"ba"] * number)


def test_what_the_collector_asks_for_waits_for_the_release():
    lock, done = EngineLock(), []
    with lock:
        with lock:
            lock.call_soon(lambda: done.append("same"))
        Thread(lambda: lock.call_soon(lambda: done.append("other"))).wait()
        assert done == []
    assert done == ["same", "other"]
    lock.call_soon(lambda: done.append("at once"))
    assert done[2:] == ["at once"]
    Thread(lambda: lock.call_soon(lambda: done.append("in a new thread"))).wait()
    wait_until(lambda: done[3:] == ["in a new thread"])


def test_the_next_thread_finds_what_the_collector_asked_for():
    def take() -> list[str]:
        with lock:
            return list(done)

    lock, done = Lock(), []
    with lock:
        thread = Thread(take)
        wait_until(lambda: lock.is_awaited)
        lock.call_soon(lambda: done.append("call"))
    assert thread.wait() == ["call"]


def test_when_the_program_ends_the_thread_that_ends_it_alone_is_served():
    lock = EngineLock()
    lock.owner.ending_thread = threading.get_ident()
    with lock:
        refused = Thread(lambda: lock.__enter__())
        assert str(refused.wait()) == "the program is ending, so the engine takes no more calls"
