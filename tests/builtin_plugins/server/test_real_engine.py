"""The server on a real engine with the scripted model."""

import asyncio
import json
import socket

import pytest
from support.async_requests import config
from support.http_server import running
from support.waiting import PATIENCE_S, wait_until

from hardpoint import AsyncLLM
from hardpoint.testing import write_scripted_model

LONG = "0123456789" * 100
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_scripted_model(
        tmp_path_factory.mktemp("model"),
        {"say abc": " abc abc abc", "long": LONG},
        max_position_embeddings=1 << 13,
    )
    llm = AsyncLLM(config=config(folder, server={"heartbeat_seconds": 0}))
    with running(llm) as running_server:
        yield running_server
    llm.close()


def ask(prompt, **fields):
    return {"prompt": prompt, "temperature": 0, "max_tokens": 5000, **fields}


def test_the_text_is_the_same_whole_and_streamed(server):
    whole = server.post(COMPLETIONS, ask("say abc")).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (" abc abc abc", "stop")
    events = server.events(COMPLETIONS, ask("say abc", stream=True))
    assert "".join(event["choices"][0]["text"] for event in events) == " abc abc abc"


def test_a_slow_reader_gets_fewer_and_longer_events(server):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.settimeout(PATIENCE_S)
    body = json.dumps(ask("long", stream=True, logprobs=20)).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    assert connection.recv(15) == b"HTTP/1.1 200 OK"

    async def until_done():
        while await server.engine.engines.live_requests():
            await asyncio.sleep(0.05)

    server.call(until_done)
    received = connection.makefile("rb").read()
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in received.split(b"\n")
        if line.startswith(b"data: {")
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == LONG
    assert len(events) < len(LONG) / 2


def test_a_disconnect_frees_the_blocks_at_once(server):
    connection = server.socket()
    slow = {"plugin_args": {"slow": {"seconds": 0.05}}, "ignore_eos": True}
    body = json.dumps(ask("long", stream=True, **slow)).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    connection.close()

    async def until_free():
        while (await server.engine.engines.scheduler_stats()).kv_cache_usage > 0:
            await asyncio.sleep(0.001)
        assert await server.engine.engines.live_requests() == []

    server.call(until_free)
    wait_until(lambda: server.service.load.open == 0)


def test_errors_of_the_engine_name_their_field(server):
    cases = {
        "temperature": (-1, "temperature: expected a number >= 0, got -1"),
        "top_p": (2, "top_p: expected a number <= 1"),
        "stop_token_ids": ([10**6], "stop_token_ids[0]: expected a token id below"),
        "logit_bias": ({"999999": 1}, "logit_bias"),
        "plugin_args": ({"nothing": {}}, "plugin_args.nothing: "),
    }
    for field, (value, message) in cases.items():
        answer = server.post(COMPLETIONS, ask("say abc", **{field: value}))
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["message"].startswith(message), error
        assert error["param"].startswith(field), error
