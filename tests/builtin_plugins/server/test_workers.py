"""Several processes that answer the requests of one server (`server.workers`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest
from support.scripted_server import REPLIES, TAGS
from support.serve_program import TESTS, enabling, serving
from support.waiting import PATIENCE_S, HeldSteps, alive, wait_until
from websockets.sync.client import connect

from hardpoint.testing import write_scripted_model

KEYS = {name: f"{name}-0123456789abcdef" for name in ("slow", "alice", "bob", "carol")}
SAY = {"prompt": "say abc", "max_tokens": 20, "temperature": 0}
LONG = {"prompt": "loop", "max_tokens": 800, "temperature": 0, "ignore_eos": True}
TEXT = " abc abc abc"
COMPLETIONS = "/v1/completions"
PER_MINUTE = 5
BROKEN = """
from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Phase


class Broken(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        pass

    def apply(self, logits, rows):
        raise ValueError("broken")


class Sized(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        pass

    class Options(plugins.Options):
        size: int = 0

    def apply(self, logits, rows):
        return logits

    def dump_state(self):
        return {"size": self.options.size}
"""
WORKERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_scripted_model(
        tmp_path_factory.mktemp("model"),
        REPLIES,
        special_tokens=TAGS,
        max_position_embeddings=1024,
    )


def write_keys(folder, *names):
    path = folder / "keys.toml"
    limits = {"slow": f"requests_per_minute = {PER_MINUTE}\n"}
    tables = [
        f'[[key]]\nname = "{name}"\nkey = "{KEYS[name]}"\n{limits.get(name, "")}' for name in names
    ]
    path.touch(0o600)
    path.write_text("\n".join(tables))
    return path


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    keys = write_keys(folder, "slow", "alice", "bob")
    (folder / "broken_plugin.py").write_text(BROKEN)
    enabled = enabling(
        '{use="broken_plugin:Broken",name="broken"}',
        '{use="broken_plugin:Sized",name="sized"}',
        '"support.plugins.slow:Slow"',
    )
    with serving(
        folder,
        model,
        f"server.workers = {WORKERS}",
        f'server.keys_file = "{keys}"',
        f'server.admin = "unix:{folder / "admin"}"',
        "server.limits.conversations = 3",
        "server.keep_alive_seconds = 60",
        options=(
            *("--set", 'stats.sinks=["prometheus"]'),
            *enabled["options"],
            *("--set", 'plugins.live=["sized","priority"]'),
        ),
        environment={"PYTHONPATH": os.pathsep.join((str(folder), TESTS))},
    ) as running:
        running.folder = folder
        yield running


def headers(name="alice"):
    return {"authorization": f"Bearer {KEYS[name]}"}


def ask(server, path=COMPLETIONS, key="alice", **body):
    """Ask over a connection of its own, which any worker may accept."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=headers(key)) as client:
        return client.post(path, json={**SAY, **body}) if path == COMPLETIONS else client.get(path)


def admin(server, method, path, **body):
    transport = httpx.HTTPTransport(uds=str(server.folder / "admin"))
    with httpx.Client(transport=transport, base_url="http://admin", timeout=PATIENCE_S) as client:
        return client.request(method, path, json=body or None)


def workers_of(server):
    return {
        child.name(): child
        for child in psutil.Process(server.process.pid).children()
        if child.name().startswith("Worker_")
    }


def ports_of(server):
    """Return the ports of the clients that each worker has connections with, by its name."""
    port = int(server.url.rpartition(":")[2])
    return {
        name: {
            connection.raddr.port
            for connection in process.net_connections()
            if connection.status == "ESTABLISHED" and connection.laddr.port == port
        }
        for name, process in workers_of(server).items()
    }


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


class Stream:
    """A streamed completion that a thread reads; `text` grows."""

    def __init__(self, server, key="alice", **body):
        self.text, self.failure, self.done = "", None, False
        self.network = None  # of httpcore
        self.client = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=headers(key))
        self._body = {**LONG, **body, "stream": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        try:
            with self.client.stream("POST", COMPLETIONS, json=self._body) as response:
                self.network = response.extensions["network_stream"]
                if response.status_code != 200:
                    self.failure = response.read().decode()
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        self.text += event["choices"][0]["text"] if event.get("choices") else ""
        except (httpx.HTTPError, KeyError) as error:
            self.failure = error

    def begun(self):
        wait_until(lambda: self.text or self.failure)
        return self

    def end(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self

    @property
    def port(self):
        """The port of the client's end."""
        return self.network.get_extra_info("client_addr")[1]


def metric(server, name, path="/metrics"):
    lines = ask(server, path).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def spread(server, count, **body):
    """Return streams of several workers: at least so many, all of which have begun."""
    streams = [Stream(server, **body) for _ in range(count)]
    for stream in streams:
        stream.begun()

    def is_spread():
        ports = {stream.port for stream in streams}
        if sum(bool(ports & connected) for connected in ports_of(server).values()) > 1:
            return True
        streams.append(Stream(server, **body).begun())
        return False

    wait_until(is_spread)
    return streams


def settled(server, name):
    """Return a metric once it has not grown for a while."""
    readings = []

    def is_settled():
        readings.append(metric(server, name))
        time.sleep(0.1)
        return len(readings) >= 5 and len(set(readings[-5:])) == 1

    wait_until(is_settled)
    return readings[-1]


def test_all_workers_answer_with_the_same_tokens(server):
    assert len(workers_of(server)) == WORKERS
    streams = spread(server, 32)
    assert sum(map(len, ports_of(server).values())) >= 32
    texts = {stream.end().text for stream in streams}
    assert len(texts) == 1
    assert all(stream.done for stream in streams)
    assert {text_of(ask(server)) for _ in range(8)} == {TEXT}


def test_the_rate_of_a_key_is_that_of_all_workers(server):
    statuses = [ask(server, key="slow").status_code for _ in range(4 * PER_MINUTE)]
    assert statuses.count(200) == PER_MINUTE
    refused = ask(server, key="slow")
    assert refused.json()["error"]["message"].startswith(
        f"rate: expected at most {PER_MINUTE} requests in a minute with this key; try again in "
    )
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(server, key="bob").status_code == 200


def test_conversations_of_a_key_are_counted_in_all_workers(server):
    url = server.url.replace("http", "ws") + "/inference/v1/sessions"
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(url, additional_headers=headers()))
        for _ in range(8):
            with pytest.raises(Exception, match="429"):
                connect(url, additional_headers=headers())
        with connect(url, additional_headers=headers("bob")) as other:
            other.send(json.dumps({"type": "prompt", "prompt": "say abc", "max_tokens": 20}))
            assert json.loads(other.recv(PATIENCE_S))
    wait_until(lambda: _can_connect(url))


def _can_connect(url):
    try:
        with connect(url, additional_headers=headers()):
            pass
    except Exception:
        return False
    return True


def test_metrics_are_those_of_all_workers(server):
    name, tokens = "hardpoint:http_requests_total", "hardpoint:generation_tokens_total"
    route = f'{name}{{route="{COMPLETIONS}",status="200"}}'
    before = metric(server, route), settled(server, tokens)
    for _ in range(12):
        assert text_of(ask(server)) == TEXT
    assert {metric(server, route) for _ in range(8)} == {before[0] + 12}
    grown = 12 * (len(TEXT) + 1)
    wait_until(lambda: metric(server, tokens) == before[1] + grown)
    assert {metric(server, tokens) for _ in range(8)} == {before[1] + grown}
    admins = admin(server, "GET", "/metrics").text
    assert f"{route} {before[0] + 12}" in admins
    assert 'hardpoint:num_requests_running{engine="0"' in admins
    wait_until(lambda: metric(server, "hardpoint:http_requests_open") == 1)


def test_a_client_that_goes_ends_its_request(server, tmp_path):
    stream = Stream(server, n=3, plugin_args=HeldSteps(tmp_path).slow(0.1)).begun()
    wait_until(lambda: len(admin(server, "GET", "/requests").json()["requests"]) == 3)
    stream.network.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    wait_until(lambda: admin(server, "GET", "/requests").json()["requests"] == [])
    stream.end()


def test_administrators_steer_all_workers(server):
    paused = admin(server, "POST", "/pause", mode="keep")
    assert paused.json() == {"is_paused": True, "is_sleeping": False}
    refusals = [ask(server) for _ in range(8)]
    assert {refused.status_code for refused in refusals} == {503}
    assert refusals[0].json()["error"]["code"] == "paused"
    assert admin(server, "POST", "/resume").status_code == 200
    assert {text_of(ask(server)) for _ in range(8)} == {TEXT}
    assert admin(server, "POST", "/plugins/policy", use="priority").json() == {"policy": "priority"}
    assert {text_of(ask(server, priority=1)) for _ in range(8)} == {TEXT}
    settings = admin(server, "GET", "/engines/settings").json()["settings"]
    assert settings["scheduler.policy"]["origin"].startswith("administrator ")
    listed = admin(server, "GET", "/plugins").json()["plugins"]
    assert "priority" in [
        plugin["name"] for plugin in listed if plugin["kind"] == "scheduling_policies"
    ]


def test_live_changes_reach_all_workers(server):
    """Each worker admits requests itself, so the plugin must be on in all of them, or in none."""
    before = admin(server, "GET", "/engines/settings").json()
    use = {"plugin_args": {"sized": {}}}
    assert {ask(server, **use).status_code for _ in range(8)} == {200}
    changed = admin(
        server, "PATCH", "/engines/settings", plugins={"options": {"sized": {"size": 3}}}
    )
    assert changed.status_code == 200, changed.text
    assert changed.json()["generation"] == before["generation"] + 1
    assert admin(server, "GET", "/plugins").json()["states"]["sized"] == {"size": 3}
    assert {ask(server, **use).status_code for _ in range(8)} == {200}
    wrong = admin(
        server, "PATCH", "/engines/settings", plugins={"options": {"sized": {"size": "x"}}}
    )
    assert "plugin.sized.size: expected" in wrong.json()["error"]["message"]
    refused = admin(server, "PATCH", "/engines/settings", plugins={"disable": ["broken"]})
    assert "'broken' is not among the plugins" in refused.json()["error"]["message"]
    assert (
        admin(server, "PATCH", "/engines/settings", plugins={"disable": ["sized"]}).status_code
        == 200
    )

    def all_refuse():
        return {ask(server, **use).status_code for _ in range(8)} == {400}

    wait_until(all_refuse)  # a worker switches once it has read the notice
    assert "'sized' was switched off" in ask(server, **use).json()["error"]["message"]
    listed = {admin(server, "GET", "/engines/settings").json()["generation"] for _ in range(4)}
    assert listed == {before["generation"] + 2}


def test_administrators_end_requests_of_any_worker(server, tmp_path):
    slow = HeldSteps(tmp_path).slow(0.1)
    streams = [Stream(server, n=2, plugin_args=slow).begun() for _ in range(6)]
    live = admin(server, "GET", "/requests").json()["requests"]
    assert not [
        live_request for live_request in live if not live_request["request_id"].isprintable()
    ]
    ids = sorted({live_request["external_id"] for live_request in live})
    aborted = admin(server, "POST", "/requests/abort", request_ids=ids).json()["aborted"]
    assert sorted(aborted) == ids
    for stream in streams:
        stream.end()
    wait_until(lambda: admin(server, "GET", "/requests").json()["requests"] == [])


def test_a_plugin_that_keeps_failing_is_quarantined_in_all_workers(server):
    use = {"plugin_args": {"broken": {}}}
    failed = [ask(server, **use) for _ in range(3)]
    assert {answer.status_code for answer in failed} == {500}
    wait_until(lambda: all(ask(server, **use).status_code == 400 for _ in range(8)))
    refused = ask(server, **use).json()["error"]["message"]
    # A worker may pass a request to the engine before it is notified of the third fault.
    ended = re.match(r"plugin_args.broken: the plugin is quarantined, for it ended (\d+) ", refused)
    assert ended, refused
    assert int(ended[1]) >= 3

    def faults():
        return {ask(server, "/health").json()["faults"]["broken"] for _ in range(8)}

    wait_until(lambda: len(faults()) == 1)
    assert faults().pop() >= 3


@pytest.mark.nightly
def test_a_worker_that_dies_ends_no_one_else(server, tmp_path):
    held = HeldSteps(tmp_path)
    streams = spread(server, 24, max_tokens=900, plugin_args=held.slow(0.1))
    assert admin(server, "POST", "/pause", mode="keep").status_code == 200
    held.let_go()
    ports = {stream: stream.port for stream in streams}
    ours = set(ports.values())
    of_worker = {name: ours & connected for name, connected in ports_of(server).items()}
    name = max(of_worker, key=lambda name: len(of_worker[name]))
    victim, lost = workers_of(server)[name], of_worker[name]
    assert 0 < len(lost) < len(ours)
    victim.kill()
    replaced = f"{name.lower().replace('_', ' ')} ended, and is replaced"
    wait_until(lambda: replaced in server.output)
    wait_until(lambda: workers_of(server).get(name, victim).pid != victim.pid)
    left = len(streams) - len(lost)
    wait_until(lambda: len(admin(server, "GET", "/requests").json()["requests"]) <= left)
    assert admin(server, "POST", "/resume").status_code == 200
    for stream, port in ports.items():
        stream.end()
        assert stream.done == (port not in lost), stream.failure
    wait_until(lambda: admin(server, "GET", "/requests").json()["requests"] == [])
    wait_until(lambda: metric(server, "hardpoint:http_requests_open") == 1)
    assert {text_of(ask(server)) for _ in range(8)} == {TEXT}


def test_a_worker_that_replaces_another_knows_which_plugins_are_quarantined(server):
    """After the tests of quarantine and of a worker that dies."""
    for _ in range(4 * WORKERS):  # whichever accepts the connection
        answer = ask(server, plugin_args={"broken": {}})
        assert answer.status_code == 400
        assert "the plugin is quarantined, for it ended" in answer.json()["error"]["message"]


def test_keys_are_read_again_in_all_workers(server):
    assert ask(server, key="carol").status_code == 401
    write_keys(server.folder, "slow", "alice", "carol")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: all(ask(server, key="carol").status_code == 200 for _ in range(8)))
    assert {ask(server, key="bob").status_code for _ in range(8)} == {401}


def test_an_engine_that_dies_is_restarted_for_all(server):
    (engine,) = [
        child
        for child in psutil.Process(server.process.pid).children()
        if child.name() == "EngineCore"
    ]
    streams = [Stream(server, max_tokens=300) for _ in range(8)]
    for stream in streams:
        stream.begun()
    engine.kill()
    assert [stream.end().failure for stream in streams] == [None] * 8
    assert {len(stream.text) for stream in streams} == {300}
    assert all(stream.done for stream in streams)

    def restarts():
        return {ask(server, "/health").json().get("restarts") for _ in range(8)}

    wait_until(lambda: restarts() == {1})


@pytest.mark.nightly
def test_a_drain_lets_requests_finish_and_serves_administrators_until_then(server):
    """The last test of the shared server."""
    streams = [Stream(server, max_tokens=200) for _ in range(4)]
    for stream in streams:
        stream.begun()
    assert admin(server, "POST", "/pause", mode="keep").status_code == 200
    assert admin(server, "POST", "/drain").status_code == 200
    time.sleep(0.3)  # in which nothing may end
    assert admin(server, "POST", "/resume").status_code == 200
    assert [stream.end().failure for stream in streams] == [None] * 4
    assert all(stream.done for stream in streams)
    assert server.process.wait(PATIENCE_S) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


@pytest.mark.nightly
def test_workers_end_with_the_process_that_started_them(model, tmp_path):
    with serving(tmp_path, model, "server.workers = 2") as server:
        names = {"EngineCore", "Worker_0", "Worker_1"}  # besides what forks them in tests
        below = [process for process in server.processes() if process.name() in names]
        assert len(below) == 3
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(alive(process.pid) for process in below))


@pytest.mark.nightly
def test_a_dead_engine_that_is_not_restarted_ends_the_server(model, tmp_path):
    with serving(tmp_path, model, "server.workers = 2", 'server.restart = "never"') as server:
        assert httpx.post(server.url + COMPLETIONS, json=SAY, timeout=PATIENCE_S).status_code == 200
        (engine,) = [process for process in server.processes() if process.name() == "EngineCore"]
        engine.kill()
        assert server.process.wait(PATIENCE_S) == 3
        assert "the engine has ended, and so does the server" in server.output
