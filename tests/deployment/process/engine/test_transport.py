"""The threads beside the loop, over real sockets."""

from __future__ import annotations

import random
import threading
import time

import pytest
import zmq
from support.core.engine_harness import LoopRig, MidStep, ScriptedExecutor, expected, request
from support.core.io_harness import ME, READY
from support.waiting import PATIENCE_S, wait_until

from hardpoint.host.system.encoding import Encoder
from hardpoint.process.engine import transport as engine_io
from hardpoint.process.engine.transport import EngineIO
from hardpoint.process.protocol import (
    ENGINE_CORE_DEAD,
    ENGINE_CORE_EXITED,
    EngineAddresses,
    RequestType,
    UtilityCall,
    UtilityOutput,
)

LONG = 190


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

    def test_a_client_is_known_by_its_connection_and_ends_its_own_requests_alone(self, serve):
        first, second = serve(clients=2).clients
        first.send(RequestType.UTILITY, UtilityCall(0, 1, "pause", ["keep"]))
        first.until(lambda: 1 in first.answers)  # else "b" might end before it is aborted
        first.send(RequestType.ADD, request("a", max_tokens=LONG))
        second.send(RequestType.ADD, request("b", max_tokens=LONG))  # its client_index is 0
        second.send(RequestType.UTILITY, UtilityCall(0, 1, "scheduler_stats"))
        second.send(RequestType.ABORT, ["a", "b"])
        second.until(lambda: second.ends and 1 in second.answers)
        first.send(RequestType.UTILITY, UtilityCall(0, 2, "resume"))
        first.until(lambda: first.ends)
        assert (first.ends, second.ends) == ({"a": "length"}, {"b": "abort"})
        assert first.tokens == {"a": expected([1, 2, 3], LONG)}

    def test_a_duplicate_id_harms_only_its_sender(self, serve):
        executor = ScriptedExecutor()
        step = MidStep(executor)
        served = serve(executor, clients=2)
        first, second = served.clients
        first.send(RequestType.ADD, request("a", max_tokens=60))
        assert step.begun.wait(PATIENCE_S)
        second.send(RequestType.ADD, request("a", client_index=1))
        wait_until(lambda: served.rig.queues.input.qsize() == 1)
        step.go_on.set()
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
        cut, noise = Encoder().encode(request("cut")), random.Random(0).randbytes
        client.raw(b"")
        client.raw(noise(50), noise(50))
        client.raw(bytes(RequestType.ADD))
        client.raw(bytes(RequestType.ADD), noise(100))
        client.raw(bytes(RequestType.ADD), bytes(cut[0])[:20])
        client.raw(bytes(RequestType.ADD), noise(8 << 20))
        client.raw(bytes(RequestType.ADD), b"\xdd\xff\xff\xff\xff")
        client.raw(bytes(RequestType.ABORT), b"\x01")
        client.raw(bytes(RequestType.UTILITY), b"\x93\x00")
        client.raw(b"\x02", b"\x92\x00\x00")
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


LARGE = "x" * 100_000  # a few of them are more than a connection holds that nobody reads from


class TestAClientThatDoesNotRead:
    def test_it_holds_up_nobody_and_loses_nothing(self, serve, monkeypatch):
        monkeypatch.setattr(engine_io, "_SEND_HWM", 2)
        executor = ScriptedExecutor()
        step = MidStep(executor)
        served = serve(executor, clients=2, receive_at_most=1)
        deaf, well = served.clients
        served.rig.core.plugin_meters = lambda: LARGE
        for number in range(50):
            deaf.send(RequestType.UTILITY, UtilityCall(0, number, "plugin_meters"))
        for number in range(8):
            deaf.send(RequestType.ADD, request(f"d{number}", max_tokens=LONG))
        assert step.begun.wait(PATIENCE_S)
        there = [served.rig.core.num_unfinished_requests, served.rig.queues.input.qsize]
        wait_until(lambda: sum(count() for count in there) == 8)
        well.send(RequestType.ADD, request("w", client_index=1, max_tokens=LONG))
        step.go_on.set()
        well.until(lambda: well.ends)
        assert well.tokens["w"] == expected([1, 2, 3], LONG)
        deaf.until(lambda: len(deaf.ends) == 8)
        assert deaf.tokens == {f"d{n}": expected([1, 2, 3], LONG) for n in range(8)}
        assert deaf.messages - 50 < LONG / 2  # most of it was merged

    def test_its_messages_are_not_read_either_while_it_is_far_behind(self, serve, monkeypatch):
        monkeypatch.setattr(engine_io, "_SEND_HWM", 2)
        monkeypatch.setattr("hardpoint.process.engine.sender._MAX_UNSENT", 20)
        served = serve(clients=2, receive_at_most=1)
        deaf, well = served.clients
        served.rig.core.plugin_meters = lambda: LARGE
        for number in range(40):
            deaf.send(RequestType.UTILITY, UtilityCall(0, number, "plugin_meters"))
        wait_until(lambda: served.rig.queues.output.is_full(0))
        for number in range(40, 200):
            deaf.send(RequestType.UTILITY, UtilityCall(0, number, "is_paused"))
        time.sleep(0.1)
        assert len(served.rig.queues.output._queues[0]) < 60
        well.send(RequestType.UTILITY, UtilityCall(1, 5, "is_paused"))
        well.until(lambda: well.answers)
        deaf.until(lambda: len(deaf.answers) == 200)


class TestTheEnd:
    @pytest.fixture
    def patient(self, monkeypatch):
        """Gives clients longer to read the rest than they can need."""
        monkeypatch.setattr(engine_io, "_LINGER_MS", 60_000)

    def test_what_is_left_is_sent_before_the_marker_of_a_clean_end(self, serve, patient):
        served = serve()
        (client,) = served.clients
        client.send(RequestType.ADD, request("a", max_tokens=LONG))
        client.until(lambda: client.tokens)
        served.close()
        client.until(lambda: client.end_marker)
        assert client.end_marker == ENGINE_CORE_EXITED
        assert client.ends

    def test_a_failed_engine_tells_every_client(self, serve, patient):
        served = serve(clients=2)
        served.close(failed=True)
        for client in served.clients:
            client.until(lambda client=client: client.end_marker)
            assert client.end_marker == ENGINE_CORE_DEAD

    def test_the_marker_comes_after_what_is_left(self, serve, patient):
        served = serve()
        (client,) = served.clients
        for number in range(5):
            served.rig.queues.output.put(0, UtilityOutput.succeeded(number, None))
        served.close(failed=True)
        client.until(lambda: client.end_marker)
        assert sorted(client.answers) == [0, 1, 2, 3, 4]

    def test_a_client_that_reads_nothing_holds_up_the_end_for_a_while_only(
        self, serve, monkeypatch
    ):
        monkeypatch.setattr(engine_io, "_SEND_HWM", 1)
        monkeypatch.setattr(engine_io, "_LINGER_MS", 300)
        served = serve(receive_at_most=1)
        held = served.rig.queues.output
        for number in range(50):
            held.put(0, UtilityOutput.succeeded(number, LARGE))
        began = time.monotonic()
        served.close(failed=True)
        assert 0.3 <= time.monotonic() - began < PATIENCE_S / 2

    def test_nobody_left_to_hear_means_no_waiting(self, serve, patient):
        served = serve(receive_at_most=1)
        for number in range(200):
            served.rig.queues.output.put(0, UtilityOutput.succeeded(number, LARGE))
        began = time.monotonic()
        served.close(has_clients=False)
        assert time.monotonic() - began < PATIENCE_S / 2

    def test_a_sender_that_hangs_is_waited_for_5_s_and_no_longer(self, serve, monkeypatch, caplog):
        served, hangs, go_on = serve(), threading.Event(), threading.Event()

        def hang(message, buffer, client):
            hangs.set()
            assert go_on.wait(PATIENCE_S)
            return [buffer]

        monkeypatch.setattr(served.io._encoder, "encode_into", hang)
        served.rig.queues.output.put(0, UtilityOutput.succeeded(1, None))
        assert hangs.wait(PATIENCE_S)
        joined, join = [], served.io._writer.join
        monkeypatch.setattr(served.io._writer, "join", lambda s: (joined.append(s), join(0.01)))
        closing = threading.Thread(target=served.close)
        closing.start()
        wanted = "the output thread did not end"
        wait_until(lambda: wanted in caplog.text)
        go_on.set()
        closing.join(PATIENCE_S)
        assert joined == [5.0]
        (record,) = [r for r in caplog.records if r.getMessage() == wanted]
        assert record.levelname == "CRITICAL"

    def test_an_address_that_cannot_be_ends_the_loop(self, tmp_path):
        rig = LoopRig()
        addresses = EngineAddresses(inputs=["nowhere"], outputs=[f"ipc://{tmp_path}/out"])
        io = EngineIO(ME, addresses, rig.queues)
        io.start(READY)
        with rig:
            rig.join()
        io.close(failed=True, has_clients=False)
        assert isinstance(rig.error, zmq.ZMQError)
