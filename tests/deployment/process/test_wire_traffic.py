"""Traffic over real sockets besides plain data: tensors, many threads, large messages."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from support.core.engine_harness import request
from support.core.fake_engine import Engine
from support.waiting import PATIENCE_S, wait_until

from hardpoint.host.system.encoding import Decoder
from hardpoint.plugins import EngineCoreOutputs, EngineCoreRequest
from hardpoint.process.client import sockets as engine_sockets
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.protocol import RequestType

ADD, ABORT = RequestType.ADD, RequestType.ABORT


@pytest.fixture
def line():
    """A client's sockets, and an engine that the test plays."""
    sockets = EngineSockets()
    engine = Engine(sockets)
    engine.ready()
    assert sockets.poll_ready(int(PATIENCE_S * 1000)) is not None
    yield sockets, engine
    sockets.close()
    engine.close()


def tensors() -> dict[str, torch.Tensor]:
    """By name; tensors of 256 bytes and more are to be frames."""
    drawn = torch.Generator().manual_seed(5)
    noise = torch.randn(4000, generator=drawn)
    return {
        "inline": noise[:63],  # 252 bytes
        "frame": noise[:64].clone(),  # 256 bytes
        "half": noise.to(torch.bfloat16),
        "askew": noise.reshape(40, 100).t(),
        "small ints": torch.arange(31, dtype=torch.int64),  # 248 bytes
        "ints": torch.arange(32, dtype=torch.int64),
        "empty": torch.empty(0, 7),
        "not a number": torch.full((100,), float("nan")),
    }


FRAMES = 5


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    whole = [each.contiguous().reshape(-1).view(torch.uint8) for each in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and whole[0].equal(whole[1])


def assert_same(got: dict[str, torch.Tensor]) -> None:
    expected = tensors()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(got[name], tensor), name


class TestTensors:
    def test_large_ones_are_frames_on_the_way_there(self, line):
        sockets, engine = line
        sockets.send(ADD, request("a", kv_transfer_params=tensors()))
        kind, *frames = engine.heard()
        assert kind == ADD
        assert len(frames) == 1 + FRAMES
        assert_same(Decoder(EngineCoreRequest).decode(frames).kv_transfer_params)

    def test_they_reach_the_engine_as_they_were(self, serve):
        seen = []
        (client,) = serve(check=seen.append).clients
        client.send(ADD, request("a", kv_transfer_params=tensors()))
        client.until(lambda: client.ends)
        assert_same(seen[0].kv_transfer_params)

    def test_large_ones_are_frames_on_the_way_back(self, serve):
        served = serve()
        (client,) = served.clients
        step = served.rig.core.step

        def spoiled(late_aborts):
            outputs, executed = step(late_aborts)
            for message in outputs.values():
                message.outputs[0].kv_transfer_params = tensors()
            return outputs, executed

        served.rig.core.step = spoiled
        client.send(ADD, request("a", max_tokens=1))
        assert client.output.poll(PATIENCE_S * 1000)
        frames = client.output.recv_multipart()
        assert len(frames) == 1 + FRAMES
        (output,) = Decoder(EngineCoreOutputs).decode(frames).outputs
        assert output.finished
        assert_same(output.kv_transfer_params)


def test_what_is_sent_is_kept_until_it_is_read_and_no_longer(line):
    sockets, engine = line
    arrays = [np.full(1 << 21, number, dtype=np.uint8) for number in range(8)]
    references = [weakref.ref(array) for array in arrays]
    for number, array in enumerate(arrays):
        sockets.send(ADD, request(f"r{number}", kv_transfer_params={"block": array}))
    del array
    arrays.clear()
    gc.collect()
    sockets.send(ABORT, ["r"])
    assert references[-1]() is not None
    for number in range(8):
        _, *frames = engine.heard()
        got = Decoder(EngineCoreRequest).decode(frames).kv_transfer_params["block"]
        assert got.shape == (1 << 21,)
        assert (got == number).all()
    engine.heard()

    # ZMQ's thread lets go of the last one a moment after it was read.
    wait_until(
        lambda: not any(each() is not None for each in references), what="the arrays to be let go"
    )


def test_many_threads_send_whole_messages_each_in_its_order(line, monkeypatch):
    monkeypatch.setattr(engine_sockets, "SEND_TIMEOUT_S", 60.0)
    sockets, engine = line
    threads, each = 8, 500

    def send(thread: int) -> None:
        for number in range(each):
            prompt = [thread, number] * (1 + number % 40)
            sockets.send(ADD, request(f"{thread} {number}", prompt=prompt))

    senders = [threading.Thread(target=send, args=(thread,)) for thread in range(threads)]
    for sender in senders:
        sender.start()
    decoder = Decoder(EngineCoreRequest)
    seen: dict[int, list[int]] = {thread: [] for thread in range(threads)}
    for _ in range(threads * each):
        _, *frames = engine.heard(PATIENCE_S)
        message = decoder.decode(frames)
        thread, number = map(int, message.request_id.split())
        assert message.prompt_token_ids == [thread, number] * (1 + number % 40)
        seen[thread].append(number)
    for sender in senders:
        sender.join(PATIENCE_S)
    assert seen == {thread: list(range(each)) for thread in range(threads)}
    assert engine.heard(0.05) is None
