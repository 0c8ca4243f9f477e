"""Several engines behind one server: a header names one, and metrics are of all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from support.http_server import running
from support.process.forked_python import forked_python
from support.process.harness import process_config
from support.scripted_folder import write_config
from support.serve_program import serving
from support.waiting import PATIENCE_S, wait_until

from hardpoint import AsyncLLM

TEXT = " abc abc abc"
SAY = {"prompt": "say abc", "max_tokens": 20, "temperature": 0}
COMPLETIONS = "/v1/completions"
HEADER = "X-data-parallel-rank"
OPTIONS = ("--set", "parallel.data=2")
ENGINES = {
    "parallel": {"data": 2},
    "server": {"port": 0},
    "stats": {"sinks": ["prometheus"]},
}


@pytest.fixture(scope="module")
def server(scripted):
    llm = AsyncLLM(config=process_config(scripted, ENGINES))
    with contextlib.closing(llm), running(llm) as server:
        yield server


def ask(server, rank=None, **fields):
    headers = {} if rank is None else {HEADER: rank}
    return server.post(COMPLETIONS, SAY | fields, headers=headers)


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def queries(server) -> list[int]:
    """Return how many requests each engine has begun."""

    async def counts():
        return [
            (await engine.scheduler_stats()).prefix_cache.requests
            for engine in server.engine.engines
        ]

    return server.call(counts)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_header_names_the_engine(server, rank):
    before = queries(server)
    for _ in range(3):
        assert text_of(ask(server, str(rank))) == TEXT
    grown = [now - then for now, then in zip(queries(server), before, strict=True)]
    assert grown == [3 if index == rank else 0 for index in (0, 1)]


def test_without_the_header_a_balancer_chooses(server):
    before = queries(server)
    for number in range(6):
        assert text_of(ask(server, cache_salt=f"own {number}")) == TEXT
    grown = [now - then for now, then in zip(queries(server), before, strict=True)]
    assert sum(grown) == 6
    assert min(grown) > 0


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("first", "X-data-parallel-rank: expected the number of an engine, got 'first'"),
        ("-1", "X-data-parallel-rank: expected the number of an engine, got '-1'"),
        ("", "X-data-parallel-rank: expected the number of an engine, got ''"),
        (
            "2",
            "data_parallel_rank: expected none, or one of 0, 1, the numbers of the engines "
            "(parallel.data), got 2",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_header_is_refused(server, header, message, stream):
    before = queries(server)
    refused = ask(server, header, stream=stream)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["message"], error["type"]) == (message, "invalid_request_error")
    assert queries(server) == before


def generated(server) -> dict[str, float]:
    """Return how many tokens came of each engine, by its label in the metrics."""
    text = server.client.get("/metrics").text
    pattern = r'^hardpoint:generation_tokens_total{engine="(\d)",.*} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


def test_metrics_and_health_are_of_all_engines(server):
    before = generated(server)
    tokens = [ask(server, str(rank)).json()["usage"]["completion_tokens"] for rank in (0, 1, 1)]
    after = generated(server)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown == {"0": tokens[0], "1": sum(tokens[1:])}
    health = server.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")


def test_one_engine_that_dies_leaves_a_server_that_serves(scripted):
    """`/health` stays 200, and requests that name the dead one are told so."""
    with (
        contextlib.closing(
            AsyncLLM(config=process_config(scripted, ENGINES), restart="never")
        ) as llm,
        running(llm) as server,
    ):
        os.kill(llm.engines[1].pid, signal.SIGKILL)
        wait_until(lambda: llm.engines[1].pid is None, PATIENCE_S, "its death")
        assert server.client.get("/health").status_code == 200
        assert text_of(ask(server)) == TEXT
        refused = ask(server, "1")
        assert (refused.status_code, server.client.get("/ready").status_code) == (503, 200)


def test_the_server_starts_several(scripted, tmp_path):
    with serving(tmp_path, scripted, options=OPTIONS) as program:
        response = program.client.post(COMPLETIONS, json=SAY, headers={HEADER: "1"})
        assert text_of(response) == TEXT
        refused = program.client.post(COMPLETIONS, json=SAY, headers={HEADER: "2"})
        assert "one of 0, 1" in refused.json()["error"]["message"]
        names = [process.name() for process in program.processes()]
        assert {"EngineCore", "EngineCore_DP1"} < set(names), names


@pytest.mark.nightly
def test_the_command_line_starts_several(scripted, tmp_path):
    write_config(tmp_path, scripted)
    command = ["-m", "hardpoint", "generate", "say abc", "--max-tokens", "20", *OPTIONS]
    done = forked_python().run(command, tmp_path, dict(os.environ))
    assert (done.returncode, done.stdout) == (0, TEXT + "\n"), done.stderr


@pytest.mark.nightly
def test_the_number_changes_while_the_server_answers(scripted, tmp_path):
    admin = f"unix:{tmp_path / 'admin.sock'}"
    with serving(tmp_path, scripted, f"server.admin = {admin!r}") as program:
        change = [sys.executable, "-m", "hardpoint", "scale", "--admin", admin, "--json"]

        def changed(*arguments):
            done = subprocess.run([*change, *arguments], capture_output=True, check=False)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        assert changed("2") == {"epoch": 1, "ranks": [0, 1]}
        response = program.client.post(COMPLETIONS, json=SAY, headers={HEADER: "1"})
        assert text_of(response) == TEXT
        assert changed("--retire", "0") == {"epoch": 2, "ranks": [1]}
        assert text_of(program.client.post(COMPLETIONS, json=SAY)) == TEXT
        load = program.client.get("/load").json()["load"]
        assert [(engine["rank"], engine["state"]) for engine in load["engines"]] == [(1, "serving")]
        assert load["prefill_tokens_per_second"] > 0
