"""The soak notices leaks and wrong answers."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from types import SimpleNamespace

import pytest
import server_state
import soak
import soak_load
from backends import cpu_seconds
from http_streams import Client, run_on_uvloop
from server_state import holdings_of, leaks, parse_metrics
from soak_load import Counts, Point, disconnect
from support.fake_api_server import Answer, FakeServer, serving
from support.waiting import wait_until

from hardpoint.testing import ScriptedClock

IDLE = """
# HELP hardpoint:num_requests_running Requests that run.
hardpoint:num_requests_running{model_name="x",engine="0"} 0.0
vllm:num_requests_running{model_name="x",engine="0"} 7.0
hardpoint:num_requests_waiting 0.0
hardpoint:num_requests_waiting_by_reason{reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.0
"""


def answer(number: int, body: dict, running: int) -> Answer:
    """Answer with as many chunks as are asked for, or fail as asked for."""
    count = body["max_tokens"]
    if (at := body.get("plugin_args", {}).get("fails_at")) and at["tokens"] < count:
        return Answer(chunks=at["tokens"], fault="logits processor 'fails_at': apply failed")
    return Answer(chunks=count, gap=0.0005)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the soak briefly on a fake server; returns the exit code, the output and the figures.

    Its time passes when it is read: the load is about 100 requests, on each machine.
    """
    clock = ScriptedClock(tick=0.002)
    passing = SimpleNamespace(
        monotonic=clock, process_time=time.process_time, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(soak, "time", passing)
    monkeypatch.setattr(server_state, "time", passing)
    monkeypatch.setattr(server_state, "REST_S", 2.0)
    monkeypatch.setattr(server_state, "REST_PERIOD_S", 0.05)
    monkeypatch.setattr(server_state, "IDLE_S", 0.01)
    monkeypatch.setattr(server_state, "IDLE_PERIOD_S", 0.02)
    monkeypatch.setattr(soak, "_QUESTIONS", 9)
    monkeypatch.setattr(soak_load, "HALF_CLOSED_S", 0.05)

    def run(choose=answer, metrics=lambda: IDLE, *more):
        server = FakeServer(metrics=metrics)
        server.choose = lambda number, body: choose(number, body, server.running)
        with serving(server):
            arguments = ["--url", server.url, "--seconds", "0.2", "--streams", "8"]
            arguments += ["--input-tokens", "12", "--output-tokens", "7"]
            arguments += ["--disconnects", "0.3", "--faulty", "0.3"]
            arguments += ["--json", str(tmp_path / "found.json"), *more]
            monkeypatch.setattr(sys, "argv", ["soak.py", *arguments])
            code = 0
            try:
                soak.main()
            except SystemExit as end:
                code = end.code
        result = json.loads((tmp_path / "found.json").read_text())
        return code, capsys.readouterr().out, result["without"]

    return run


def test_nothing_is_left(run):
    code, output, result = run(answer, lambda: IDLE, "--pid", str(os.getpid()), "--memory", "200")
    assert result["problems"] == []
    assert output.rstrip().endswith("soak: PASSED: nothing is left, no answer is wrong")
    assert code == 0
    assert set(result["left"]) <= {point.value for point in Point}
    assert result["left"]
    assert result["ends"]["all: survived"] > 0
    assert result["failed"].keys() == {"stream: logits processor 'fails_at': apply failed"}
    assert result["compared"] > 0
    assert result["different"] == 0
    assert result["ends"]["all: whole"] > 0
    assert result["times"]["all"]["ttft"]["p50"] > 0
    assert result["before"]["descriptors"] >= result["after"]["descriptors"]


def test_wrong_answers_are_noticed(run):
    def wrong(number, body, running):
        if running > 1 and number % 5 == 0:
            return Answer(chunks=body["max_tokens"] + 1)
        return answer(number, body, running)

    code, output, result = run(wrong)
    assert code == 1
    (problem,) = result["problems"]
    assert Counts(compared=20, wrong=["one"]).problems(0.05) == []
    assert problem.endswith(f"of {result['compared']} answers differ from answers without load")
    assert output.rstrip().endswith("soak: FAILED")


def test_failures_of_other_requests_are_noticed(run):
    def failing(number, body, running):
        if running > 1 and number % 10 == 0:
            return Answer(status=500, body="{}")
        return answer(number, body, running)

    code, _, result = run(failing, lambda: IDLE, "--faulty", "0", "--disconnects", "0")
    assert code == 1
    assert result["lost"].keys() == {"all: 500 {}"}
    expected = f"{result['lost']['all: 500 {}']} requests without a fault of their own failed"
    assert result["problems"] == [expected]


def test_what_is_left_in_the_engine_is_noticed(run):
    left = {
        "num_requests_waiting 0.0": "num_requests_waiting 3",
        "hardpoint:num_requests_running{": "other{",
        "vllm:kv_cache_usage_perc": "other",
    }
    text = IDLE
    for old, new in left.items():
        assert old in text
        text = text.replace(old, new)
    code, _, result = run(answer, lambda: text)
    assert code == 1
    expected = ["requests running: 7", "requests waiting: 3", "KV cache usage: not in /metrics"]
    assert [f"left after the load: {figure}" for figure in expected] == result["problems"][-3:]


def test_a_growing_number_of_tasks_is_noticed(run):
    numbers = iter(range(1000))
    code, _, result = run(answer, lambda: f"{IDLE}hardpoint:asyncio_tasks {next(numbers)}\n")
    assert code == 1
    assert result["problems"] == ["asyncio tasks: 0 before, 1 after"]


def test_what_a_process_holds():
    before = holdings_of(os.getpid())
    assert before["memory"] > 10
    files = [open(os.devnull) for _ in range(3)]  # noqa: SIM115
    after = holdings_of(os.getpid())
    for file in files:
        file.close()
    old = before["descriptors"]
    assert f"descriptors: {old} before the load, {old + 3} after it" in leaks(before, after, 100)

    def holdings(*values):
        return dict(zip(("processes", "descriptors", "threads", "memory"), values, strict=True))

    assert leaks(holdings(1, 6, 4, 100.0), holdings(1, 5, 4, 130.0), 31) == []
    assert leaks(holdings(1, 5, 4, 100.0), holdings(2, 5, 5, 130.0), 20) == [
        "processes: 1 before the load, 2 after it",
        "threads: 4 before the load, 5 after it",
        "memory: grew by 30 MiB, more than 20",
    ]


def test_cpu_time_of_a_process():
    start = cpu_seconds(os.getpid())
    wait_until(lambda: sum(range(100_000)) and cpu_seconds(os.getpid()) > start + 0.02, what="CPU")


def test_samples_of_one_name_are_added():
    text = (
        'hardpoint:num_requests_running{engine="0"} 1\nhardpoint:num_requests_running{engine="1"} 2'
    )
    assert parse_metrics(text) == {"requests running": 3.0}


@pytest.mark.parametrize("point", list(Point))
def test_clients_that_go_away(point, monkeypatch):
    monkeypatch.setattr(soak_load, "HALF_CLOSED_S", 0.2)

    async def go_away(server):
        client = Client(server.url)
        body = {"model": "fake", "prompt": "a b", "stream": True, "max_tokens": 4}
        await disconnect(client, "/v1/completions", body, point, random.Random(1))
        assert (await client.send("/v1/completions", body, 30)).chunks == 50
        await client.close()

    with serving(FakeServer(lambda number, body: Answer(chunks=50, gap=0.001))) as server:
        run_on_uvloop(go_away(server))
        assert len(server.bodies) == 1 + (point is not Point.IN_BODY)
        assert server.connections == 2
