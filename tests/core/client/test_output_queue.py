"""Where outputs wait for their consumer: one entry per request, and then the end."""

from __future__ import annotations

import threading
import time

from hardpoint.core.client.output_queue import OutputQueue
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs
from hardpoint.plugins.errors import EngineDeadError

END = EngineDeadError("gone")


def batch(*tokens: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="a", new_token_ids=list(tokens))] if tokens else []
    )


def test_who_keeps_up_gets_the_very_batches():
    inbox = OutputQueue()
    for number in (1, 2):
        sent = batch(number)
        inbox.put(sent)
        assert inbox.get(None) is sent


def test_what_waits_is_merged():
    inbox = OutputQueue()
    for number in range(1000):
        inbox.put(batch(number))
    assert len(inbox) == 1
    assert inbox.get(None).outputs[0].new_token_ids == list(range(1000))
    assert len(inbox) == 0


def test_a_batch_without_outputs_is_one_too():
    inbox = OutputQueue()
    inbox.put(batch())
    assert len(inbox) == 1
    assert inbox.get(None).outputs == []


def test_the_end_comes_after_the_outputs_and_stays():
    inbox = OutputQueue()
    inbox.put(batch(1))
    inbox.put(END)
    assert inbox.get(0).outputs[0].new_token_ids == [1]
    assert [inbox.get(seconds) for seconds in (0, None, 5)] == [END] * 3


def test_waiting_no_longer_than_asked():
    inbox = OutputQueue()
    began = time.monotonic()
    assert inbox.get(0) is None
    assert time.monotonic() - began < 5
    assert inbox.get(0.1) is None
    assert 0.1 <= time.monotonic() - began < 10


def test_what_comes_wakes_who_waits():
    for item in (batch(1), END):
        inbox = OutputQueue()
        threading.Timer(0.05, inbox.put, (item,)).start()
        assert inbox.get(20) is item
