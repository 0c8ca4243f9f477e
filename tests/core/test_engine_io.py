"""The threads beside the loop, over real sockets."""

from __future__ import annotations

import os
import time

import pytest
import zmq
from engine_harness import PATIENCE_S, LoopRig, ScriptedExecutor, expected, request

from hardpoint.core import engine_io
from hardpoint.core.engine_io import EngineIO
from hardpoint.core.incoming import RequestCheck
from hardpoint.core.wire import (
    ENGINE_CORE_DEAD,
    Decoder,
    Encoder,
    EngineAddresses,
    EngineCoreReadyResponse,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from hardpoint.plugins import EngineCoreOutputs

READY = EngineCoreReadyResponse(200, 64)
ME = b"\x00\x00"
LONG = 190


class Client:
    """The other end, with what it was told."""

    def __init__(self, folder, number, *, receive_at_most=1000):
        self.input_address = f"ipc://{folder}/in{number}"
        self.output_address = f"ipc://{folder}/out{number}"
        self._context = zmq.Context()
        self.input = self._context.socket(zmq.ROUTER)
        self.input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.input.bind(self.input_address)
        self.output = self._context.socket(zmq.PULL)
        self.output.setsockopt(zmq.RCVHWM, receive_at_most)
        self.output.bind(self.output_address)
        self._decoder = Decoder(EngineCoreOutputs | UtilityOutput)
        self.tokens, self.errors, self.answers = {}, {}, {}
        self.ends, self.messages, self.dead = {}, 0, False

    def wait_until_ready(self):
        assert self.input.poll(PATIENCE_S * 1000)
        identity, *frames = self.input.recv_multipart()
        assert identity == ME
        return Decoder(EngineCoreReadyResponse).decode(frames)

    def send(self, kind, message):
        self.raw(bytes(kind), *Encoder().encode(message))

    def raw(self, *frames):
        self.input.send_multipart([ME, *frames])

    def read(self, seconds=0.01):
        """Take one message, if it comes in time."""
        if not self.output.poll(seconds * 1000):
            return False
        frames = self.output.recv_multipart()
        self.messages += 1
        if frames == [ENGINE_CORE_DEAD]:
            self.dead = True
            return True
        message = self._decoder.decode(frames)
        if isinstance(message, UtilityOutput):
            self.answers[message.call_id] = message
            return True
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                self.ends[output.request_id] = str(output.finish_reason)
                self.errors[output.request_id] = output.error
        return True

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come to that"
            self.read()

    def close(self):
        self._context.destroy(0)


class Served:
    """A loop with its threads, and clients."""

    def __init__(self, folder, executor=None, *, clients=1, receive_at_most=1000):
        self.clients = [
            Client(folder, number, receive_at_most=receive_at_most) for number in range(clients)
        ]
        self.rig = LoopRig(executor, clients=clients, max_num_seqs=64)
        self.io = EngineIO(
            ME,
            EngineAddresses(
                inputs=[client.input_address for client in self.clients],
                outputs=[client.output_address for client in self.clients],
            ),
            self.rig.queues,
            RequestCheck(100_000),
        )
        self.io.start(READY)
        self.rig._thread.start()
        for client in self.clients:
            assert client.wait_until_ready() == READY
        self.closed = False

    def close(self, *, failed=False, heard=True):
        if self.closed:
            return
        self.closed = True
        self.rig.loop.request_shutdown()
        self.rig.loop.request_shutdown()
        self.rig._thread.join(PATIENCE_S)
        self.io.close(failed=failed, heard=heard)


@pytest.fixture
def serve(tmp_path):
    opened = []

    def start(*args, **options):
        served = Served(tmp_path, *args, **options)
        opened.append(served)
        return served

    yield start
    for served in opened:
        served.close(heard=False)
        for client in served.clients:
            client.close()


class TestTraffic:
    def test_outputs_go_to_the_client_that_asked(self, serve):
        served = serve(clients=2)
        for number, client in enumerate(served.clients):
            client.send(RequestType.ADD, request("a" + str(number), client_index=number))
        for number, client in enumerate(served.clients):
            name = f"a{number}"
            client.until(lambda client=client: client.ends)
            assert client.tokens == {name: expected([1, 2, 3], 4)}

    def test_calls_and_aborts(self, serve):
        (client,) = serve().clients
        client.send(RequestType.UTILITY, UtilityCall(0, 1, "pause", ["keep"]))
        client.send(RequestType.ADD, request("a"))
        client.send(RequestType.ABORT, ["a", "unknown"])
        client.until(lambda: client.ends == {"a": "abort"} and 1 in client.answers)
        assert client.answers[1].failure is None

    def test_a_duplicate_id_harms_only_its_sender(self, serve):
        slow = ScriptedExecutor()
        slow.during = lambda plan: time.sleep(0.005)
        first, second = serve(slow, clients=2).clients
        first.send(RequestType.ADD, request("a", max_tokens=60))
        first.until(lambda: first.tokens)
        second.send(RequestType.ADD, request("a", client_index=1))
        second.until(lambda: second.ends)
        assert second.errors == {"a": "request_id: 'a' is the id of a live request"}
        first.until(lambda: first.ends)
        assert first.tokens == {"a": expected([1, 2, 3], 60)}

    def test_a_result_that_cannot_travel_is_a_failed_call(self, serve):
        served = serve()
        (client,) = served.clients
        served.rig.core.plugin_meters = object
        client.send(RequestType.UTILITY, UtilityCall(0, 1, "plugin_meters"))
        client.until(lambda: 1 in client.answers)
        assert "object cannot travel between processes" in client.answers[1].failure
        client.send(RequestType.UTILITY, UtilityCall(0, 2, "is_paused"))
        client.until(lambda: 2 in client.answers)


class TestBadInput:
    def test_the_loop_lives_through_rubbish(self, serve):
        served = serve()
        (client,) = served.clients
        cut = Encoder().encode(request("cut"))
        client.raw(b"")
        client.raw(os.urandom(50), os.urandom(50))
        client.raw(bytes(RequestType.ADD))
        client.raw(bytes(RequestType.ADD), os.urandom(100))
        client.raw(bytes(RequestType.ADD), bytes(cut[0])[:20])
        client.raw(bytes(RequestType.ADD), os.urandom(8 << 20))
        client.raw(bytes(RequestType.ADD), b"\xdd\xff\xff\xff\xff")
        client.raw(bytes(RequestType.ABORT), b"\x01")
        client.raw(bytes(RequestType.UTILITY), b"\x93\x00")
        client.raw(bytes(RequestType.START_DP_WAVE), b"\x92\x00\x00")
        client.raw(*[b"\x00"] * 100)
        client.send(RequestType.ADD, request("good"))
        client.until(lambda: "good" in client.ends)
        assert client.errors["cut"] == "EngineCoreRequest: the frame is truncated"
        assert client.tokens["good"] == expected([1, 2, 3], 4)

    def test_a_request_that_cannot_be_computed_is_answered(self, serve):
        (client,) = serve().clients
        client.send(RequestType.ADD, request("a", prompt=[100_000]))
        client.until(lambda: client.ends)
        assert client.errors["a"].startswith("prompt_token_ids: expected token ids from 0 to 99999")


class TestAClientThatDoesNotRead:
    def test_it_holds_up_nobody_and_loses_nothing(self, serve, monkeypatch):
        monkeypatch.setattr(engine_io, "_MOST_UNREAD", 2)
        served = serve(clients=2, receive_at_most=1)
        deaf, well = served.clients
        for number in range(8):
            deaf.send(RequestType.ADD, request(f"d{number}", max_tokens=LONG))
        well.send(RequestType.ADD, request("w", client_index=1, max_tokens=LONG))
        well.until(lambda: well.ends)
        assert well.tokens["w"] == expected([1, 2, 3], LONG)
        deaf.until(lambda: len(deaf.ends) == 8)
        assert deaf.tokens == {f"d{n}": expected([1, 2, 3], LONG) for n in range(8)}
        assert deaf.messages < LONG / 2  # most of it was merged

    def test_its_messages_are_not_read_either_while_it_is_far_behind(self, serve, monkeypatch):
        monkeypatch.setattr(engine_io, "_MOST_UNREAD", 2)
        monkeypatch.setattr("hardpoint.core.outbox._MOST_HELD", 20)
        served = serve(clients=2, receive_at_most=1)
        deaf, well = served.clients
        for number in range(200):
            deaf.send(RequestType.UTILITY, UtilityCall(0, number, "is_paused"))
        deadline = time.monotonic() + PATIENCE_S
        while not served.rig.queues.output.is_full(0):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.1)
        assert len(served.rig.queues.output._held[0]) < 60
        well.send(RequestType.UTILITY, UtilityCall(1, 5, "is_paused"))
        well.until(lambda: well.answers)
        deaf.until(lambda: len(deaf.answers) == 200)


class TestTheEnd:
    def test_what_is_left_is_sent_and_a_clean_end_has_no_marker(self, serve):
        served = serve()
        (client,) = served.clients
        client.send(RequestType.ADD, request("a", max_tokens=LONG))
        client.until(lambda: client.tokens)
        served.close()
        client.until(lambda: client.ends)
        while client.read(0.1):
            pass
        assert not client.dead

    def test_a_failed_engine_tells_every_client(self, serve):
        served = serve(clients=2)
        served.close(failed=True)
        for client in served.clients:
            client.until(lambda client=client: client.dead)

    def test_the_marker_comes_after_what_is_left(self, serve):
        served = serve()
        (client,) = served.clients
        for number in range(5):
            served.rig.queues.output.put(0, UtilityOutput.succeeded(number, None))
        served.close(failed=True)
        client.until(lambda: client.dead)
        assert sorted(client.answers) == [0, 1, 2, 3, 4]

    def test_a_client_that_reads_nothing_holds_up_the_end_for_a_while_only(
        self, serve, monkeypatch
    ):
        monkeypatch.setattr(engine_io, "_MOST_UNREAD", 1)
        monkeypatch.setattr(engine_io, "_LINGER_MS", 300)
        served = serve(receive_at_most=1)
        held = served.rig.queues.output
        for number in range(50):
            held.put(0, UtilityOutput.succeeded(number, None))
        began = time.monotonic()
        served.close(failed=True)
        assert time.monotonic() - began < 4

    def test_nobody_left_to_hear_means_no_waiting(self, serve):
        served = serve(receive_at_most=1)
        for number in range(5000):
            served.rig.queues.output.put(0, UtilityOutput.succeeded(number, None))
        began = time.monotonic()
        served.close(heard=False)
        assert time.monotonic() - began < 1

    def test_an_address_that_cannot_be_ends_the_loop(self, tmp_path):
        rig = LoopRig()
        addresses = EngineAddresses(inputs=["nowhere"], outputs=[f"ipc://{tmp_path}/out"])
        io = EngineIO(ME, addresses, rig.queues)
        io.start(READY)
        with rig:
            rig.join()
        io.close(failed=True, heard=False)
        assert isinstance(rig.error, zmq.ZMQError)
