"""Whatever comes to an engine's sockets is answered or dropped with a word; the loop lives."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import msgspec
import pytest
import zmq
from support.process.harness import PATIENCE_S, process_config, wait_until
from support.process.raw_client import IDENTITY, RawClient, request
from support.waiting import HeldSteps

from hardpoint.host.system.encoding import Encoder
from hardpoint.plugins import FinishReason, SamplingParams
from hardpoint.process.protocol import RequestType, UtilityCall

GREEDY_200 = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
ADD, ABORT, UTILITY = RequestType.ADD, RequestType.ABORT, RequestType.UTILITY


@pytest.fixture(scope="module")
def client(endless):
    config = process_config(endless, {"plugins": {"enable": ["support.plugins.slow:Slow"]}})
    client = RawClient(config)
    yield client
    client.close()


@pytest.fixture(scope="module")
def expected(client) -> list[int]:
    """The tokens of the right request."""
    client.add("right")
    return client.ends(["right"])["right"].new_token_ids


@pytest.fixture(autouse=True)
def lives(client, expected):
    """After every test the engine works as before, and holds nothing."""
    yield
    assert client.process.returncode is None
    client.add("after")
    assert client.ends(["after"])["after"].new_token_ids == expected
    stats = client.call("scheduler_stats").result.value
    assert (stats["num_running"], stats["num_waiting"], stats["kv_cache_usage"]) == (0, 0, 0.0)


def whole(request_id: str = "r", **fields) -> list[bytes]:
    return [bytes(frame) for frame in Encoder().encode(request(request_id, **fields))]


def test_random_bytes(client):
    rng = random.Random(5)
    for _ in range(500):
        frames = [rng.randbytes(rng.choice([0, 1, 1, 2, 30])) for _ in range(rng.randint(1, 4))]
        client.send(*frames)
    for kind in (ADD, ABORT, UTILITY):
        for _ in range(200):
            client.send(kind, rng.randbytes(rng.randint(0, 60)))
    client.call("scheduler_stats")
    text = client.logged()
    assert "dropped a message" in text
    assert "request type: expected one of 00 (ADD)" in text


def test_truncated_and_mutated_requests(client):
    """Bytes that still read as a request may run; they must not do harm."""
    (frame,) = whole()
    for cut in range(len(frame)):
        client.send(ADD, frame[:cut])
    rng = random.Random(6)
    for _ in range(300):
        mutated = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        client.send(ADD, bytes(mutated))
    client.call("scheduler_stats")
    client.send_message(ABORT, ["r"])
    settle(client)


def settle(client) -> None:
    """Wait until all messages have run; requests under mutated ids are few tokens long."""
    until = time.monotonic() + 60
    while True:
        stats = client.call("scheduler_stats").result.value
        running, waiting = stats[:2] if isinstance(stats, list) else list(stats.values())[:2]
        if not running and not waiting:
            return
        assert time.monotonic() < until, stats
        time.sleep(0.02)


def test_too_many_and_too_large_frames(client):
    client.send(ADD, *whole(), *[b"more"] * 50)
    client.send(ADD, b"\xc6\xff\xff\xff\xff" + b"x" * 100)  # announces 4 GiB
    client.send(ADD, bytes(32 << 20))
    client.send(ABORT, msgspec.msgpack.encode(["x" * (8 << 20)]))
    client.send(UTILITY, b"\x91" * 100_000)  # nested lists without an end
    client.send(ADD)
    settle(client)


@pytest.mark.parametrize("kind", [b"\x02", b"\x04", b"\x05", b"\x06", b"\xff", b"", b"\x00\x00"])
def test_request_types_that_are_none_of_a_clients(client, kind):
    client.send(kind, *whole())
    client.call("scheduler_stats")
    assert "dropped a message" in client.logged()


# Requests that are well formed and wrong


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_token_ids": [1, 99_999]}, "99999"),
        ({"prompt_token_ids": [-1]}, "-1"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1] * 40_000}, "40000"),
        ({"params": SamplingParams(temperature=-3.0, max_tokens=2)}, "temperature"),
        ({"params": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"plugin_args": {"nobody": {}}}, "nobody"),
        ({"plugin_args": {"slow": {"seconds": "long"}}}, "slow.seconds"),
        ({"plugin_args": {"top_k": {"k": "x"}}}, "top_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_request_ends_with_an_error(client, fields, text):
    client.add("wrong", **fields)
    client.add("beside")
    ends = client.ends(["wrong", "beside"])
    assert ends["wrong"].finish_reason is FinishReason.ERROR
    assert text in ends["wrong"].error
    assert ends["beside"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "fields",
    [
        {"params": SamplingParams(max_tokens=2, logprobs=9_999)},
        {"params": SamplingParams(max_tokens=2, prompt_logprobs=9_999)},
        {"params": SamplingParams(max_tokens=2, logit_bias={9_999: 1.0})},
        {"params": SamplingParams(max_tokens=2, stop_token_ids=[9_999])},
        {"eos_token_ids": [9_999], "params": SamplingParams(max_tokens=3, min_tokens=2)},
        {"arrival_time": float("nan"), "timeout": float("nan")},
        {"timeout": -5.0},
        {"priority": -(1 << 60)},
        {"child_index": -1},
        {"tags": {"": "x" * 10_000}},
        {"cache_salt": ""},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_strange_request_harms_no_other(client, expected, fields):
    client.add("strange", **fields)
    client.add("beside")
    assert client.ends(["strange", "beside"])["beside"].new_token_ids == expected


def test_outputs_for_clients_that_do_not_exist_are_dropped(client):
    for index in (1, 7, -1, -5, 1 << 40):
        client.add(f"nobody's {index}", client_index=index)
        client.send_message(UTILITY, UtilityCall(index, 1, "scheduler_stats"))
    settle(client)


def test_a_live_id_is_refused_and_the_first_goes_on(client, expected, tmp_path):
    held = HeldSteps(tmp_path)
    client.add("twin", params=GREEDY_200, plugin_args=held.slow(0.3))
    client.add("twin")
    text = "that has the id of its live request 'twin': request_id: 'twin' is "
    wait_until(lambda: text in client.log.read_text(), PATIENCE_S, "the refusal")
    held.let_go()
    seen, tokens = [], []
    while not seen:
        for output in client.receive().outputs:
            tokens += output.new_token_ids
            seen += [output.finish_reason] if output.finished else []
    assert seen == [FinishReason.LENGTH]
    assert tokens[: len(expected)] == expected
    assert len(tokens) == 200


def test_aborts_of_unknown_ended_and_repeated_ids(client, expected):
    client.send_message(ABORT, [])
    client.send_message(ABORT, ["nobody", "nobody", "", "x" * 1000])
    for wrong in ("right", {"a": 1}, [1, 2], [["a"]], None):
        client.send_message(ABORT, wrong)
    client.add("right")
    client.send_message(ABORT, ["nobody"])
    assert client.ends(["right"])["right"].new_token_ids == expected
    client.send_message(ABORT, ["right"])


def test_an_abort_right_after_its_request_wins(client):
    params = SamplingParams(max_tokens=30_000, ignore_eos=True, seed=1)
    for _ in range(20):
        client.add("brief", params=params, plugin_args={"slow": {"seconds": 0.01}})
        client.send_message(ABORT, ["brief"])
        client.send_message(ABORT, ["brief"])
    settle(client)


# Utilities


@pytest.mark.parametrize(
    "method", ["close", "step", "__init__", "_scheduler", "", "scheduler_stats ", "abort_requests"]
)
def test_what_is_not_on_the_list_is_not_called(client, method):
    answer = client.call(method)
    assert answer.failure.startswith("method: expected one of call_part, collective_rpc, ")
    assert f", got {method!r}" in answer.failure
    assert answer.kind == "RequestError"


@pytest.mark.parametrize(
    ("method", "args", "text"),
    [
        ("reset_prefix_cache", ["yes"], "recompute_running: expected"),
        ("why_waiting", [3], "request_ids: expected"),
        ("why_waiting", [[3]], "request_ids[0]: expected"),
        ("why_waiting", [], "why_waiting: expected 1 arguments, got 0"),
        ("live_change", ["prepare", {"manifest": {"hardpoint": 3}}], "change."),
        ("scheduler_stats", [1, 2], "scheduler_stats: expected 0 arguments, got 2"),
    ],
)
def test_wrong_arguments_are_reported_to_the_caller(client, method, args, text):
    answer = client.call(method, *args)
    assert answer.failure.startswith(text)
    assert answer.kind == "RequestError"


def test_calls_that_are_no_calls(client):
    for message in ([], [0], [0, "x", "scheduler_stats"], [0, 1, 2], {"method": "x"}, "x", None):
        client.send_message(UTILITY, message)
    client.call("scheduler_stats")


# Strangers


def test_a_second_client_on_the_output_address_harms_no_other(client):
    """Anything that connects to the input address is not the engine."""
    stranger = client.context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"stranger")
    stranger.connect(client.router.getsockopt_string(zmq.LAST_ENDPOINT))
    stranger.send_multipart([ADD, *whole()])
    assert client.router.poll(PATIENCE_S * 1000)
    assert client.router.recv_multipart()[0] == b"stranger"
    assert IDENTITY != b"stranger"
    stranger.close(0)


# The end


def test_after_shutdown_began_there_is_an_answer(endless, tmp_path):
    settings = {
        "plugins": {"enable": ["support.plugins.slow:Slow"]},
        "engine": {"drain_seconds": 600.0},
    }
    client = RawClient(process_config(endless, settings))
    held = HeldSteps(tmp_path)
    with contextlib.closing(client):
        client.add("before", params=GREEDY_200, plugin_args=held.slow(0.3))
        client.receive()
        os.kill(client.process.pid, signal.SIGTERM)
        wait_until(lambda: client.call("scheduler_stats").failure, PATIENCE_S, "the drain")
        assert "the engine is shutting down" in client.call("scheduler_stats").failure
        client.send(b"\xff", b"\xff")
        client.send_message(ABORT, ["nobody"])
        client.add("after")
        assert "the engine is shutting down" in client.ends(["after"])["after"].error
        held.let_go()
        ended = client.ends(["before"])["before"]
        assert ended.finish_reason is FinishReason.LENGTH
        assert client.process.wait(PATIENCE_S) == 0
