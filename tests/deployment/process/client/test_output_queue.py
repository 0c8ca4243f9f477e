"""Where outputs wait for their consumer: one entry per request, and then the end."""

from __future__ import annotations

import threading
import time

from support.waiting import PATIENCE_S

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs
from hardpoint.process.client.output_queue import OutputQueue

END = EngineDeadError("gone")


def batch(*tokens: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="a", new_token_ids=list(tokens))] if tokens else []
    )


def test_who_keeps_up_gets_the_very_batches():
    queue = OutputQueue()
    for number in (1, 2):
        sent = batch(number)
        queue.put(sent)
        assert queue.get(None) is sent


def test_what_waits_is_merged():
    queue = OutputQueue()
    for number in range(1000):
        queue.put(batch(number))
    assert len(queue) == 1
    assert queue.get(None).outputs[0].new_token_ids == list(range(1000))
    assert len(queue) == 0


def test_a_batch_without_outputs_is_one_too():
    queue = OutputQueue()
    queue.put(batch())
    assert len(queue) == 1
    assert queue.get(None).outputs == []


def test_the_end_comes_after_the_outputs_and_stays():
    queue = OutputQueue()
    queue.put(batch(1))
    queue.put(END)
    assert queue.get(0).outputs[0].new_token_ids == [1]
    assert [queue.get(seconds) for seconds in (0, None, 5)] == [END] * 3


def test_waiting_no_longer_than_asked():
    queue = OutputQueue()
    began = time.monotonic()
    assert queue.get(0) is None
    assert time.monotonic() - began < PATIENCE_S
    assert queue.get(0.1) is None
    assert 0.1 <= time.monotonic() - began < PATIENCE_S


def test_what_comes_wakes_who_waits():
    for item in (batch(1), END):
        queue = OutputQueue()
        threading.Timer(0.05, queue.put, (item,)).start()
        assert queue.get(PATIENCE_S) is item
