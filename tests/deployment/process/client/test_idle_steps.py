"""Steps and batches without a message: no client is sent one, woken or held up by them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
import zmq
from support.core.engine_harness import LoopRig, ScriptedExecutor, expected, request
from support.internals import client_of, engine_of, sockets_of
from support.waiting import PATIENCE_S

from hardpoint import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from hardpoint.core.client.base import InprocClient
from hardpoint.host.system.encoding import Encoder
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, PrefixCacheStats, SchedulerStats
from hardpoint.process.client.process_client import ProcessClient
from hardpoint.testing import scripted_config

LONG = SamplingParams(
    temperature=0.0, max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


# The engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_chunk_of_a_prompt_is_no_message(depth):
    rig = LoopRig(ScriptedExecutor(depth), max_num_batched_tokens=8)
    messages = rig.record_unmerged()
    prompt = list(range(1, 41))
    rig.send(request("a", prompt=prompt, max_tokens=4))
    with rig:
        rig.until(lambda: rig.ends == {"a": "length"})
    assert rig.tokens["a"] == expected(prompt, 4)
    steps = [call for call in rig.executor.calls if call[0] == "execute"]
    assert len(steps) >= 5 + 3  # five chunks, the last of which gives a token
    assert [len(message.outputs) for message in messages] == [1] * 4


# The clients


class Core:
    """Has outputs of other clients only."""

    def __init__(self):
        self.steps, self.aborted, self.activity = 0, [], None

    def on_executor_failure(self, callback):
        pass

    def step(self):
        self.steps += 1
        return {1: EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="other")])}, True

    def abort_requests(self, request_ids):
        self.aborted.append(list(request_ids))
        return {}


def test_outputs_of_others_are_an_empty_batch_and_one_step():
    core = Core()
    client = InprocClient(core)
    for count in (1, 2):
        assert client.get_output(wait=True).outputs == []
        assert core.steps == count


def test_aborting_nobody_sends_nothing():
    class Sockets:
        sent: list = []

        def post(self, kind, message):
            self.sent.append(message)

    client = object.__new__(ProcessClient)
    client._sockets = Sockets()
    client.abort_requests([])
    client.abort_requests(iter(()))
    assert Sockets.sent == []
    client.abort_requests(["a"])
    assert Sockets.sent == [["a"]]


def test_aborting_nobody_leaves_a_core_alone():
    rig = LoopRig()
    rig.add("a")
    InprocClient(rig.core).abort_requests([])
    assert rig.core.num_unfinished_requests() == 1
    assert rig.run() == {"a": expected([1, 2, 3], 4)}


# The faces


STATS = SchedulerStats(
    num_running=1, num_waiting=0, kv_cache_usage=0.5, prefix_cache=PrefixCacheStats()
)
QUIET = {
    "empty": EngineCoreOutputs(),
    "statistics": EngineCoreOutputs(scheduler_stats=STATS),
    "ended": EngineCoreOutputs(finished_requests={"nobody"}),
}


@contextlib.contextmanager
def whispering(client, count: int = 40):
    """Have quiet batches come among the outputs of a client's engine."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(sockets_of(client).addresses.outputs[0])
    frames = [Encoder().encode(message) for message in QUIET.values()]

    def send():
        for number in range(count):
            socket.send_multipart(frames[number % len(frames)])
            time.sleep(0.002)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()
        context.destroy(100)


def test_a_program_that_steps_gets_all_it_would(scripted):
    with LLM(config=scripted_config(scripted, {"engine": {"in_process": False}})) as llm:
        (alone,) = llm.generate("x", LONG)
        with whispering(llm.llm_engine.parts.client):
            (among,) = llm.generate("x", LONG)
        assert among.outputs[0].token_ids == alone.outputs[0].token_ids
        assert len(among.outputs[0].token_ids) == 150
        with whispering(llm.llm_engine.parts.client, 4):
            time.sleep(0.1)
            assert llm.llm_engine.step() == []  # nothing runs, so nothing is waited for
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            starved(engine_of(llm))
        assert time.monotonic() - began < PATIENCE_S


def starved(engine) -> None:
    """Wait for the outputs of a request that stands still, with quiet batches only."""
    engine.call_utility("pause", "keep")
    engine.add_request("a", "x", LONG)
    engine.is_paused = False  # as a program that does not know
    with whispering(engine.parts.client, 8):
        try:
            for _ in range(100):
                assert engine.step(timeout=0.5) == []
        finally:
            engine.abort_requests(["a"])
            engine.call_utility("resume")


def test_a_task_is_woken_by_its_own_outputs_only(scripted):
    async def main():
        with contextlib.closing(AsyncLLM(config=scripted_config(scripted))) as llm:
            alone = [each async for each in llm.generate("x", LONG)]
            with whispering(client_of(llm)):
                among = [each async for each in llm.generate("x", LONG)]
                assert all(each.outputs[0].token_ids or each.finished for each in among)
            assert tokens(among) == tokens(alone)
            assert len(tokens(among)) == 150
            await llm.engines.pause("keep")
            task = asyncio.create_task(anext(llm.generate("x", LONG)))
            with whispering(client_of(llm), 8):
                await asyncio.sleep(0.3)
            assert not task.done()
            await llm.engines.resume()
            assert (await asyncio.wait_for(task, PATIENCE_S)).outputs[0].token_ids

    asyncio.run(asyncio.wait_for(main(), 4 * PATIENCE_S))


def tokens(outputs) -> list[int]:
    return [token for output in outputs for token in output.outputs[0].token_ids]
