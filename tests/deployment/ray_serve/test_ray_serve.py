"""Serve on two nodes: the tokens of one engine, while engines come, go and die."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.processes import ROOT
from support.scripted_folder import write_config
from support.waiting import wait_until

from hardpoint import LLM, SamplingParams
from hardpoint.command_plugins import collect_commands
from hardpoint.configuration.loading import config_from
from hardpoint.testing import scripted_config, write_scripted_model

pytestmark = pytest.mark.nightly

LENGTH = 200
PATIENCE_S = 120
RUNNING = "hardpoint:num_requests_running"
ENGINES = {
    "engine_cpus": 0,
    "ingress_cpus": 0,
    "engine_resources": {"engine": 1},
    "ingress_resources": {"ingress": 1},
    "health_seconds": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def expected(model):
    """Return the texts that one engine gives to prompts."""
    with LLM(config=scripted_config(model)) as llm:

        def texts(prompts, length=LENGTH):
            params = [
                SamplingParams(max_tokens=length, temperature=0.8, seed=n, ignore_eos=True)
                for n in range(len(prompts))
            ]
            return [output.outputs[0].text for output in llm.generate(prompts, params)]

        yield texts


class Served:
    """An application of ours on Serve."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def pids(self):
        """The engines that the ingress has opened."""
        from ray import serve

        return serve.get_app_handle("hp").pids.remote().result()

    def num_engines(self):
        return len(self.pids())

    def running(self):
        from ray import serve

        states = serve.status().applications["hp"].deployments["engines"].replica_states
        return states.get("RUNNING", 0)

    def text(self, n, prompt, length=LENGTH):
        response = self.client.post("/v1/completions", json=body(n, prompt, length))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def stream(self, n, prompt, length=LENGTH, began=None):
        """Return the text of a stream, and how often it was resumed."""
        text, resumes = "", 0
        request = body(n, prompt, length) | {"stream": True}
        with self.client.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    resumes = max(resumes, choice.get("num_resumes") or 0)
                if began is not None and text:
                    began.release()
                    began = None
        return text, resumes


def body(n, prompt, length):
    return {
        "model": "scripted",
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0.8,
        "seed": n,
        "ignore_eos": True,
    }


@pytest.fixture
def served(model, port):
    """Deploy the application with options, and delete it at the end."""
    from ray import serve

    from hardpoint.ray_serve.application import bound
    from hardpoint.ray_serve.options import options_of

    def deploy(tables=None, **options):
        tables = {"server": {"served_names": ["scripted"]}, **(tables or {})}
        config, sources = config_from(scripted_config(model, tables))
        command = collect_commands(config, sources)["serve"].command
        made = bound(config, sources, command.application, options_of(ENGINES | options, "test"))
        serve.run(made, name="hp", route_prefix="/")
        return Served(port)

    try:
        yield deploy
    finally:
        serve.delete("hp")


def prompts_of(count):
    return [f"prompt {n} of them" for n in range(count)]


def test_engines_of_two_nodes_give_the_tokens_of_one(served, expected):
    app = served(min_engines=2, max_engines=2)
    wait_until(lambda: app.num_engines() == 2, PATIENCE_S, "two engines")
    prompts = prompts_of(12)
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(app.text, range(12), prompts))
        streams = list(pool.map(app.stream, range(12), prompts))
    assert texts == expected(prompts)
    assert [text for text, _ in streams] == texts
    assert app.client.get("/health").status_code == 200
    invalid = body(0, "x", 2) | {"temperature": -1}
    assert app.client.post("/v1/completions", json=invalid).status_code == 400


def test_streams_go_on_when_an_engine_is_killed(served, expected):
    app = served(min_engines=2, max_engines=2)
    wait_until(lambda: app.num_engines() == 2, PATIENCE_S, "two engines")
    prompts, began = prompts_of(4), threading.Semaphore(0)
    killed = app.pids()
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(app.stream, n, prompts[n], 1500, began) for n in range(4)]
        for _ in prompts:
            assert began.acquire(timeout=PATIENCE_S)
        os.kill(killed[0], signal.SIGKILL)
        results = [stream.result() for stream in streams]
    assert [text for text, _ in results] == expected(prompts, 1500)
    assert any(resumes for _, resumes in results)
    wait_until(lambda: app.num_engines() == 2, PATIENCE_S, "another engine")
    assert app.pids()[0] != killed[0]
    assert app.pids()[1] == killed[1]


def test_a_client_that_goes_ends_its_request(served):
    app = served(tables={"stats": {"sinks": ["prometheus"]}})

    def running():
        lines = app.client.get("/metrics").text.splitlines()
        values = [line.split()[-1] for line in lines if line.startswith(RUNNING)]
        return sum(map(float, values))

    request = body(1, "long", 3900) | {"stream": True}
    with app.client.stream("POST", "/v1/completions", json=request) as response:
        lines = response.iter_lines()  # kept, for the stream ends with it
        next(lines)
        wait_until(lambda: running() == 1, PATIENCE_S, "the request to run")
    wait_until(lambda: running() == 0, PATIENCE_S, "the request to end")


@pytest.mark.timing  # Serve measures what waits, and starts an engine within a time
def test_engines_follow_the_work_that_waits(served, expected):
    app = served(
        tables={"scheduler": {"max_num_seqs": 1}},
        min_engines=1,
        max_engines=2,
        waiting_seconds=0.2,
        scale_up_seconds=1,
        scale_down_seconds=2,
        look_back_seconds=2,
    )
    prompts = prompts_of(6)
    ended = threading.Event()

    def work(n):
        texts = []
        while not ended.is_set():
            texts.append(app.stream(n, prompts[n])[0])
        return texts

    with ThreadPoolExecutor(6) as pool:
        try:
            works = [pool.submit(work, n) for n in range(5)]
            wait_until(lambda: app.num_engines() == 2, PATIENCE_S, "a second engine")
        finally:
            ended.set()
        results = [job.result() for job in works]
        ended.clear()
        light = pool.submit(work, 5)  # one request at a time, while an engine goes
        try:
            wait_until(lambda: app.running() == 1, PATIENCE_S, "one engine")
            wait_until(lambda: app.num_engines() == 1, PATIENCE_S, "one engine of the ingress")
        finally:
            ended.set()
        results.append(light.result())
    for texts, text in zip(results, expected(prompts), strict=True):
        assert set(texts) == {text}


def test_streams_go_on_when_the_other_node_is_killed(served, expected, nodes):
    app = served(min_engines=2, max_engines=2)
    wait_until(lambda: app.num_engines() == 2, PATIENCE_S, "two engines")
    prompts = prompts_of(8)
    began = threading.Semaphore(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            streams = [
                pool.submit(app.stream, n, prompts[n], 1500, began) for n in range(len(prompts))
            ]
            for _ in prompts:
                assert began.acquire(timeout=PATIENCE_S)
            nodes.kill_second()
            results = [stream.result() for stream in streams]
    finally:
        nodes.add()
    assert [text for text, _ in results] == expected(prompts, 1500)
    assert any(resumes for _, resumes in results)
    wait_until(lambda: app.num_engines() == 2, PATIENCE_S, "another engine")
    assert app.text(0, prompts[0]) == expected(prompts)[0]


def serving(folder, model, **options):
    """Start `hardpoint serve --on ray`; return its process."""
    write_config(folder, model, 'server.served_names = ["scripted"]')
    program = [sys.executable, "-m", "hardpoint", "serve", "--on", "ray"]
    for name, value in {"engine_cpus": 0, "ingress_cpus": 0, **options}.items():
        program += ["--ray", f"{name}={value}"]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=folder)


@pytest.mark.usefixtures("nodes")
def test_the_command_serves_until_a_signal(model, port, expected, tmp_path):
    process = serving(
        tmp_path,
        model,
        engine_resources='{"engine": 1}',
        ingress_resources='{"ingress": 1}',
        name="by-command",
    )
    try:
        line = process.stdout.readline()
        assert line == f"Serving {model} where Ray Serve of this cluster listens already\n"
        assert Served(port).text(0, "by command") == expected(["by command"])[0]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
    assert code == 0


@pytest.mark.usefixtures("port")
def test_a_signal_ends_a_start_without_resources(model, tmp_path):
    from ray import serve

    process = serving(tmp_path, model, engine_resources='{"none": 1}', name="waiting")
    try:
        wait_until(lambda: "waiting" in serve.status().applications, PATIENCE_S)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
    assert code == 130
    assert serve.status().applications == {}


def test_the_example_deploys_asks_and_deletes(model, port, tmp_path):
    from ray import serve

    with LLM(config=scripted_config(model)) as llm:
        (alone,) = llm.generate("by example", SamplingParams(max_tokens=32, temperature=0.0))
    write_config(tmp_path, model, "")
    example = runpy.run_path(str(ROOT / "examples" / "ray_serve_engines.py"))
    texts = example["main"](
        str(model),
        ["by example"],
        f"http://127.0.0.1:{port}",
        config=str(tmp_path / "hardpoint.toml"),
        **ENGINES,
    )
    assert texts == [alone.outputs[0].text]
    assert serve.status().applications == {}
