"""The last messages of an engine process, and the errors that its client raises."""

from __future__ import annotations

import threading
import time

import pytest
from support.waiting import PATIENCE_S, wait_until

from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.client import process_client
from hardpoint.process.client.process_client import EngineStart, ProcessClient
from hardpoint.process.protocol import ENGINE_CORE_DEAD, ENGINE_CORE_EXITED


class Sink:
    """Takes outputs as slowly as a test lets it."""

    def __init__(self):
        self.took, self.go_on = [], threading.Event()

    def __call__(self, item):
        error = item if isinstance(item, Exception) else item.outputs[0].error
        self.took.append(error or item.outputs[0].request_id)
        if not isinstance(item, Exception):
            assert self.go_on.wait(PATIENCE_S)


@pytest.fixture
def connected(played):
    """A client of an engine that is played, its sink, and the process."""
    start = EngineStart(EngineConfig(), ConfigSources(), Manifest(hardpoint="1", entries=()))
    sink = Sink()
    client = ProcessClient(start, sink, played)
    for name in "ab":  # outputs of other requests are left out
        client.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams())
        )
    yield client, sink, played
    sink.go_on.set()
    played.engine.close()  # else a client that has failed waits for the end of its connection
    client.close()


def send_output(played, request_id):
    last = EngineCoreOutput(request_id=request_id, finish_reason=FinishReason.LENGTH)
    played.engine.send(EngineCoreOutputs(outputs=[last], finished_requests={request_id}))


def test_outputs_come_before_the_failure_that_followed_them(connected):
    """However late the client is to read them."""
    _client, sink, played = connected
    send_output(played, "a")
    wait_until(lambda: sink.took == ["a"], PATIENCE_S, "the first output")
    send_output(played, "b")
    played.fail(PluginFaultError("plugin 'dense': KeyError"))
    played.engine.send(ENGINE_CORE_DEAD)
    time.sleep(0.2)
    assert sink.took == ["a"]
    sink.go_on.set()
    wait_until(lambda: isinstance(sink.took[-1], Exception), PATIENCE_S, "the failure")
    *outputs, error = sink.took
    assert outputs == ["a", "b"]
    assert isinstance(error, EngineDeadError)
    assert str(error) == "plugin 'dense': KeyError"


def test_outputs_come_before_the_end_of_a_process_that_exits_in_order(connected):
    """Though its exit is noticed before they are read, and by a sender too."""
    client, sink, played = connected
    send_output(played, "a")
    wait_until(lambda: sink.took == ["a"], PATIENCE_S, "the first output")
    send_output(played, "b")
    played.engine.send(ENGINE_CORE_EXITED)
    played.exit()
    time.sleep(0.2)  # the watcher notices the exit
    with pytest.raises(EngineDeadError, match="exited with code 0"):
        client.call("is_paused")
    assert sink.took == ["a"]
    sink.go_on.set()
    wait_until(lambda: isinstance(sink.took[-1], Exception), PATIENCE_S, "the end")
    *outputs, error = sink.took
    assert outputs == ["a", "b"]
    assert str(error) == "the engine process exited with code 0"


def test_what_an_engine_has_not_read_fails_at_its_end_marker(connected):
    """The process may live for long: it closes plugins."""
    client, sink, played = connected
    sink.go_on.set()
    send_output(played, "a")
    answer = client.call("is_paused")
    played.engine.send(ENGINE_CORE_EXITED)
    with pytest.raises(EngineDeadError, match=r"^the engine is shutting down$"):
        answer.result(PATIENCE_S)
    wait_until(lambda: len(sink.took) == 2, PATIENCE_S, "the end of b")
    assert sink.took == ["a", "the engine is shutting down"]
    late = EngineCoreRequest(request_id="c", prompt_token_ids=[1], params=SamplingParams())
    for send in (lambda: client.add_request(late), lambda: client.call("is_paused")):
        with pytest.raises(EngineDeadError, match=r"^the engine is shutting down$"):
            send()
    client.abort_requests(["b"])
    played.exit()
    wait_until(lambda: len(sink.took) == 3, PATIENCE_S, "the end of the process")
    assert str(sink.took[-1]) == "the engine process exited with code 0"


def test_a_failure_is_told_though_the_outputs_do_not_end(connected, monkeypatch):
    monkeypatch.setattr(process_client, "_LAST_OUTPUTS_TIMEOUT_S", 0.1)
    client, sink, played = connected
    played.fail(EngineDeadError("no memory"))
    wait_until(lambda: sink.took, PATIENCE_S, "the failure")
    assert [str(each) for each in sink.took] == ["no memory"]
    with pytest.raises(EngineDeadError, match="no memory"):
        client.call("is_paused")


def test_closing_does_not_wait_for_outputs_of_an_engine_that_fails(connected, monkeypatch):
    monkeypatch.setattr(process_client, "_LAST_OUTPUTS_TIMEOUT_S", 600.0)
    client, sink, played = connected
    played.fail(EngineDeadError("no memory"))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < PATIENCE_S
    assert sink.took == []
