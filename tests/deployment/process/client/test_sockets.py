"""The client's sockets, against an engine that the test plays."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import zmq
from support.core.fake_engine import READY, Engine
from support.internals import calls_of
from support.searching import searches_long
from support.waiting import PATIENCE_S, others_sleep, wait_until

from hardpoint import (
    ConfigError,
    EngineDeadError,
    EngineTimeoutError,
    HardpointError,
    PluginError,
)
from hardpoint.errors import PluginFaultError
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs
from hardpoint.process.client import sockets as engine_sockets
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.protocol import END_MARKERS, RequestType, UtilityCall, UtilityOutput

READY_MS = int(PATIENCE_S * 1000)


@pytest.fixture
def line():
    """Sockets, the engine at their other end, and the messages that were read."""
    sockets = EngineSockets()
    engine = Engine(sockets)
    engine.ready()
    ready = sockets.poll_ready(READY_MS)
    assert (ready.max_model_len, ready.num_gpu_blocks) == (64, 8)
    ended: Future = Future()
    outputs: list = []
    sockets.read(outputs.append, lambda error: ended.set_result(error))
    yield sockets, engine, outputs, ended
    engine.close()  # else sockets that have failed wait for the end of its connection
    sockets.close()


@pytest.fixture
def bound():
    """Sockets that no engine has connected to yet."""
    sockets = EngineSockets(manifest_hash="abc")
    yield sockets
    sockets.close()


@pytest.fixture
def stuck(line, monkeypatch):
    """The same as `line`; the engine reads nothing, until it takes no more."""
    monkeypatch.setattr(engine_sockets, "SEND_TIMEOUT_S", PATIENCE_S)
    sockets, _, _, _ = line
    fill(sockets)
    return line


def fill(sockets) -> int:
    """Send until nothing is taken any more; return how many messages that took."""
    count = refused = 0

    def is_full() -> bool:
        nonlocal count, refused
        while sockets.attempt(RequestType.ABORT, ["x" * 4000])():
            count, refused = count + 1, 0
            assert count < 5000
        refused += others_sleep()
        return refused == 20

    wait_until(is_full)
    return count


def heard_up_to(engine, kind) -> list:
    """Read until a message of a kind comes; return all, this one last."""
    messages = [engine.heard()]
    while messages[-1][0] != kind:
        messages.append(engine.heard())
    return messages


def test_an_engine_that_nobody_expects_is_refused():
    sockets = EngineSockets(index=1)
    other = Engine(sockets, identity=(7).to_bytes(2, "little"))
    other.ready()
    with pytest.raises(
        HardpointError, match=r"a message of engine b'\\x07\\x00', expected one of b'\\x01"
    ):
        sockets.poll_ready(READY_MS)
    assert sockets.poll_ready(1) is None
    other.close()
    sockets.close()


def test_messages_arrive_whole_and_in_order(line):
    sockets, engine, outputs, _ = line
    sockets.send(RequestType.ABORT, ["a", "b"])
    kind, payload = engine.input.recv_multipart()
    assert kind == RequestType.ABORT
    assert payload == b"".join(Encoder().encode(["a", "b"]))
    for number in range(20):
        engine.send(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=str(number))]))
    wait_until(lambda: len(outputs) == 20)
    assert [batch.outputs[0].request_id for batch in outputs] == [str(n) for n in range(20)]


def test_answers_find_their_calls_in_any_order(line):
    sockets, engine, outputs, _ = line
    first, second = (sockets.call("plugin_meters") for _ in range(2))
    engine.send(UtilityOutput.succeeded(99, "nobody asked"))
    engine.send(UtilityOutput.failed(1, "scheduler.policy: wrong", "ConfigError"))
    engine.send(UtilityOutput.succeeded(0, {}))
    assert first.result(PATIENCE_S) == {}
    with pytest.raises(ConfigError, match="^scheduler.policy: wrong$"):
        second.result(PATIENCE_S)
    assert outputs == []


def test_an_answer_of_another_type_fails_its_call_only(line):
    sockets, engine, _, ended = line
    bad, good = (sockets.call("scheduler_stats"), sockets.call("plugin_meters"))
    engine.send(UtilityOutput.succeeded(0, "no statistics"))
    engine.send(UtilityOutput.succeeded(1, {}))
    with pytest.raises(HardpointError, match="scheduler_stats"):
        bad.result(PATIENCE_S)
    assert good.result(PATIENCE_S) == {}
    assert not ended.done()


def test_a_call_that_was_given_up_is_forgotten(line):
    sockets, engine, _, _ = line
    given_up, waited_for = (sockets.call("plugin_meters") for _ in range(2))
    assert given_up.cancel()
    for number in range(2):
        engine.send(UtilityOutput.succeeded(number, {}))
    assert waited_for.result(PATIENCE_S) == {}


@pytest.mark.parametrize("marker", END_MARKERS)
def test_an_end_marker_ends_reading_without_an_error(line, marker):
    _, engine, _, ended = line
    engine.send(marker)
    assert ended.result(PATIENCE_S) is None


def test_what_is_no_message_ends_reading_with_the_reason(line):
    _, engine, _, ended = line
    engine.send(b"\xc1 garbage")
    assert isinstance(ended.result(PATIENCE_S), HardpointError)


def test_after_the_end_nothing_is_sent_and_all_calls_fail(line):
    sockets, _, _, _ = line
    future = sockets.call("plugin_meters")
    sockets.fail(PluginFaultError("plugin 'p' broke"))
    sockets.fail(ValueError("a later word counts no more"))
    for attempt in (future.result, lambda: sockets.send(RequestType.ABORT, ["a"])):
        with pytest.raises(EngineDeadError, match="^plugin 'p' broke$") as error:
            attempt()
        assert isinstance(error.value.__cause__, PluginFaultError)
    with pytest.raises(EngineDeadError, match="plugin 'p' broke"):
        sockets.call("plugin_meters")
    assert calls_of(sockets) == {}


def test_an_engine_that_is_not_there_cannot_be_reached():
    sockets = EngineSockets()
    with pytest.raises(EngineDeadError, match="the engine cannot be reached: "):
        sockets.send(RequestType.ABORT, ["a"])
    sockets.close()


# Before the engine is there


def test_one_context_and_both_addresses_from_the_start(bound):
    assert bound._context.get(zmq.IO_THREADS) == 2
    assert bound._input.context is bound._output.context is bound._context
    addresses = bound.addresses.inputs + bound.addresses.outputs
    assert [Path(each.removeprefix("ipc://")).is_socket() for each in addresses] == [True, True]


def test_what_comes_before_somebody_reads_is_not_lost():
    sockets = EngineSockets()
    engine = Engine(sockets)
    for number in range(5):
        engine.send(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=str(number))]))
    time.sleep(0.1)
    outputs: list = []
    sockets.read(outputs.append, lambda _: None)
    wait_until(lambda: len(outputs) == 5)
    sockets.close()
    engine.close()


@pytest.mark.parametrize(
    ("word", "error", "words"),
    [
        (
            ["SERVING", 1, "abc", 64],
            HardpointError,
            "protocol version: expected 5, got 1; frontend and engine need the same version of ",
        ),
        (["SERVING", 0], HardpointError, "protocol version: expected 5, got 0; "),
        (READY, PluginError, "manifest: the engine has the plugin set , expected abc"),
        (["SERVING", 5, "abd", 64], PluginError, "the plugin set abd, expected abc"),
        (["SERVING", 5, "abc"], HardpointError, "EngineCoreReadyResponse: expected a list of at"),
        (["READY", 5, True, True], HardpointError, "status: invalid value 'READY'"),
        (3, HardpointError, "handshake: expected a list, got a whole number"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(bound, word, error, words):
    engine = Engine(bound)
    engine.ready(word)
    with pytest.raises(error) as raised:
        bound.poll_ready(READY_MS)
    assert words in str(raised.value)
    engine.close()


# Strangers, and words that nobody expects


def test_a_second_first_word_breaks_nothing(line):
    sockets, engine, outputs, ended = line
    engine.ready()
    engine.ready(["SERVING", 9])
    sockets.send(RequestType.ABORT, ["a"])
    assert engine.heard()[0] == RequestType.ABORT
    engine.send(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a")]))
    wait_until(lambda: outputs)
    assert not ended.done()


def test_a_second_engine_of_that_name_gets_nothing(line):
    """A ROUTER hands an identity over only where it is told to."""
    sockets, engine, _, _ = line
    thief = Engine(sockets)
    thief.ready()
    time.sleep(0.1)
    for number in range(10):
        sockets.send(RequestType.ABORT, [str(number)])
    got = [Decoder(list[str]).decode(engine.heard()[1:]) for _ in range(10)]
    assert got == [[str(number)] for number in range(10)]
    assert thief.heard(0.1) is None
    thief.close()


# The end


def test_closing_does_not_wait_for_what_is_not_read():
    sockets = EngineSockets()
    engine = Engine(sockets)
    taken: list = []

    def slowly(batch):
        taken.append(batch)
        time.sleep(0.05)

    sockets.read(slowly, lambda _: None)
    for number in range(1000):
        engine.send(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=str(number))]))
    wait_until(lambda: taken)
    began = time.monotonic()
    sockets.close()
    assert time.monotonic() - began < 20
    count = len(taken)
    assert count < 500
    time.sleep(0.1)
    assert len(taken) == count
    engine.close()


def test_calls_answered_while_all_are_failed():
    """Every future ends one way or the other, and nothing else is raised, however they meet."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30 if searches_long() else 8):
            answered_while_failed()
    finally:
        sys.setswitchinterval(interval)


def answered_while_failed() -> None:
    sockets = EngineSockets()
    engine = Engine(sockets)
    engine.ready()
    assert sockets.poll_ready(READY_MS) is not None
    ended: list = []
    sockets.read(lambda _: None, ended.append)
    futures = [sockets.call("plugin_meters") for _ in range(100)]
    late: list = []

    def more():
        try:
            while True:
                late.append(sockets.call("plugin_meters"))
        except EngineDeadError as error:
            late.append(error)

    caller = threading.Thread(target=more)
    caller.start()
    for number in range(100):
        engine.send(UtilityOutput.succeeded(number, {}))
    wait_until(lambda: any(future.done() for future in futures))
    sockets.fail(EngineDeadError("gone"))
    caller.join(PATIENCE_S)
    assert isinstance(late.pop(), EngineDeadError)
    for future in futures + late:
        assert isinstance(future.exception(PATIENCE_S), EngineDeadError | None)
    assert calls_of(sockets) == {}
    engine.close()
    sockets.close()
    assert ended == []


# An engine that takes nothing


def num_unsent(sockets: EngineSockets) -> int:
    """Return the number of messages that the engine has no room for."""
    return len(sockets._backlog)


def test_requests_are_turned_away_and_what_must_arrive_waits(stuck):
    sockets, engine, _, _ = stuck
    began = time.monotonic()
    sockets.post(RequestType.ABORT, ["late"])
    given_up, waited_for = (sockets.call("plugin_meters") for _ in range(2))
    assert not sockets.attempt(RequestType.ADD, "a request")()
    assert time.monotonic() - began < PATIENCE_S / 2
    assert given_up.cancel()
    read = heard_up_to(engine, RequestType.UTILITY)[-2:]  # before them, what filled the pipe
    assert [message[0] for message in read] == [RequestType.ABORT, RequestType.UTILITY]
    assert engine.heard(0.1) is None
    assert Decoder(list[str]).decode(read[0][1:]) == ["late"]
    call = Decoder(UtilityCall).decode(read[1][1:])
    engine.send(UtilityOutput.succeeded(call.call_id, {}))
    assert waited_for.result(PATIENCE_S) == {}
    assert sockets.attempt(RequestType.ADD, "a request")()


def test_what_tries_again_is_not_encoded_again(stuck, monkeypatch):
    sockets, engine, _, _ = stuck
    encoded = []
    encode = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda *arguments: encoded.append(1) or encode(*arguments)
    )
    attempt = sockets.attempt(RequestType.ADD, "a long request")
    assert not any(attempt() for _ in range(20))
    while not attempt():
        engine.heard(0.05)
    assert len(encoded) == 1
    message = heard_up_to(engine, RequestType.ADD)[-1]
    assert Decoder(str).decode(message[1:]) == "a long request"


def test_what_another_abort_costs_does_not_grow_with_those_that_wait(stuck, monkeypatch):
    sockets, _, _, _ = stuck
    looks = []
    unsent = engine_sockets._Unsent
    wanted = unsent.is_wanted.fget
    counted = property(lambda each: looks.append(1) or wanted(each))
    monkeypatch.setattr(unsent, "is_wanted", counted)
    for number in range(300):
        sockets.post(RequestType.ABORT, [str(number)])
    assert num_unsent(sockets) == 300
    assert len(looks) < 10_000  # at the first one each time, and now and then by the reader


def test_calls_that_are_given_up_do_not_pile_up(stuck):
    sockets, _, _, _ = stuck
    for _ in range(500):
        assert sockets.call("plugin_meters").cancel()
    assert num_unsent(sockets) <= 1
    assert calls_of(sockets) == {}


def test_whoever_can_wait_is_told_in_the_end(stuck, monkeypatch):
    sockets, _, _, _ = stuck
    monkeypatch.setattr(engine_sockets, "SEND_TIMEOUT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(EngineTimeoutError, match="^the engine took no message for 0.2 s$"):
        sockets.send(RequestType.ADD, "a request")
    assert 0.2 <= time.monotonic() - began < PATIENCE_S / 2


def test_whoever_waits_to_send_is_told_of_the_death(stuck):
    sockets, _, _, _ = stuck
    threading.Timer(0.1, sockets.fail, (EngineDeadError("it was killed"),)).start()
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="^it was killed$"):
        sockets.send(RequestType.ADD, "a request")
    assert time.monotonic() - began < PATIENCE_S / 2


def test_whoever_waits_to_send_goes_on_when_the_engine_does(stuck):
    sockets, engine, _, _ = stuck
    reads, sent = threading.Event(), threading.Event()

    def read():
        time.sleep(0.1)
        reads.set()
        while not sent.is_set():
            engine.heard(0.05)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    began = time.monotonic()
    sockets.send(RequestType.ABORT, ["a"])
    assert time.monotonic() - began < PATIENCE_S / 2
    assert reads.is_set()
    sent.set()
    reader.join(PATIENCE_S)


def test_what_waits_for_an_engine_that_died_is_forgotten(stuck):
    sockets, engine, _, _ = stuck
    sockets.post(RequestType.ABORT, ["late"])
    sockets.fail(EngineDeadError("it was killed"))
    assert num_unsent(sockets) == 0
    with pytest.raises(EngineDeadError, match="^it was killed$"):
        sockets.post(RequestType.ABORT, ["later"])
    while (message := engine.heard(0.2)) is not None:
        assert Decoder(list[str]).decode(message[1:]) == ["x" * 4000]
