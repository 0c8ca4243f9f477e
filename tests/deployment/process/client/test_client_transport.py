"""Clients of real engine processes that are slow, stopped, or told nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import msgspec
import pytest
import zmq
from support.core.serial_engine import GREEDY, config, slowed, still_serves
from support.internals import (
    engine_of,
    output_processor_of,
    send_queue_of,
    set_timeout,
    sockets_of,
)
from support.waiting import PATIENCE_S, HeldSteps, others_sleep, until, wait_until

from hardpoint import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDeadError,
    EngineTimeoutError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.host.system.encoding import Encoder
from hardpoint.plugins import EngineCoreOutputs
from hardpoint.process.client import sockets as engine_sockets
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.protocol import RequestType
from hardpoint.testing import scripted_config, write_scripted_model

LIMIT_S = 4 * PATIENCE_S
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def process_llm(scripted):
    with LLM(config=config(scripted)) as llm:
        yield llm


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "EngineCoreOutputs"]


@contextlib.contextmanager
def output_of(llm):
    """A socket at the place where the engine's outputs go."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(sockets_of(llm.llm_engine.parts.client).addresses.outputs[0])
    yield socket
    context.destroy(0)


# Threads


def test_one_reader_per_engine_and_none_without(scripted):
    before = readers()
    with LLM(config=config(scripted)):
        (reader,) = set(readers()) - set(before)
        assert reader.daemon
    assert set(readers()) <= set(before)
    with pytest.raises(ConfigError, match=r"kv_cache.num_blocks"):
        LLM(config=config(scripted) | {"kv_cache": {"num_blocks": 2}})
    assert set(readers()) <= set(before)


# What is sent


def test_the_text_of_a_prompt_stays_here(process_llm, monkeypatch):
    sent: list[bytes] = []
    send = EngineSockets._sent

    def noted(sockets, frames):
        sent.append(b"|".join(frame.bytes for frame in frames))
        return send(sockets, frames)

    monkeypatch.setattr(EngineSockets, "_sent", noted)
    assert still_serves(process_llm)
    assert [each[:1] for each in sent] == [RequestType.ADD]
    assert b"say abc" not in sent[0]


# Waiting


def test_a_step_that_waits_no_longer_than_asked(process_llm, tmp_path):
    engine, held = engine_of(process_llm), HeldSteps(tmp_path)
    engine.add_request("a", "x", slowed(held.slow(), 1))
    wait_until(held.have_begun, what="the step")
    began = time.monotonic()
    with pytest.raises(
        EngineTimeoutError, match=r"^the engine gave no outputs within 0.2 s, in apply"
    ):
        engine.step(timeout=0.2)
    assert 0.2 <= time.monotonic() - began < PATIENCE_S / 2
    held.let_go()
    (output,) = engine.step(timeout=PATIENCE_S)  # nothing was lost
    assert output.finished
    assert engine.step(timeout=0.01) == []  # there is nothing to wait for
    assert still_serves(process_llm)


def test_a_batch_without_outputs_is_a_step_without_any(process_llm, tmp_path):
    engine, held = engine_of(process_llm), HeldSteps(tmp_path)
    engine.add_request("a", "x", slowed(held.slow(), 1))
    with output_of(process_llm) as socket:
        socket.send_multipart(Encoder().encode(EngineCoreOutputs()))
        assert engine.step() == []
    held.let_go()
    (output,) = engine.step()
    assert output.finished


def test_who_never_steps_holds_one_entry_per_request(scripted):
    prompts = [[number + 1] for number in range(32)]
    settings = {"engine": {"in_process": False}, "scheduler": {"max_num_seqs": 32}}
    with LLM(config=scripted_config(scripted, settings)) as llm:
        engine, client = engine_of(llm), llm.llm_engine.parts.client
        waiting = client._outputs
        params = msgspec.structs.replace(LONG, max_tokens=100)
        expected = [output.outputs[0] for output in llm.generate(prompts, params)]
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        most, running = 0, 1
        while running:
            stats = client.call_utility("scheduler_stats")
            running = stats.num_running + stats.num_waiting
            most = max(most, len(waiting))
            time.sleep(0.02)
        wait_until(lambda: len(waiting) >= 32, PATIENCE_S, "an entry per request")
        assert max(most, len(waiting)) == 32
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step(timeout=PATIENCE_S)}
        for number, completion in enumerate(expected):
            got = outputs[str(number)].outputs[0]
            assert (got.text, got.token_ids) == (completion.text, completion.token_ids)


# Nonsense


def test_nonsense_at_the_output_address_ends_all_waiting(scripted, tmp_path):
    held = HeldSteps(tmp_path)
    with LLM(config=config(scripted)) as llm:
        client = llm.llm_engine.parts.client
        llm.llm_engine.add_request("a", "x", slowed(held.slow(), 1))
        wait_until(held.have_begun, PATIENCE_S, "the step")
        ends: list[tuple[float, BaseException]] = []

        def wait(call):
            try:
                call()
            except BaseException as error:
                ends.append((time.monotonic(), error))

        futures = [client.call("scheduler_stats") for _ in range(5)]
        waits = [future.result for future in futures]
        waits += [
            lambda: client.call_utility("plugin_meters"),
            lambda: client.get_output(wait=True),
        ]
        threads = [threading.Thread(target=wait, args=(each,)) for each in waits]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert ends == []
        with output_of(llm) as socket:
            began = time.monotonic()
            socket.send(b"\xc1")
            for thread in threads:
                thread.join(PATIENCE_S)
        assert len(ends) == 7
        assert max(told for told, _ in ends) - began < PATIENCE_S / 2
        assert {type(error) for _, error in ends} == {EngineDeadError}
        assert len({str(error) for _, error in ends}) == 1
        held.let_go()
        pid = client.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# An engine that stands still


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    return write_scripted_model(
        tmp_path_factory.mktemp("model"),
        {"say abc": " abc abc abc"},
        max_position_embeddings=1 << 15,
    )


@contextlib.asynccontextmanager
async def stopped(llm):
    """The engine process gets no time, until this is left."""
    os.kill(llm.engines.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have been killed meanwhile
            os.kill(llm.engines.pid, signal.SIGCONT)


class Pulse:
    """Notes for how long the loop stood still."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.longest = max(self.longest, time.monotonic() - began - 0.005)

    def end(self) -> float:
        self._task.cancel()
        return self.longest


async def collect(llm, prompt, params=GREEDY) -> list:
    return [output async for output in llm.generate(prompt, params)]


async def until_it_takes_no_more(llm) -> list[asyncio.Task]:
    """Send large requests, one after another, until one of them waits to be sent, for good."""
    tasks, looks = [], 0
    while looks < 30:  # until then ZMQ's own threads may still find room
        if send_queue_of(llm).num_waiting:
            looks += others_sleep()
        else:
            looks = 0
            tasks.append(asyncio.create_task(collect(llm, [1 + len(tasks) % 90] * 8000)))
        await asyncio.sleep(0.002)
        assert len(tasks) < 2000
    return tasks


@pytest.fixture(scope="module")
def shared(roomy):
    """A runner of one loop, and an engine that belongs to it."""
    settings = {
        "engine": {"call_timeout_seconds": 0.5},
        "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 8192},
    }
    with asyncio.Runner() as runner:
        llm = AsyncLLM(config=scripted_config(roomy, settings))
        set_timeout(send_queue_of(llm), 60.0)  # for tasks that wait for a stopped engine
        runner.run(collect(llm, "say abc"))
        yield runner, llm
        runner.run(llm.aclose())


@pytest.fixture
def serve(shared):
    """Run a test with the engine, which serves afterwards and holds nothing."""
    runner, llm = shared

    async def checked(main):
        await main(llm)
        for _ in range(2000):
            with contextlib.suppress(EngineTimeoutError):
                stats = await llm.engines.scheduler_stats()
                if (stats.num_running, stats.num_waiting) == (0, 0):
                    break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the engine still has requests")
        (*_, last) = await collect(llm, "say abc")
        assert last.outputs[0].text == " abc abc abc"
        assert output_processor_of(engine_of(llm)).num_unfinished_requests() == 0
        assert send_queue_of(llm).num_waiting == 0
        assert (llm.is_running, llm.dead_error) == (True, None)

    return lambda main: runner.run(asyncio.wait_for(checked(main), LIMIT_S))


def test_a_stopped_engine_holds_up_nothing_but_its_requests(serve, monkeypatch):
    monkeypatch.setattr(engine_sockets, "SEND_TIMEOUT_S", PATIENCE_S)

    async def main(llm):
        async with stopped(llm):
            tasks = await until_it_takes_no_more(llm)
            pulse = Pulse()
            more = [asyncio.create_task(collect(llm, [7] * 8000)) for _ in range(5)]
            stats = asyncio.create_task(llm.engines.scheduler_stats())
            await asyncio.sleep(0)
            assert not stats.done()  # it waits beside the loop
            with pytest.raises(EngineTimeoutError, match="did not answer scheduler_stats within"):
                await stats
            for task in tasks + more[1:]:
                task.cancel()
            for end in await asyncio.gather(*tasks, *more[1:], return_exceptions=True):
                assert isinstance(end, asyncio.CancelledError)
            await llm.abort("nobody")
            assert pulse.end() < PATIENCE_S / 2  # a sender that holds it up does so for longer
            assert not more[0].done()
        (*_, last) = await more[0]  # it is sent when there is room
        assert last.finished

    serve(main)


@pytest.mark.nightly
def test_a_request_that_cannot_be_sent_is_told_so(serve, monkeypatch):
    async def main(llm):
        async with stopped(llm):
            tasks = await until_it_takes_no_more(llm)
            tasks[-1].cancel()  # the one that waits
            monkeypatch.setattr(send_queue_of(llm), "_timeout_s", 0.2)
            began = time.monotonic()
            attempts = (collect(llm, [1] * 8000), collect(llm, "x", LONG))
            for attempt in [asyncio.create_task(each) for each in attempts]:
                with pytest.raises(EngineTimeoutError, match="^the engine took no message for 10 "):
                    await attempt
            assert 0.2 <= time.monotonic() - began < PATIENCE_S / 2
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    serve(main)


@pytest.mark.nightly
def test_a_request_that_is_aborted_before_it_is_sent_never_runs(serve):
    async def main(llm):
        async with stopped(llm):
            tasks = await until_it_takes_no_more(llm)
            params = SamplingParams(max_tokens=20_000, ignore_eos=True, n=2)
            outputs = llm.generate([3] * 8000, params, "mine")
            task = asyncio.create_task(anext(outputs))
            await until(lambda: send_queue_of(llm).num_waiting > 1, "it to wait")
            await llm.abort("mine")
            output = await asyncio.wait_for(task, PATIENCE_S)
            assert [each.finish_reason for each in output.outputs] == ["abort", "abort"]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await outputs.aclose()

    serve(main)


def test_those_that_wait_to_be_sent_hear_of_the_death(roomy):
    async def main():
        async with AsyncLLM(config=scripted_config(roomy)) as llm:
            set_timeout(send_queue_of(llm), PATIENCE_S)
            await collect(llm, "say abc")
            async with stopped(llm):
                tasks = await until_it_takes_no_more(llm)
                tasks += [asyncio.create_task(collect(llm, [7] * 8000)) for _ in range(5)]
                await until(lambda: send_queue_of(llm).num_waiting == 6, "all to wait")
                began = time.monotonic()
                os.kill(llm.engines.pid, signal.SIGKILL)
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                assert time.monotonic() - began < PATIENCE_S / 2
                assert {type(end) for end in ends} == {EngineDeadError}

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_busy_loop_finds_one_entry_per_request(serve):
    async def main(llm):
        params = SamplingParams(
            temperature=0.0, max_tokens=600, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        bridge, known = engine_of(llm)._bridge, output_processor_of(engine_of(llm))
        async with stopped(llm):
            tasks = [asyncio.create_task(collect(llm, [n + 1], params)) for n in range(8)]
            await until(lambda: known.num_unfinished_requests() == 8, "all to be sent")
        # the loop stands still, as in a careless program
        wait_until(lambda: bridge.num_waiting >= 8, PATIENCE_S, "an entry per request")
        most = bridge.num_waiting
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            time.sleep(0.1)
            most = max(most, bridge.num_waiting)
        assert most == 8
        for task in tasks:
            assert sum(len(each.outputs[0].token_ids) for each in task.result()) == 600

    serve(main)
